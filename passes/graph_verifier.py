"""What holds of every graph that leaves our passes, checked each time: a bug stops here, and not in a hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..errors import RewriteError
from ..runtime import ops
from .aliases import memory_of
from .separability import strides_that_matter
from .sizes import as_size

_OURS = ("_c10d_functional", "fo_compiler")


@dataclass(frozen=True)
class Signature:
    """What a rewrite must not change."""

    outputs: list[object]  # shape, dtype and strides of each
    memory: list[int]  # for each output the first one that lies in the same memory, by number
    effects: frozenset[str]  # what is done beside computing results: names of nodes


def signature(graph: Graph, *, of_reshapes: bool = True) -> Signature:
    """`of_reshapes`: count a reshape of an output as its memory, which it may be."""
    values = _outputs(graph)
    found: list[object] = []
    for value in values:
        tensor = value.meta.get("val") if isinstance(value, Node) else None
        found.append(
            (tuple(map(as_size, tensor.shape)), tensor.dtype, strides_that_matter(tensor))
            if isinstance(tensor, torch.Tensor)
            else None
        )
    first: dict[Node, int] = {}
    memory = [
        first.setdefault(memory_of(value, of_reshapes=of_reshapes), number) if isinstance(value, Node) else number
        for number, value in enumerate(values)
    ]
    return Signature(found, memory, frozenset(node.name for node in graph.nodes if _has_effect(node)))


def _outputs(graph: Graph) -> Sequence[object]:
    (output,) = graph.find_nodes(op="output")
    return output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args


def _has_effect(node: Node) -> bool:
    """Whether an op that is not a collective or ours does more than compute its result."""
    namespace = getattr(node.target, "namespace", None)
    return node.op == "call_function" and namespace not in _OURS and node.is_impure(impure_random=False)


def verify_graph(graph: Graph, expected: Signature, collectives: Mapping[str, bool]) -> None:
    """Raise RewriteError unless the graph is well-formed.

    `expected` is the `signature` from before; `collectives` says for each collective node by name whether it was to be
    taken out of the graph.
    """
    graph.lint()
    now = signature(graph, of_reshapes=False)
    if now.outputs != expected.outputs:
        raise RewriteError(f"the rewrite changed the graph's outputs from {expected.outputs} to {now.outputs}")
    before = expected.memory
    if shared := [(first, number) for number, first in enumerate(now.memory) if before[first] != before[number]]:
        raise RewriteError(f"the rewrite let outputs share their memory that did not: {shared}")
    if lost := expected.effects - now.effects:
        raise RewriteError(f"the rewrite lost what has effects: {', '.join(sorted(lost))}")
    names = {node.name for node in graph.nodes}
    for name, gone in collectives.items():
        if gone == (name in names):
            raise RewriteError(f"collective {name} should {'not ' if gone else ''}be in the rewritten graph")
    for node in graph.find_nodes(op="call_function", target=ops.exchange):
        waits = [user for user in node.users if user.target is ops.wait and user.args[0] is node]
        if len(waits) != 1 or len(node.users) != 1:
            raise RewriteError(f"transfer {node.name} is read by {list(node.users)}, not by exactly one wait")
        if waits[0].args[1] is not node.args[0]:
            raise RewriteError(f"{waits[0].name} does not keep what {node.name} sends alive")
