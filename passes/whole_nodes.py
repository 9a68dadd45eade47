"""What reading a region as one op has in common for both directions: its nodes by what they are, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import Graph, Node

from ..codegen.choice import Matmul
from ..runtime import ops
from ..runtime.whole_plan import DTYPES
from .rules import RESHAPES
from .separability import shape_of, tensor_of

aten = torch.ops.aten
OTHER_BODY = "its body is more than one matmul"


class NotWhole(Exception):
    """Why a region is no whole region: the reason of its record."""


class Writer:
    """Makes the nodes of the op, each in the place of the region's result."""

    def __init__(self, graph: Graph, result: Node) -> None:
        self._graph, self._result = graph, result

    def emit(
        self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, pinned: bool = False
    ) -> Node:
        meta, kwargs = self._result.meta, kwargs or {}
        place = replace(meta["fo"], step=0, slice=None, pinned=pinned)
        node = self._graph.create_node("call_function", target, args, kwargs, name=f"{place.region}_{name}")
        value = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        node.meta = {**meta, "val": value, "fo": place}
        return node


@dataclass(frozen=True)
class WholeRegion:
    """What the nodes of a region are, read as arguments of the op, and what its result stands for."""

    op: Any
    inputs: Callable[[Writer], tuple[Any, ...]]  # the op's arguments before `order`
    order: list[int]
    posts: list[int]
    group_name: str
    labels: list[str]
    results: list[Node]  # equal parts of the op's result, one behind the other
    nodes: list[Node]  # those that only the op may read, once it is there, in order
    matmul: Matmul
    slice_bytes: int  # as it travels


class RegionNodes:
    """The nodes of a region, in order, by what they are."""

    def __init__(self, nodes: list[Node]) -> None:
        self.all = nodes
        self.exchanges = [node for node in nodes if node.target is ops.exchange]
        self.waits: dict[Node, Node] = {arguments(node)[0]: node for node in nodes if node.target is ops.wait}
        self.matmuls = [node for node in nodes if node.target is aten.mm.default]

    def factor(self) -> Node:
        """What all slices are multiplied with."""
        found: set[Node] = {arguments(matmul)[1] for matmul in self.matmuls}
        if len(found) != 1:
            raise NotWhole("the matmul is not cut along its rows")
        return found.pop()

    def check_sizes(self, b: Node, dtypes: Iterable[torch.dtype] = ()) -> None:
        """The slices have to be equal numbers of rows, and there has to be a kernel for the operands and `dtypes`."""
        tensors = [b, *(node for matmul in self.matmuls for node in (matmul, rows_of(matmul)))]
        sizes = {type(size) for node in tensors for size in node.meta["val"].shape}
        if sizes != {int} or len({shape_of(node) for node in self.matmuls}) != 1:
            raise NotWhole("its slices have symbolic or unequal sizes")
        for dtype in (tensor_of(b).dtype, *dtypes):
            if dtype not in DTYPES:
                raise NotWhole(f"no kernel for {dtype}")

    def posts(self, sent: Callable[[Node], int | None], received: Callable[[Node], int | None]) -> list[int]:
        """The op's `posts`. The functions say which slice an exchange sends and receives; None where it is none."""
        posts: list[int] = []
        for exchange in self.exchanges:
            _, to, source, *_ = arguments(exchange)
            sending = sent(exchange) if to >= 0 else -1
            receiving = received(exchange) if source >= 0 else -1
            if sending is None or receiving is None:
                raise NotWhole("it sends or receives what it does not multiply")
            posts += [sending, to, receiving, source]
        return posts

    def region(self, b: Node, results: list[Node], **read: Any) -> WholeRegion:
        """All that follows from the nodes themselves, beside what was read off them."""
        first, matmul = self.exchanges[0], self.matmuls[0]
        rows, depth = shape_of(rows_of(matmul))
        return WholeRegion(
            group_name=arguments(first)[3],
            labels=[arguments(exchange)[4] for exchange in self.exchanges],
            results=results,
            nodes=self._replaced(results),
            matmul=Matmul(len(self.matmuls) * rows, depth, shape_of(b)[1], str(tensor_of(b).dtype)),
            slice_bytes=tensor_of(first).nbytes,
            **read,
        )

    def _replaced(self, results: list[Node]) -> list[Node]:
        """All that nothing else reads once the op gives the results: matmuls and transfers have to be among it."""
        found = set(results)
        for node in reversed(self.all):
            if all(user in found for user in node.users):
                found.add(node)
        if not found.issuperset((*self.exchanges, *self.waits.values(), *self.matmuls)):
            raise NotWhole("something else reads its slices")
        return [node for node in self.all if node in found]


def arguments(node: Node) -> tuple[Any, ...]:
    return node.args


def rows_of(matmul: Node) -> Node:
    """What is cut: the left operand."""
    rows: Node = arguments(matmul)[0]
    return rows


def source_of(node: Node) -> Node:
    """What a tensor is a shape of."""
    while node.target in RESHAPES:
        node = node.all_input_nodes[0]
    return node
