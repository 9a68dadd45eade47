"""Pin the order of a rewritten graph, so that Inductor launches it as the schedule says.

    exchange 0 -> matmul 0 -> wait 0 -> exchange 1 -> matmul 1 -> ...

Data dependencies alone do not say that a transfer starts before the matmul that it hides under, nor that it is awaited
after it; and ranks that issued the transfers of one pair in different orders would wait for each other forever. So
every pinned node runs after the one before it: `announce`, what a schedule orders, and the collectives that are left
alone. Pointwise nodes stay free to be fused.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ..runtime import ops
from ..torch_adapter import run_after
from .edit import c10d
from .rules import RESHAPES
from .sites import is_collective


def is_pinned(node: Node) -> bool:
    place = node.meta.get("fo")
    return (place is not None and place.pinned) or is_collective(node) or node.target is ops.announce


def pin_order(graph: Graph, everything: bool = True) -> None:
    """Chain the pinned nodes in graph order; without `everything` only the first two: the ranks agree, then they talk.

    A graph in which nothing was rewritten keeps all other freedom.
    """
    previous: Node | None = None
    pinned = [node for node in graph.nodes if is_pinned(node)]
    for node in pinned if everything else pinned[:2]:
        if node.target is c10d.all_reduce.default and may_sum_in_place(node):
            node.target = c10d.all_reduce_.default
        if previous is not None and previous not in node.all_input_nodes:
            node = run_after(node, (previous,))
        previous = node


def may_sum_in_place(all_reduce: Node) -> bool:
    """Whether an all-reduce is all that ever reads what it sums, so that the sum may take its memory.

    Inductor finds out by itself where a node is not pinned. In one that is, it copies the whole tensor first.
    """
    reader, value = all_reduce, all_reduce.all_input_nodes[0]
    while value.target in RESHAPES and list(value.users) == [reader]:
        reader, value = value, value.all_input_nodes[0]
    return list(value.users) == [reader] and _makes_a_tensor(value)


def _makes_a_tensor(node: Node) -> bool:
    """Whether the value of a node is one tensor in memory of its own. (What is waited for is the memory of a transfer.)"""
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None
        and node.target.namespace in ("aten", "prims")  # type: ignore[union-attr]
        and not schema.is_mutable
        and [returned.alias_info for returned in schema.returns] == [None]
    )
