"""Pin the order of a rewritten graph, so that Inductor launches it as the schedule says.

    exchange 0 -> matmul 0 -> wait 0 -> exchange 1 -> matmul 1 -> ...

Data dependencies alone do not say that a transfer starts before the matmul that it hides under, nor that it is awaited
after it; and ranks that issued the transfers of one pair in different orders would wait for each other forever. So
every pinned node runs after the one before it, and so do the collectives that are left alone. Pointwise nodes stay
free to be fused.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ..torch_adapter import run_after
from .sites import is_collective


def is_pinned(node: Node) -> bool:
    place = node.meta.get("fo")
    return (place is not None and place.pinned) or is_collective(node)


def pin_order(graph: Graph) -> None:
    """Chain the pinned nodes in graph order."""
    previous: Node | None = None
    for node in [node for node in graph.nodes if is_pinned(node)]:
        if previous is not None and previous not in node.all_input_nodes:
            node = run_after(node, (previous,))
        previous = node
