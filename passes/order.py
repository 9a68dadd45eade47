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
        if previous is not None and previous not in node.all_input_nodes:
            node = run_after(node, (previous,))
        previous = node
