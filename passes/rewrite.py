"""Rewrite a region: its schedule, for this rank, as FX nodes.

Every slice, transfer, wait and add becomes a node with a name that says where it belongs (`ag0_s2_mm`: region ag0,
step 2, from node mm), and `node.meta["fo"]` holds its region, step, slice and stream. The graph stays functional; any
tool that reads FX graphs reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx import Graph, Node

from ..runtime import ops
from ..schedule import Add, Compute, Kind, Post, Schedule, Store, Stream, Wait
from ..torch_adapter import without_guards
from .attention import sliced_call
from .regions import Region
from .rules import ADD_PRODUCT, MATMULS, RESHAPES, SHAPE_ARGUMENT, WIDE_PRODUCT, aten, prims
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
    tensor_operands,
)
from .sites import Site
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


def rewrite_region(graph: Graph, region: Region, schedule: Schedule, tag: str, which: str) -> None:
    """Replace `region` by the program of this rank. The graph is valid before and after; nodes keep their values.

    Errors and profiles name its steps by `tag`, which is the region's, and by `which` graph it is (forward, backward, inference).
    """
    replace_region(graph, region, lambda after: Writer(graph, region, schedule, tag, which, after))


def replace_region(graph: Graph, region: Region, writer: Callable[[Node], Writer]) -> None:
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


class Writer:
    """Turns the actions of one rank into nodes, in front of `after`. Without a schedule a subclass says what is done."""

    def __init__(
        self, graph: Graph, region: Region, schedule: Schedule | None, tag: str, which: str, after: Node
    ) -> None:
        self.graph = graph
        self.sizes = SizeNodes(graph)
        self.region = region
        self.site = region.site
        self.slices = region.slicing
        self.summed = region.scatter or region.site  # where sums travel: the collective that makes them
        self._schedule = schedule
        self.tag = tag
        self.which = which
        self.after = after
        # Ops that make a tensor of nothing have to be told that the tensors of this graph are fake.
        self.fake_mode = getattr(tensor_of(region.site.value), "fake_mode", None) or nullcontext()
        self.step = 0
        self.pieces: dict[Node, dict[int, Node]] = {node: {} for node in region.read_outside()[0]}  # by slice
        self.totals: dict[Node, Node] = {}  # outputs that are sums over slices, so far
        self.held: dict[int, Node] = {}  # slices at hand, where they travel unchanged
        self.sums: dict[int, Node] = {}  # scatter and reduce: running sums
        self.transfers: dict[int, tuple[Node, Node, Post]] = {}  # step -> receive buffer, what was sent, its post
        self.received: dict[int, Node] = {}  # step -> awaited partial, or finished, sum
        self.outside: dict[tuple[Node, Cut, int], Node] = {}  # slices of tensors from outside the region

    # --- the program ------------------------------------------------------------------------------------------------

    def run(self) -> dict[Node, Node]:
        """Write the program; the answer says what replaces each node that is read outside."""
        self._program()
        results = {node: self._join(node) for node in self.pieces if node in self.region.cuts}
        if self.region.is_gather:
            results.update(self._blocks(results.get(self.site.value)))
        results.update({node: self.pieces[node][0] for node in self.region.shared if node in self.pieces})
        for node, total in self.totals.items():
            results[node] = self._as_dtype(total, tensor_of(node).dtype, None)
        if self._reduces:
            results[self.summed.wait] = self._summed_result()
        elif self.site.kind is Kind.ALL_GATHER_OUT:
            results.update(self._gathered_results())
        elif not self.region.is_gather:
            results[self.site.wait] = self._exchanged_result()
        return results

    @property
    def schedule(self) -> Schedule:
        assert self._schedule is not None
        return self._schedule

    def _program(self) -> None:
        if self.region.is_gather:
            self._own_slices()
        for action in self.schedule.program(self.site.rank):
            match action:
                case Compute(slice_):
                    self._compute(slice_)
                    self.step += 1
                case Post():
                    self._post(action)
                case Wait(step):
                    self._wait(step)
                case Add(slice_, step):
                    self._accumulate(slice_, self.received.pop(step))
                case Store(slice_, step):
                    self.sums[slice_] = self.received.pop(step)

    @property
    def _reduces(self) -> bool:
        return self.site.kind.reduces

    def _own_slices(self) -> None:
        """What this rank has at the start: its shard, in parts; in an all-to-all a block for each peer, in parts."""
        site, m = self.site, self.region.slices_per_rank
        for slice_ in self.schedule.owned_by(site.rank):
            piece, part = site.shard, slice_ % m
            if site.kind.is_all_to_all:
                peer = self.schedule.destination(slice_)
                piece = self._part(piece, site.peer_dim, Slices(site.ranks), peer, slice_)
            self.held[slice_] = self._part(piece, site.dim, replace(self.slices, ranks=1), part, slice_)

    def _part(self, node: Node, dim: int, parts: Slices, index: int, slice_: int) -> Node:
        """One of the `parts` of a tensor."""
        if parts.count == 1:
            return node
        where = bounds(shape_of(node), Cut(dim), parts, index)
        return self._emit("own", aten.slice.Tensor, (node, dim, *where), slice_)

    def _index(self, slice_: int) -> int:
        """Which of the slices of the region's tensors a slice of the schedule is."""
        m = self.region.slices_per_rank
        match self.site.kind:
            case Kind.ALL_TO_ALL:
                return self.schedule.owner(slice_) * m + slice_ % m
            case Kind.ALL_TO_ALL_OUT:
                return self.schedule.destination(slice_) * m + slice_ % m
            case Kind.ALL_GATHER_OUT:
                return slice_ % m
            case _:
                return slice_

    def _compute(self, slice_: int) -> None:
        region, index = self.region, self._index(slice_)
        local: dict[Node, Node] = {}
        if region.is_gather:
            local[self.site.value] = self.held[slice_]
        for node in region.members:
            summed = node not in region.cuts and node not in region.shared
            local[node] = self._local(node, index, local, self.totals.get(node) if summed else None)
            if summed:
                self.totals[node] = local[node]
        for node, pieces in self.pieces.items():
            pieces[index] = local[node]
        if self._reduces:
            self._accumulate(slice_, local[self.summed.value])
        elif not region.is_gather:
            self.held[slice_] = local[self.site.value]

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
        # The slice of a tensor need not be viewable where the whole one is.
        target: Any = aten.reshape.default if node.target in RESHAPES else node.target
        if node.target in SHAPE_ARGUMENT:
            assert split.output is not None
            shape = local_shape(shape_of(node), split.output, self.slices, slice_)
            args = (args[0], shape, *args[2:])

        def emit(name: str, helper: Any, helper_args: tuple[Any, ...], helper_kwargs: dict[str, Any]) -> Node:
            return self._emit(f"{node.name}_{name}", helper, helper_args, slice_, kwargs=helper_kwargs, of=node)

        args, kwargs = sliced_call(node, split.output, self.slices, slice_, args, kwargs, emit)
        pinned = node.target in MATMULS
        if split.output is None and tensor_of(node).dtype in SIXTEEN_BIT:
            target, args = WIDE_PRODUCT[node.target], (*args, torch.float32)
        elif total is not None and node.target in ADD_PRODUCT:
            target, args = ADD_PRODUCT[node.target], (total, *args[-2:])
            kwargs = {key: value for key, value in kwargs.items() if key == "alpha"}
            total = None
        result = self._emit(node.name, target, args, slice_, kwargs=kwargs, source=node, of=node, pinned=pinned)
        if total is not None:
            result = self._emit(f"{node.name}_total", aten.add.Tensor, (total, result), slice_, of=node)
        return result

    def _slice_of(self, source: Node, cut: Cut, slice_: int, reader: Node) -> Node:
        """A slice of a tensor from outside the region, cut once for all members that read it; `reader` is the first."""
        key = (source, cut, slice_)
        if key not in self.outside:
            shape = shape_of(source)
            where, dim = source, cut.dim
            if cut.outer != 1:
                rows = [*shape[:dim], cut.outer, quotient(shape[dim], cut.outer), *shape[dim + 1 :]]
                where = self._emit(f"{source.name}_rows", aten.reshape.default, (source, rows), slice_, of=reader)
                dim += 1
            start_stop = bounds(shape, cut, self.slices, slice_)
            piece = self._emit(f"{source.name}_slice", aten.slice.Tensor, (where, dim, *start_stop), slice_, of=reader)
            if cut.outer != 1:
                flat = local_shape(shape, cut, self.slices, slice_)
                piece = self._emit(f"{source.name}_slice", aten.reshape.default, (piece, flat), slice_, of=reader)
            self.outside[key] = piece
        return self.outside[key]

    # --- transfers --------------------------------------------------------------------------------------------------

    def _post(self, post: Post) -> None:
        carries_sums = self.schedule.carries_sums(post)
        site, held = (self.summed, self.sums) if carries_sums else (self.site, self.held)
        slice_ = post.send.slice if post.send else post.recv.slice if post.recv else 0
        if post.send is not None:
            sent = self._as_dtype(held[post.send.slice], tensor_of(site.value).dtype, slice_)
        else:
            sent = self._slice_like(site, held, slice_)  # nothing is sent: it only says what is received looks like
        kwargs: dict[str, Any] = {}
        if post.send is not None and post.recv is not None:
            outgoing, incoming = (self._travelling_shape(site, each.slice) for each in (post.send, post.recv))
            kwargs = {} if outgoing == incoming else {"shape": incoming}
        dst = post.send.peer if post.send else -1
        src = post.recv.peer if post.recv else -1
        label = (
            f"region {self.tag} of the {self.which} graph ({self.site.collective.name}), step {post.step}, "
            f"group {self.site.group_name!r}: rank {self.site.rank} sends to {dst}, receives from {src}"
        )
        buffer = self._emit(
            "exchange",
            ops.exchange,
            (sent, dst, src, self.site.group_name, label),
            slice_,
            kwargs=kwargs,
            stream=Stream.COMM,
            step=post.step,
            pinned=True,
        )
        self.transfers[post.step] = (buffer, sent, post)

    def _travelling_shape(self, site: Site, slice_: int) -> list[Size]:
        return local_shape(shape_of(site.value), Cut(site.dim), self.slices, self._index(slice_))

    def _slice_like(self, site: Site, held: dict[int, Node], slice_: int) -> Node:
        """A tensor like a slice as it travels: one at hand, or an empty one before the first is computed."""
        value = tensor_of(site.value)
        shape = self._travelling_shape(site, slice_)
        for other, node in held.items():
            if tensor_of(node).dtype == value.dtype and self._travelling_shape(site, other) == shape:
                return node
        members = {*self.region.members}
        source = next(o for node in self.region.members for o in tensor_operands(node) if o not in members)
        kwargs = {"dtype": value.dtype, "device": value.device}
        return self._emit("like", aten.new_empty.default, (source, shape), slice_, kwargs=kwargs)

    def _wait(self, step: int) -> None:
        buffer, sent, post = self.transfers.pop(step)
        slice_ = post.recv.slice if post.recv else 0
        data = self._emit("wait", ops.wait, (buffer, sent), slice_, step=step, pinned=True)
        if post.recv is None:
            return
        if self.schedule.carries_sums(post):
            self.received[step] = data
        else:
            self.held[post.recv.slice] = data

    # --- sums -------------------------------------------------------------------------------------------------------

    def _accumulate(self, slice_: int, value: Node) -> None:
        """Add to a running sum; 16-bit sums are held in float32 until they are sent or done."""
        if slice_ not in self.sums:
            self.sums[slice_] = value
            return
        dtype = tensor_of(self.summed.value).dtype
        wide = torch.float32 if dtype in SIXTEEN_BIT else dtype
        terms = tuple(self._as_dtype(term, wide, slice_) for term in (self.sums[slice_], value))
        self.sums[slice_] = self._emit("add", aten.add.Tensor, terms, slice_)

    def _as_dtype(self, node: Node, dtype: torch.dtype, slice_: int | None) -> Node:
        if tensor_of(node).dtype == dtype:
            return node
        return self._emit("cast", prims.convert_element_type.default, (node, dtype), slice_)

    def _summed_result(self) -> Node:
        """This rank's part of the sum, or all of it."""
        site = self.summed
        parts = []
        everything = site.kind is Kind.ALL_REDUCE
        for slice_ in range(self.region.slices) if everything else self.schedule.owned_by(site.rank):
            total = self.sums[slice_]
            if site.averages:
                total = self._emit("mean", aten.div.Tensor, (total, site.ranks), slice_)
            parts.append(self._as_dtype(total, tensor_of(site.value).dtype, slice_))
        joined = parts[0] if len(parts) == 1 else self._emit("result", aten.cat.default, (parts, site.dim), None)
        return self._with_strides_of(site.wait, joined)

    def _exchanged_result(self) -> Node:
        """What came from each rank, its own block included, side by side."""
        site, m = self.site, self.region.slices_per_rank
        blocks = []
        for source in range(site.ranks):
            first = (source * site.ranks + site.rank) * m
            parts = [self.held[first + part] for part in range(m)]
            blocks.append(parts[0] if m == 1 else self._emit("block", aten.cat.default, (parts, site.dim), None))
        joined = self._emit("result", aten.cat.default, (blocks, site.peer_dim), None)
        return self._with_strides_of(site.wait, joined)

    def _gathered_results(self) -> dict[Node, Node]:
        """The results of all ranks side by side, and the blocks of single ranks that others read."""
        site, m = self.site, self.region.slices_per_rank
        whole, dim = site.gathered
        slices = [self.held[slice_] for slice_ in range(self.schedule.slices)]
        # What lies side by side in the result is joined first: where slices are rows, so are the tensors that are joined last.
        if site.dim != dim:
            slices = [self._emit("rows", aten.cat.default, (slices[part::m], dim), None) for part in range(m)]
        joined = self._with_strides_of(whole, self._emit("result", aten.cat.default, (slices, site.dim), None))
        return {whole: joined, **self._blocks(joined)}

    # --- outputs ----------------------------------------------------------------------------------------------------

    def _join(self, node: Node) -> Node:
        """The whole tensor from its slices, written in place of each other.

        With `outer` repetitions the joined buffer keeps the slices one behind the other, so that a matmul can still
        write its slice in place, and a view puts the rows in order: free for the pointwise op that reads it.
        """
        cut, n = self.region.cuts[node], self.slices.count
        pieces = [self.pieces[node][slice_] for slice_ in range(n)]
        if cut.outer != 1 and not self.slices.are_equal:
            return self._with_strides_of(node, self._join_unequal(node, cut, pieces))
        joined = self._emit(f"join_{node.name}", aten.cat.default, (pieces, cut.dim), None, of=node)
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
                joined = self._emit(f"join_{node.name}", target, (joined, argument), None, of=node)
        return self._with_strides_of(node, joined)

    def _join_unequal(self, node: Node, cut: Cut, pieces: list[Node]) -> Node:
        """The same from slices of unequal sizes, between whose rows no view finds the next slice: they are copied."""
        name, shape, dim = f"join_{node.name}", shape_of(node), cut.dim
        parts = []
        for index, piece in enumerate(pieces):
            start, stop = bounds(shape, cut, self.slices, index)
            rows = [*shape[:dim], cut.outer, stop - start, *shape[dim + 1 :]]
            parts.append(self._emit(name, aten.reshape.default, (piece, rows), None, of=node))
        joined = self._emit(name, aten.cat.default, (parts, dim + 1), None, of=node)
        return self._emit(name, aten.reshape.default, (joined, list(shape)), None, of=node)

    def _blocks(self, joined: Node | None) -> dict[Node, Node]:
        """The blocks of single ranks that are read outside, out of the joined tensor."""
        whole, dim = self.site.gathered
        blocks = {}
        for node, rank in self.region.blocks_read_outside():
            args = (joined, dim, *bounds(shape_of(whole), Cut(dim), Slices(self.site.ranks), rank))
            block = self._emit(f"block_{node.name}", aten.slice.Tensor, args, None, of=node)
            blocks[node] = self._with_strides_of(node, block)
        return blocks

    def _with_strides_of(self, original: Node, result: Node) -> Node:
        """Give `result` the strides of `original`, where they are those of a permuted contiguous tensor."""
        wanted, got = tensor_of(original), tensor_of(result)
        if strides_that_matter(wanted) == strides_that_matter(got):
            return result
        order = dense_order(wanted)
        if order is not None:
            name = f"strides_{original.name}"
            back = [order.index(dim) for dim in range(len(order))]
            result = self._emit(name, aten.permute.default, (result, order), None, of=original)
            result = self._emit(name, aten.clone.default, (result,), None, kwargs=_CONTIGUOUS, of=original)
            result = self._emit(name, aten.permute.default, (result, back), None, of=original)
        return result

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _emit(
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
        with self.fake_mode, without_guards(self.fake_mode):
            node.meta["val"] = target(*fx.map_arg(args, _value), **fx.map_arg(kwargs, _value))
        node.meta["fo"] = Place(self.tag, step, stream, (of or self.site.collective).name, slice_, pinned)
        return node


_CONTIGUOUS = {"memory_format": torch.contiguous_format}
_KEPT_META = ("stack_trace", "nn_module_stack", "original_aten", "from_node", "seq_nr")


def _value(node: Node) -> Any:
    return node.meta["val"]


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
