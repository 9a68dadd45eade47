"""The body of a region, slice by slice, as FX nodes: what all ways to rewrite a region have in common.

Every slice becomes a node with a name that says where it belongs (`ag0_s2_mm`: region ag0, step 2, from node mm), and
`node.meta["fo"]` holds its region, step, slice and stream. The graph stays functional; any tool that reads FX graphs
reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx import Graph, Node

from ..schedule import Stream
from .aliases import is_returned, memory_of
from .attention import sliced_call
from .fake_values import value_of
from .regions import Region
from .rules import ADD_PRODUCT, MATMULS, RESHAPED, SHAPE_ARGUMENT, WIDE_PRODUCT, aten, prims
from .separability import (
    SIXTEEN_BIT,
    Cut,
    Slices,
    bounds,
    dense_order,
    local_shape,
    row_size,
    shape_of,
    strides_that_matter,
    tensor_of,
)
from .sizes import Size, SizeNodes, as_size, quotient


@dataclass(frozen=True)
class Place:
    """Where a rewritten node belongs, and the name of the node it was made from; kept in `node.meta["fo"]`."""

    region: str
    step: int
    stream: Stream
    origin: str
    slice: int | None = None
    pinned: bool = False  # its place in the order of the program is part of the schedule


def replace_region(graph: Graph, region: Region, writer: Callable[[Node], SliceWriter]) -> None:
    """Replace `region` by what `writer(node)` writes in front of a node."""
    replaced = region.replaced()
    last = max(replaced)
    after = last.next
    dependents = _dependents(replaced, after)
    results = writer(after).run()
    for node in dependents:  # those that read the region came between its nodes: now they come behind it
        after.prepend(node)
    for node, result in results.items():
        node.replace_all_uses_with(result, propagate_meta=False)
    for node in sorted(replaced, reverse=True):
        graph.erase_node(node)


def _dependents(replaced: set[Node], after: Node) -> list[Node]:
    """The nodes between the region's first and last that depend on it, in order."""
    found: dict[Node, None] = {}
    node = min(replaced).next
    while node is not after:
        if node not in replaced and any(o in replaced or o in found for o in node.all_input_nodes):
            found[node] = None
        node = node.next
    return list(found)


