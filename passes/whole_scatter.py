"""A rewritten reduce-scatter region as the arguments of `matmul_scatter` (`runtime/whole_scatter.py`).

    mm, exchange, mm, wait, exchange, mm, add, wait, add    ->    matmul_scatter(a, b, dtype, order, posts, ...)

What a node holds is read as a sum: products of slices, and what exchanges brought. So it makes no difference whether partial sums
go straight to their owner, or a running sum travels round a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from ..runtime import ops, whole_scatter
from .rules import RESHAPES
from .separability import shape_of, tensor_of
from .whole_nodes import OTHER_BODY, NotWhole, RegionNodes, WholeRegion, Writer, arguments, aten, rows_of, source_of

prims = torch.ops.prims


@dataclass(frozen=True)
class _Sum:
    """The products of slices, by their matmuls, and the exchanges that brought what is added."""

    products: tuple[Node, ...] = ()
    arrived: frozenset[Node] = frozenset()

    def plus(self, other: _Sum) -> _Sum:
        return _Sum(self.products + other.products, self.arrived | other.arrived)


@dataclass(frozen=True)
class _Total:
    """The finished sum of a slice: what it holds, the node that it is, and the exchange that sends it, if any."""

    held: _Sum
    node: Node
    sent: Node | None = None


def read_scatter(region: RegionNodes) -> WholeRegion:
    """Raises NotWhole where the region is something else."""
    if not region.exchanges or not region.matmuls:
        raise NotWhole(f"{OTHER_BODY} and sums of what it gives")
    totals = _totals(region)
    b, wires = region.factor(), {tensor_of(exchange).dtype for exchange in region.exchanges}
    region.check_sizes(b, wires)
    _check_waits(region, totals)
    slices = _slices(region)
    own = sorted((m for m in region.matmuls if totals[m].sent is None), key=slices.index.__getitem__)
    results = [totals[matmul].node for matmul in own]
    if not own or {tensor_of(node).dtype for node in results} != wires:
        raise NotWhole("something else reads its sums before they are rounded")
    (dtype,) = wires
    sent = {total.sent: slices.index[matmul] for matmul, total in totals.items()}
    received = {exchange: slices.index[m] for m, total in totals.items() for exchange in total.held.arrived}
    return region.region(
        b,
        _joined(results),
        op=whole_scatter.matmul_scatter,
        inputs=lambda writer: (slices.write(writer), b, dtype),
        order=[n for matmul in region.matmuls for n in (slices.index[matmul], own.index(matmul) if matmul in own else -1)],
        posts=region.posts(sent.get, received.get),
    )  # fmt: skip


def _totals(region: RegionNodes) -> dict[Node, _Total]:
    """By matmul: the sum of its slice, as it is sent, or as far as it goes here."""
    sums = _sums(region)
    totals = {matmul: _Total(held, node) for node, held in sums.items() for matmul in held.products}
    for exchange in region.exchanges:
        sent, to, *_ = arguments(exchange)
        if to >= 0:
            held = sums.get(sent, _Sum())
            if not held.products:
                raise NotWhole("it sends what is no product, or no sum with one")
            totals.update((matmul, _Total(held, sent, exchange)) for matmul in held.products)
    if any(len(total.held.products) != 1 for total in totals.values()):
        raise NotWhole(f"{OTHER_BODY} and sums of what it gives")
    return totals


def _sums(region: RegionNodes) -> dict[Node, _Sum]:
    """The nodes that are sums of products and of what arrived, in whatever shape and dtype."""
    sums: dict[Node, _Sum] = {}
    for node in region.all:
        args = arguments(node)
        if node in region.matmuls:
            sums[node] = _Sum((node,))
        elif node.target is ops.wait:
            sums[node] = _Sum((), frozenset((args[0],)))
        elif node.target in (*RESHAPES, prims.convert_element_type.default) and args[0] in sums:
            sums[node] = sums[args[0]]
        elif node.target is aten.add.Tensor and not node.kwargs and all(term in sums for term in args):
            sums[node] = sums[args[0]].plus(sums[args[1]])
    return sums


def _check_waits(region: RegionNodes, totals: dict[Node, _Total]) -> None:
    """What leaves must not stand behind a wait that came later in the graph: the kernel finishes one slice after the other.

    Then it waits for nothing that the graph, in its own order, does not wait for, and that has no circle (`schedule.verify`).
    """
    awaited: set[Node] = set()
    sent = {total.sent: matmul for matmul, total in totals.items()}
    for node in region.all:
        if node.target is ops.wait:
            awaited.add(arguments(node)[0])
        elif node in sent:
            done = region.matmuls[: region.matmuls.index(sent[node]) + 1]
            if any(not totals[matmul].held.arrived <= awaited for matmul in done):
                raise NotWhole("a slice leaves before the sum of an earlier one is done")


@dataclass(frozen=True)
class _Slices:
    """The rows of a tensor, read as [outer, slices, inner, depth]; `index` says which slice each matmul takes."""

    source: Node
    shape: tuple[int, ...]
    index: dict[Node, int]

    def write(self, writer: Writer) -> Node:
        """[slices, inner, depth], or [slices, outer, inner, depth]: a view, where the tensor's strides allow it."""
        outer, *rest = self.shape
        if outer == 1:
            return writer.emit("slices", aten.reshape.default, (self.source, rest))
        rows = writer.emit("slices", aten.reshape.default, (self.source, list(self.shape)))
        return writer.emit("slices", aten.permute.default, (rows, [1, 0, 2, 3]))


def _slices(region: RegionNodes) -> _Slices:
    """What the matmuls multiply, as slices of one tensor."""
    index: dict[Node, int] = {}
    cuts: dict[Any, Node] = {}
    for matmul in region.matmuls:
        piece = source_of(rows_of(matmul))
        if piece.target is not aten.slice.Tensor or len(piece.args) != 4:
            raise NotWhole("its slices are no rows of one tensor")
        source, dim, start, end = arguments(piece)
        cuts[source_of(source), shape_of(source), dim, end - start] = source
        index[matmul] = start // (end - start)
    (_, shape, dim, size), source = cuts.popitem()
    depth, count = shape_of(rows_of(region.matmuls[0]))[1], len(index)
    is_whole = not cuts and shape[dim] == size * count == size * len({*index.values()})
    if not is_whole or dim == len(shape) - 1 or shape[-1] != depth:
        raise NotWhole("its slices are no rows of one tensor")
    return _Slices(source, (prod(shape[:dim]), count, size * prod(shape[dim + 1 : -1]), depth), index)


def _joined(results: list[Node]) -> list[Node]:
    """The tensor that the parts are joined to, where that is how they lie in memory anyway."""
    users = list({user for result in results for user in result.users})
    if len(results) > 1 and len(users) == 1 and users[0].target is aten.cat.default:
        joined, *dim = arguments(users[0])
        if joined == results and prod(shape_of(users[0])[: dim[0] if dim else 0]) == 1:
            return users
    return results
