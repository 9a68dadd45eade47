"""Rewrite a region: its schedule, for this rank, as FX nodes. Every transfer, wait and add becomes one, too."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from ..runtime import ops
from ..schedule import Add, Compute, Kind, Post, Schedule, Store, Stream, Wait
from .regions import Region
from .rules import aten
from .separability import SIXTEEN_BIT, Cut, Slices, Spans, bounds, shape_of, tensor_of, tensor_operands
from .sites import Site
from .sizes import Size, as_size
from .slice_writer import SliceWriter, replace_region
from .uneven import end_padding


def rewrite_region(graph: Graph, region: Region, schedule: Schedule, tag: str, which: str) -> None:
    """Replace `region` by the program of this rank. The graph is valid before and after; nodes keep their values.

    Errors and profiles name its steps by `tag`, which is the region's, and by `which` graph it is (forward, backward, inference).
    """
    replace_region(graph, region, lambda after: _ScheduleWriter(graph, region, schedule, tag, which, after))


Pieces: TypeAlias = dict[tuple[int, int], Node]  # by first slice and number of slices


class _ScheduleWriter(SliceWriter):
    """Turns the actions of one rank into nodes."""

    def __init__(self, graph: Graph, region: Region, schedule: Schedule, tag: str, which: str, after: Node) -> None:
        super().__init__(graph, region, tag, which, after)
        self.schedule = schedule
        self.summed = region.scatter or region.site  # where sums travel: the collective that makes them
        self.held: Pieces = {}  # at hand, where slices travel unchanged
        self.sums: Pieces = {}  # scatter and reduce: running sums
        self.transfers: dict[int, tuple[Node, Node, Post]] = {}  # step -> receive buffer, what was sent, its post
        self.received: dict[int, Node] = {}  # step -> awaited partial, or finished, sum
        self.actions = schedule.program(self.site.rank)
        self.units = self.slices  # of which a piece that is computed may have several
        computed = [(self._index(a.slice), a.count) for a in self.actions if isinstance(a, Compute)]
        inner = {index + i for index, count in computed for i in range(1, count)}
        if inner:
            ends = tuple(end for end in range(1, self.units.count + 1) if end not in inner)
            self.slices = Spans(**vars(self.units), ends=ends)

    # --- the program ------------------------------------------------------------------------------------------------

    def program(self) -> None:
        if self.region.is_gather:
            self._own_pieces()
        for action in self.actions:
            match action:
                case Compute():
                    self._compute(action.slice, action.count)
                    self.step += 1
                case Post():
                    self._post(action)
                case Wait(step):
                    self._wait(step)
                case Add():
                    self._accumulate(action.slice, action.count, self.received.pop(action.step))
                case Store():
                    self.sums[action.slice, action.count] = self.received.pop(action.step)

    def results(self) -> dict[Node, Node]:
        kind = self.site.kind
        if kind.reduces:
            return {self.summed.wait: self._summed_result()}
        if kind is Kind.ALL_GATHER_OUT:
            return self._gathered_results()
        return {} if self.region.is_gather else {self.site.wait: self._exchanged_result()}

    def _own_pieces(self) -> None:
        """What this rank has at the start: its shard, in pieces; in an all-to-all a block for each peer, in pieces."""
        rank = self.site.rank
        ends = [a.send if isinstance(a, Post) else a for a in self.actions if isinstance(a, (Post, Compute))]
        own = {(e.slice, e.count) for e in ends if e is not None and self.schedule.owner(e.slice) == rank}
        for slice_, count in sorted(own):
            block = self._own_block(slice_)
            first = slice_ - slice_ % self.region.slices_per_rank
            self.held[slice_, count] = self._rows(self.site, block, first, (slice_, count))

    def _own_block(self, slice_: int) -> Node:
        """What this rank has at the start for one peer in an all-to-all; its shard, in any other kind."""
        site, m = self.site, self.region.slices_per_rank
        if site.share is not None:
            first, last = self._span(site, site.rank * m, m)
            return self._part(site.shard, site.dim, (0, as_size(last - first)), slice_)
        if not site.kind.is_all_to_all:
            return site.shard
        where = bounds(shape_of(site.shard), Cut(site.peer_dim), Slices(site.ranks), self.schedule.destination(slice_))
        return self._part(site.shard, site.peer_dim, where, slice_)

    def _span(self, site: Site, slice_: int, count: int) -> tuple[Size, Size]:
        """Where a piece lies in what the collective gives, or takes."""
        index, shape, cut = self._index(slice_), shape_of(site.value), Cut(site.dim)
        return bounds(shape, cut, self.units, index)[0], bounds(shape, cut, self.units, index + count - 1)[1]

    def _rows(self, site: Site, node: Node, first: int, piece: tuple[int, int]) -> Node:
        """A piece (first slice, number) of a tensor of which `first` is the first slice."""
        offset = self._span(site, first, 1)[0]
        start, stop = self._span(site, *piece)
        return self._part(node, site.dim, (as_size(start - offset), as_size(stop - offset)), piece[0])

    def _part(self, node: Node, dim: int, where: tuple[Size, Size], slice_: int) -> Node:
        if where == (0, shape_of(node)[dim]):
            return node
        return self.emit("own", aten.slice.Tensor, (node, dim, *where), slice_)

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

    def _compute(self, slice_: int, count: int) -> None:
        gathers = self.region.is_gather
        local = self.compute(self._index(slice_), self.held[slice_, count] if gathers else None)
        if self.site.kind.reduces:
            self._accumulate(slice_, count, local[self.summed.value])
        elif not gathers:
            self.held[slice_, count] = local[self.site.value]

    # --- transfers --------------------------------------------------------------------------------------------------

    def _post(self, post: Post) -> None:
        carries_sums = self.schedule.carries_sums(post)
        site, held = (self.summed, self.sums) if carries_sums else (self.site, self.held)
        end = post.send or post.recv
        assert end is not None
        slice_ = end.slice
        if post.send is not None:
            sent = self.as_dtype(self._taken(site, held, slice_, end.count), tensor_of(site.value).dtype, slice_)
        else:  # nothing is sent: it only says what is received looks like
            sent = self._like(site, held, slice_, end.count)
        kwargs: dict[str, Any] = {}
        if post.send is not None and post.recv is not None:
            outgoing, incoming = (self._travelling_shape(site, e.slice, e.count) for e in (post.send, post.recv))
            kwargs = {} if outgoing == incoming else {"shape": incoming}
        dst = post.send.peer if post.send else -1
        src = post.recv.peer if post.recv else -1
        label = (
            f"region {self.tag} of the {self.which} graph ({self.site.collective.name}), step {post.step}, "
            f"group {self.site.group_name!r}: rank {self.site.rank} sends to {dst}, receives from {src}"
        )
        buffer = self.emit(
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

    def _travelling_shape(self, site: Site, slice_: int, count: int) -> list[Size]:
        start, stop = self._span(site, slice_, count)
        return [as_size(stop - start) if dim == site.dim else size for dim, size in enumerate(shape_of(site.value))]

    def _taken(self, site: Site, held: Pieces, slice_: int, count: int) -> Node:
        """A piece of what is at hand, which may be in other pieces."""
        if (slice_, count) in held:
            return held[slice_, count]
        parts, at, stop = [], slice_, slice_ + count
        while at < stop:
            first, size = next((first, size) for first, size in held if first <= at < first + size)
            end = min(first + size, stop)
            parts.append(self._rows(site, held[first, size], first, (at, end - at)))
            at = end
        return parts[0] if len(parts) == 1 else self.emit("joined", aten.cat.default, (parts, site.dim), slice_)

    def _like(self, site: Site, held: Pieces, slice_: int, count: int) -> Node:
        """A tensor like a piece as it travels: one at hand, or an empty one before the first is computed."""
        value = tensor_of(site.value)
        shape = self._travelling_shape(site, slice_, count)
        for other, node in held.items():
            if tensor_of(node).dtype == value.dtype and self._travelling_shape(site, *other) == shape:
                return node
        members = {*self.region.members}
        source = next(o for node in self.region.members for o in tensor_operands(node) if o not in members)
        kwargs = {"dtype": value.dtype, "device": value.device}
        return self.emit("like", aten.new_empty.default, (source, shape), slice_, kwargs=kwargs)

    def _wait(self, step: int) -> None:
        buffer, sent, post = self.transfers.pop(step)
        slice_ = post.recv.slice if post.recv else 0
        data = self.emit("wait", ops.wait, (buffer, sent), slice_, step=step, pinned=True)
        if post.recv is None:
            return
        if self.schedule.carries_sums(post):
            self.received[step] = data
        else:
            self.held[post.recv.slice, post.recv.count] = data

    # --- sums and results -------------------------------------------------------------------------------------------

    def _accumulate(self, slice_: int, count: int, value: Node) -> None:
        """Add to the running sums, which may be in other pieces; 16-bit sums are held in float32 until they are sent or done."""
        met = [(first, size) for first, size in self.sums if first < slice_ + count and slice_ < first + size]
        old = {piece: self.sums.pop(piece) for piece in met}
        ends = sorted({slice_, slice_ + count, *(end for first, size in met for end in (first, first + size))})
        for at, stop in pairwise(ends):
            piece = (at, stop - at)
            terms = [
                self._rows(self.summed, node, first, piece)
                for (first, size), node in (*old.items(), ((slice_, count), value))
                if first <= at < first + size
            ]
            self.sums[piece] = terms[0] if len(terms) == 1 else self._sum(terms, at)

    def _sum(self, terms: list[Node], slice_: int) -> Node:
        dtype = tensor_of(self.summed.value).dtype
        wide = torch.float32 if dtype in SIXTEEN_BIT else dtype
        return self.emit("add", aten.add.Tensor, tuple(self.as_dtype(term, wide, slice_) for term in terms), slice_)

    def _summed_result(self) -> Node:
        """This rank's part of the sum, or all of it."""
        site = self.summed
        parts = []
        everything = site.kind is Kind.ALL_REDUCE
        slices = range(self.region.slices) if everything else self.schedule.owned_by(site.rank)
        for slice_, total in _within(self.sums, slices):
            if site.averages:
                total = self.emit("mean", aten.div.Tensor, (total, site.ranks), slice_)
            parts.append(self.as_dtype(total, tensor_of(site.value).dtype, slice_))
        joined = parts[0] if len(parts) == 1 else self.emit("result", aten.cat.default, (parts, site.dim), None)
        if shape_of(joined) != shape_of(site.wait):  # of shares that are not equal: padded, as what reads it expects
            missing = shape_of(site.wait)[site.dim] - shape_of(joined)[site.dim]
            padding = end_padding(shape_of(joined), site.dim, missing)
            joined = self.emit("padded", aten.constant_pad_nd.default, (joined, padding), None)
        return self.with_strides_of(site.wait, joined)

    def _exchanged_result(self) -> Node:
        """What came from each rank, its own block included, side by side."""
        site, m = self.site, self.region.slices_per_rank
        blocks = []
        for source in range(site.ranks):
            first = (source * site.ranks + site.rank) * m
            parts = [node for _, node in _within(self.held, range(first, first + m))]
            blocks.append(
                parts[0] if len(parts) == 1 else self.emit("block", aten.cat.default, (parts, site.dim), None)
            )
        joined = self.emit("result", aten.cat.default, (blocks, site.peer_dim), None)
        return self.with_strides_of(site.wait, joined)

    def _gathered_results(self) -> dict[Node, Node]:
        """The results of all ranks side by side, and the blocks of single ranks that others read."""
        site, m = self.site, self.region.slices_per_rank
        whole, dim = site.gathered
        slices = [node for _, node in _within(self.held, range(self.schedule.slices))]
        # What lies side by side in the result is joined first: where slices are rows, so are the tensors that are joined last.
        if site.dim != dim:
            slices = [self.emit("rows", aten.cat.default, (slices[part::m], dim), None) for part in range(m)]
        joined = self.with_strides_of(whole, self.emit("result", aten.cat.default, (slices, site.dim), None))
        return {whole: joined, **self.blocks(joined)}


def _within(pieces: Pieces, slices: range) -> list[tuple[int, Node]]:
    """Those that make up some neighbouring slices, in their order, each with its first one."""
    return sorted(((first, node) for (first, _), node in pieces.items() if first in slices), key=lambda piece: piece[0])
