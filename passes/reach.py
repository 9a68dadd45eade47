"""What depends on a node of a graph, looked for no further than it is asked."""

from __future__ import annotations

import heapq

from torch.fx import Node


def between(start: Node, end: Node) -> frozenset[Node]:
    """All that depends on `start` and leads to `end`, with `end` where it depends on `start`."""
    behind: set[Node] = set()
    frontier = [start]
    while frontier:
        new = {user for user in frontier.pop().users if user not in behind and not end < user}
        behind |= new
        frontier += new
    found = {end} & behind
    frontier += found
    while frontier:
        new = {operand for operand in frontier.pop().all_input_nodes if operand in behind and operand not in found}
        found |= new
        frontier += new
    return frozenset(found)


class Downstream:
    """What depends on a node, found as far down the graph as it is asked for."""

    def __init__(self, start: Node) -> None:
        self._found: set[Node] = set()
        self._frontier = [start]

    def __contains__(self, node: Node) -> bool:
        while self._frontier and not node < self._frontier[0]:
            for user in heapq.heappop(self._frontier).users:
                if user not in self._found:
                    self._found.add(user)
                    heapq.heappush(self._frontier, user)
        return node in self._found