class SliceWriter(ABC):
    """Writes a region slice by slice in front of `after`; a subclass says in which order, and how slices travel."""

    def __init__(self, graph: Graph, region: Region, tag: str, which: str, after: Node) -> None:
        self.graph = graph
        self.sizes = SizeNodes(graph)
        self.region = region
        self.site = region.site
        self.slices = region.slicing
        self.tag = tag
        self.which = which
        self.after = after
        # Ops that make a tensor of nothing have to be told that the tensors of this graph are fake.
        self.fake_mode = getattr(tensor_of(region.site.value), "fake_mode", None)
        self.step = 0
        self.pieces: dict[Node, dict[int, Node]] = {node: {} for node in region.read_outside()[0]}  # by slice
        self.totals: dict[Node, Node] = {}  # outputs that are sums over slices, so far
        self.outside: dict[tuple[Node, Cut, int], Node] = {}  # slices of tensors from outside the region

    @abstractmethod
    def program(self) -> None:
        """Write all steps."""

    @abstractmethod
    def results(self) -> dict[Node, Node]:
        """Write what the collectives give: by the nodes that these results replace."""

    def run(self) -> dict[Node, Node]:
        """Write it all; the answer says what replaces each node that is read outside."""
        self.program()
        results = {node: self._join(node) for node in self.pieces if node in self.region.cuts}
        if self.region.is_gather:
            results.update(self.blocks(results.get(self.site.value)))
        results.update({node: self.pieces[node][0] for node in self.region.shared if node in self.pieces})
        for node, total in self.totals.items():
            results[node] = self.as_dtype(total, tensor_of(node).dtype, None)
        return {**results, **self.results()}

    # --- slices -----------------------------------------------------------------------------------------------------

    def compute(self, index: int, arrived: Node | None = None) -> dict[Node, Node]:
        """The members on one slice, of which the collective has `arrived`; by the nodes that they are slices of."""
        region = self.region
        local: dict[Node, Node] = {} if arrived is None else {self.site.value: arrived}
        for node in region.members:
            summed = node not in region.cuts and node not in region.shared
            local[node] = self._local(node, index, local, self.totals.get(node) if summed else None)
            if summed:
                self.totals[node] = local[node]
        for node, pieces in self.pieces.items():
            pieces[index] = local[node]
        return local

    def _local(self, node: Node, slice_: int, local: dict[Node, Node], total: Node | None) -> Node:
        """One member on one slice; with `total`, added to the sum so far."""
        split = self.region.splits[node]

        def operand(source: Node) -> Node:
            if source in local:
                return local[source]
            if source in split.inputs:
                return self._slice_of(source, split.inputs[source], slice_, node)
            return source

        args, kwargs = fx.map_arg(node.args, operand), fx.map_arg(node.kwargs, operand)
        target: Any = aten.reshape.default if node.target in RESHAPED else node.target
        if node.target in SHAPE_ARGUMENT:
            assert split.output is not None
            shape = local_shape(shape_of(node), split.output, self.slices, slice_)
            args = (args[0], shape, *args[2:])

        def emit(name: str, helper: Any, helper_args: tuple[Any, ...], helper_kwargs: dict[str, Any]) -> Node:
            return self.emit(f"{node.name}_{name}", helper, helper_args, slice_, kwargs=helper_kwargs, of=node)

        args, kwargs = sliced_call(node, split.output, self.slices, slice_, args, kwargs, emit)
        pinned = node.target in MATMULS
        if split.output is None and tensor_of(node).dtype in SIXTEEN_BIT:
            target, args = WIDE_PRODUCT[node.target], (*args, torch.float32)
        elif total is not None and node.target in ADD_PRODUCT:
            target, args = ADD_PRODUCT[node.target], (total, *args[-2:])
            kwargs = {key: value for key, value in kwargs.items() if key == "alpha"}
            total = None
        result = self.emit(node.name, target, args, slice_, kwargs=kwargs, source=node, of=node, pinned=pinned)
        if total is not None:
            result = self.emit(f"{node.name}_total", aten.add.Tensor, (total, result), slice_, of=node)
        return result

    def _slice_of(self, source: Node, cut: Cut, slice_: int, reader: Node) -> Node:
        """A slice of a tensor from outside the region, cut once for all members that read it; `reader` is the first."""
        key = (source, cut, slice_)
        if key not in self.outside:
            shape = shape_of(source)
            where, dim = source, cut.dim
            if cut.outer != 1:
                rows = [*shape[:dim], cut.outer, quotient(shape[dim], cut.outer), *shape[dim + 1 :]]
                where = self.emit(f"{source.name}_rows", aten.reshape.default, (source, rows), slice_, of=reader)
                dim += 1
            start_stop = bounds(shape, cut, self.slices, slice_)
            piece = self.emit(f"{source.name}_slice", aten.slice.Tensor, (where, dim, *start_stop), slice_, of=reader)
            if cut.outer != 1:
                flat = local_shape(shape, cut, self.slices, slice_)
                piece = self.emit(f"{source.name}_slice", aten.reshape.default, (piece, flat), slice_, of=reader)
            self.outside[key] = piece
        return self.outside[key]

    # --- outputs ----------------------------------------------------------------------------------------------------

    def _join(self, node: Node) -> Node:
        """The whole tensor from its slices, written in place of each other.

        With `outer` repetitions the joined buffer keeps the slices one behind the other, so that a matmul can still
        write its slice in place, and a view puts the rows in order: free for the pointwise op that reads it.
        """
        cut, n = self.region.cuts[node], self.slices.count
        pieces = [self.pieces[node][slice_] for slice_ in self.slices.numbers]
        if cut.outer != 1 and not self.slices.are_equal:
            return self.with_strides_of(node, self._join_unequal(node, cut, pieces))
        joined = self.emit(f"join_{node.name}", aten.cat.default, (pieces, cut.dim), None, of=node)
        if cut.outer != 1:
            shape, dim = shape_of(node), cut.dim
            size = row_size(shape, cut, self.slices)
            rows = [*shape[:dim], n, cut.outer, size, *shape[dim + 1 :]]
            order = list(range(len(rows)))
            order[dim], order[dim + 1] = dim + 1, dim
            for target, argument in (
                (aten.reshape.default, rows),
                (aten.permute.default, order),
                (aten.reshape.default, list(shape)),
            ):
                joined = self.emit(f"join_{node.name}", target, (joined, argument), None, of=node)
        return self.with_strides_of(node, joined)

    def _join_unequal(self, node: Node, cut: Cut, pieces: list[Node]) -> Node:
        """The same from slices of unequal sizes, between whose rows no view finds the next slice: they are copied."""
        name, shape, dim = f"join_{node.name}", shape_of(node), cut.dim
        parts = []
        for index, piece in zip(self.slices.numbers, pieces, strict=True):
            start, stop = bounds(shape, cut, self.slices, index)
            rows = [*shape[:dim], cut.outer, stop - start, *shape[dim + 1 :]]
            parts.append(self.emit(name, aten.reshape.default, (piece, rows), None, of=node))
        joined = self.emit(name, aten.cat.default, (parts, dim + 1), None, of=node)
        return self.emit(name, aten.reshape.default, (joined, list(shape)), None, of=node)

    def blocks(self, joined: Node | None) -> dict[Node, Node]:
        """The blocks of single ranks that are read outside, out of the joined tensor.

        One that the caller gets is a copy of its own, unless it is the only result in this memory or shared it before.
        """
        whole, dim = self.site.gathered
        blocks = {}
        kept = memory_of(whole, of_reshapes=False) if is_returned(whole) else None
        for node, rank in self.region.blocks_read_outside():
            args = (joined, dim, *bounds(shape_of(whole), Cut(dim), Slices(self.site.ranks), rank))
            block = self.emit(f"block_{node.name}", aten.slice.Tensor, args, None, of=node)
            if is_returned(node):
                memory = memory_of(node, of_reshapes=False)
                kept = kept or memory
                if memory is not kept:
                    block = self.emit(
                        f"block_{node.name}", aten.clone.default, (block,), None, kwargs=_CONTIGUOUS, of=node
                    )
            blocks[node] = self.with_strides_of(node, block)
        return blocks

    def with_strides_of(self, original: Node, result: Node) -> Node:
        """Give `result` the strides of `original`, where they are those of a permuted contiguous tensor."""
        wanted, got = tensor_of(original), tensor_of(result)
        if strides_that_matter(wanted) == strides_that_matter(got):
            return result
        order = dense_order(wanted)
        if order is not None:
            name = f"strides_{original.name}"
            back = [order.index(dim) for dim in range(len(order))]
            result = self.emit(name, aten.permute.default, (result, order), None, of=original)
            result = self.emit(name, aten.clone.default, (result,), None, kwargs=_CONTIGUOUS, of=original)
            result = self.emit(name, aten.permute.default, (result, back), None, of=original)
        return result

    # --- nodes ------------------------------------------------------------------------------------------------------

    def as_dtype(self, node: Node, dtype: torch.dtype, slice_: int | None) -> Node:
        if tensor_of(node).dtype == dtype:
            return node
        return self.emit("cast", prims.convert_element_type.default, (node, dtype), slice_)

    def emit(
        self,
        name: str,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        slice_: int | None,
        *,
        kwargs: dict[str, Any] | None = None,
        step: int | None = None,
        stream: Stream = Stream.COMPUTE,
        source: Node | None = None,
        of: Node | None = None,
        pinned: bool = False,
    ) -> Node:
        """One node, made from `of`: the collective, if no other. From `source` it also takes its meta."""
        args = _nested(args, self.sizes.__getitem__)
        kwargs = {key: _nested(value, self.sizes.__getitem__) for key, value in (kwargs or {}).items()}
        if target is aten.reshape.default:
            same = _undone_reshape(args)
            if same is not None:
                return same
        step = self.step if step is None else step
        infix = "" if slice_ is None else f"_s{step}"
        with self.graph.inserting_before(self.after):
            node = self.graph.create_node("call_function", target, args, kwargs, name=f"{self.tag}{infix}_{name}")
        if source is not None:
            node.meta.update({key: source.meta[key] for key in _KEPT_META if key in source.meta})
        node.meta["val"] = value_of(self.graph, self.fake_mode, target, args, kwargs)
        node.meta["fo"] = Place(self.tag, step, stream, (of or self.site.collective).name, slice_, pinned)
        return node


_CONTIGUOUS = {"memory_format": torch.contiguous_format}
_KEPT_META = ("stack_trace", "nn_module_stack", "original_aten", "from_node", "seq_nr")


def _nested(value: Any, node_of: Callable[[Size], int | Node]) -> Any:
    """Arguments of a node, with nodes in place of symbolic sizes."""
    if isinstance(value, (tuple, list)):
        items = [_nested(item, node_of) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return node_of(value) if isinstance(value, sympy.Expr) else value


def _undone_reshape(args: tuple[Any, ...]) -> Node | None:
    """The node that already has this shape, where a reshape changes nothing or undoes another one."""
    source, shape = args[0], tuple(map(as_size, args[1]))
    while isinstance(source, Node):
        if shape_of(source) == shape:
            return source
        if source.target is not aten.reshape.default:
            return None
        source = source.args[0]
    return None
