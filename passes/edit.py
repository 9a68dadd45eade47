"""Edits of a graph that can be taken back: tried, planned on, and then kept or undone.

A graph on which no edit is kept is as it was before.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from .fake_values import value_of
from .rules import aten
from .separability import shape_of
from .sizes import SizeNodes, as_size, quotient

c10d = torch.ops._c10d_functional


class Edit:
    """New nodes in front of `before`, and what they stand in for."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self.graph = graph
        self.before = before
        values = (node.meta.get("val") for node in graph.nodes)
        self.fake_mode = next((x.fake_mode for x in values if hasattr(x, "fake_mode")), None)
        self.created: list[Node] = []
        self.replaced: list[tuple[Node, Node]] = []
        # Old nodes in graph order: those that nothing reads any more go when the edit is kept.
        self.dead: list[Node] = []

    def call(self, target: Any, *args: Any, name: str | None = None) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = value_of(self.graph, self.fake_mode, target, args, {})
        self.created.append(node)
        return node

    def reduce_scatter(
        self, value: Node, dim: int, reduce_op: str, ranks: int, group_name: str, name: str
    ) -> tuple[Node, Node]:
        """This rank's block of the sum of `value` along `dim`: the collective, called `name`, and its wait."""
        if dim != 0:
            value = self.call(aten.cat.default, self._blocks(value, dim, ranks))
        scatter = self.call(c10d.reduce_scatter_tensor.default, value, reduce_op, ranks, group_name, name=name)
        return scatter, self.call(c10d.wait_tensor.default, scatter)

    def all_gather(self, shard: Node, dim: int, ranks: int, group_name: str, name: str) -> tuple[Node, Node]:
        """The blocks of all ranks along `dim`: the collective, called `name`, and the whole tensor."""
        gather = self.call(c10d.all_gather_into_tensor.default, shard, ranks, group_name, name=name)
        whole = self.call(c10d.wait_tensor.default, gather)
        if dim != 0:
            whole = self.call(aten.cat.default, self._blocks(whole, 0, ranks), dim)
        return gather, whole

    def _blocks(self, whole: Node, dim: int, ranks: int) -> list[Node]:
        """The equal blocks of a tensor along `dim`; its size there divides by `ranks`."""
        size = quotient(shape_of(whole)[dim], ranks)
        assert size is not None
        if isinstance(size, int):
            blocks = self.call(aten.split.Tensor, whole, size, dim)
            return [self.call(operator.getitem, blocks, rank) for rank in range(ranks)]
        # A split would guard on the number of blocks.
        bounds = [SizeNodes(self.graph)[as_size(rank * size)] for rank in range(ranks + 1)]
        return [self.call(aten.slice.Tensor, whole, dim, *bounds[rank : rank + 2]) for rank in range(ranks)]

    def replace(self, old: Node, new: Node) -> None:
        """Let all that reads `old` read `new`, which nothing reads yet."""
        assert not new.users
        old.replace_all_uses_with(new, propagate_meta=False)
        self.replaced.append((old, new))

    def undo(self) -> None:
        for old, new in reversed(self.replaced):
            new.replace_all_uses_with(old, propagate_meta=False)
        for node in reversed(self.created):
            self.graph.erase_node(node)

    def keep(self) -> None:
        for node in reversed(self.dead):
            if not node.users:
                self.graph.erase_node(node)
