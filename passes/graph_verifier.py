"""What holds of every graph that leaves our passes, checked each time: a bug stops here, and not in a hang."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from ..errors import RewriteError
from ..runtime import ops
from .separability import strides_that_matter
from .sizes import as_size


def signature(graph: Graph) -> list[object]:
    """Shape, dtype and strides of each output of a graph."""
    (output,) = graph.find_nodes(op="output")
    found: list[object] = []
    for value in output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args:
        tensor = value.meta.get("val") if isinstance(value, Node) else None
        found.append(
            (tuple(map(as_size, tensor.shape)), tensor.dtype, strides_that_matter(tensor))
            if isinstance(tensor, torch.Tensor)
            else None
        )
    return found


def verify_graph(graph: Graph, expected: list[object], collectives: Mapping[str, bool]) -> None:
    """Raise RewriteError unless the graph is well-formed.

    `expected` is the `signature` from before; `collectives` says for each collective node by name whether it was to be
    taken out of the graph.
    """
    graph.lint()
    if signature(graph) != expected:
        raise RewriteError(f"the rewrite changed the graph's outputs from {expected} to {signature(graph)}")
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
