"""Rewrite a region: its schedule, for this rank, as FX nodes. Every transfer, wait and add becomes one, too."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..runtime import ops
from ..schedule import Add, Compute, Kind, Post, Schedule, Store, Stream, Wait
from ..schedule.transform import own_together
from .regions import Region
from .rules import aten
from .separability import SIXTEEN_BIT, Cut, Slices, Spans, bounds, local_shape, shape_of, tensor_of, tensor_operands
from .sites import Site
from .sizes import Size, as_size
from .slice_writer import SliceWriter, replace_region
from .uneven import end_padding


def rewrite_region(
    graph: Graph, region: Region, schedule: Schedule, tag: str, which: str, join_own: bool = True
) -> None:
    """Replace `region` by the program of this rank. The graph is valid before and after; nodes keep their values.

    Errors and profiles name its steps by `tag`, which is the region's, and by `which` graph it is (forward, backward, inference).
    With `join_own` a rank's own slices are computed in one piece, where nothing waits for a part of them.
    """
    replace_region(graph, region, lambda after: _ScheduleWriter(graph, region, schedule, tag, which, after, join_own))


class _ScheduleWriter(SliceWriter):
    """Turns the actions of one rank into nodes."""

    def __init__(
        self, graph: Graph, region: Region, schedule: Schedule, tag: str, which: str, after: Node, join_own: bool
    ) -> None:
        super().__init__(graph, region, tag, which, after)
        self.schedule = schedule
        self.summed = region.scatter or region.site  # where sums travel: the collective that makes them
        self.held: dict[int, Node] = {}  # slices at hand, where they travel unchanged
        self.sums: dict[int, Node] = {}  # scatter and reduce: running sums
        self.transfers: dict[int, tuple[Node, Node, Post]] = {}  # step -> receive buffer, what was sent, its post
        self.received: dict[int, Node] = {}  # step -> awaited partial, or finished, sum
        self.actions = schedule.program(self.site.rank)
        self.own: tuple[int, ...] = ()  # slices of this rank that are computed in one piece
        self.units = self.slices  # as they travel
        together = own_together(schedule, self.site.rank) if join_own else None
        # A tensor that is read as [outer, rows] is joined without a copy only where all slices are equal.
        if together is not None and all(cut.outer == 1 for cut in region.cuts.values()):
            self.actions, self.own = together
            first = self._index(self.own[0])
            ends = (*range(1, first + 1), *range(first + len(self.own), self.units.count + 1))
            self.slices = Spans(**vars(self.units), ends=ends)

    # --- the program ------------------------------------------------------------------------------------------------

    def program(self) -> None:
        if self.region.is_gather:
            self._own_slices()
        for action in self.actions:
            match action:
                case Compute(slice_):
                    if slice_ not in self.own:
                        self._compute(slice_)
                    elif slice_ == self.own[0]:
                        self._compute_own()
                    self.step += 1
                case Post():
                    self._post(action)
                case Wait(step):
                    self._wait(step)
                case Add(slice_, step):
                    self._accumulate(slice_, self.received.pop(step))
                case Store(slice_, step):
                    self.sums[slice_] = self.received.pop(step)

    def results(self) -> dict[Node, Node]:
        kind = self.site.kind
        if kind.reduces:
            return {self.summed.wait: self._summed_result()}
        if kind is Kind.ALL_GATHER_OUT:
            return self._gathered_results()
        return {} if self.region.is_gather else {self.site.wait: self._exchanged_result()}

    def _own_slices(self) -> None:
        """What this rank has at the start: its shard, in parts; in an all-to-all a block for each peer, in parts."""
        site, m = self.site, self.region.slices_per_rank
        for slice_ in self.schedule.owned_by(site.rank):
            self.held[slice_] = self._own_part(self._own_block(slice_), slice_ % m, slice_)

    def _own_block(self, slice_: int) -> Node:
        """What this rank has at the start for one peer in an all-to-all; its shard, in any other kind."""
        site = self.site
        if site.share is not None:
            first, last = (self._unit(part)[end] for part, end in ((0, 0), (self.units.per_rank - 1, 1)))
            return self._rows(site.shard, (0, as_size(last - first)), slice_)
        if not site.kind.is_all_to_all:
            return site.shard
        return self._part(site.shard, site.peer_dim, Slices(site.ranks), self.schedule.destination(slice_), slice_)

    def _own_part(self, block: Node, part: int, slice_: int) -> Node:
        first = self._unit(0)[0]
        start, stop = self._unit(part)
        return self._rows(block, (as_size(start - first), as_size(stop - first)), slice_)

    def _unit(self, part: int) -> tuple[Size, Size]:
        """Where a part of this rank's share lies in the whole."""
        site = self.site
        return bounds(shape_of(site.value), Cut(site.dim), self.units, site.rank * self.units.per_rank + part)

    def _rows(self, node: Node, where: tuple[Size, Size], slice_: int) -> Node:
        dim = self.site.dim
        if where == (0, shape_of(node)[dim]):
            return node
        return self.emit("own", aten.slice.Tensor, (node, dim, *where), slice_)

    def _part(self, node: Node, dim: int, parts: Slices, index: int, slice_: int) -> Node:
        """One of the `parts` of a tensor."""
        if parts.count == 1:
            return node
        where = bounds(shape_of(node), Cut(dim), parts, index)
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

    def _compute_own(self) -> None:
        """The own slices in one piece; of its result each travels, or is added to, by itself."""
        first = self.own[0]
        local = self.compute(self._index(first), self._own_block(first) if self.region.is_gather else None)
        if self.region.is_gather:
            return
        for part, slice_ in enumerate(self.own):
            piece = self._own_part(local[self.site.value], part, slice_)
            if self.site.kind.reduces:
                self._accumulate(slice_, piece)
            else:
                self.held[slice_] = piece

    def _compute(self, slice_: int) -> None:
        gathers = self.region.is_gather
        local = self.compute(self._index(slice_), self.held[slice_] if gathers else None)
        if self.site.kind.reduces:
            self._accumulate(slice_, local[self.summed.value])
        elif not gathers:
            self.held[slice_] = local[self.site.value]

    # --- transfers --------------------------------------------------------------------------------------------------

    def _post(self, post: Post) -> None:
        carries_sums = self.schedule.carries_sums(post)
        site, held = (self.summed, self.sums) if carries_sums else (self.site, self.held)
        slice_ = post.send.slice if post.send else post.recv.slice if post.recv else 0
        if post.send is not None:
            sent = self.as_dtype(held[post.send.slice], tensor_of(site.value).dtype, slice_)
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

    def _travelling_shape(self, site: Site, slice_: int) -> list[Size]:
        return local_shape(shape_of(site.value), Cut(site.dim), self.units, self._index(slice_))

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
            self.held[post.recv.slice] = data

    # --- sums and results -------------------------------------------------------------------------------------------

    def _accumulate(self, slice_: int, value: Node) -> None:
        """Add to a running sum; 16-bit sums are held in float32 until they are sent or done."""
        if slice_ not in self.sums:
            self.sums[slice_] = value
            return
        dtype = tensor_of(self.summed.value).dtype
        wide = torch.float32 if dtype in SIXTEEN_BIT else dtype
        terms = tuple(self.as_dtype(term, wide, slice_) for term in (self.sums[slice_], value))
        self.sums[slice_] = self.emit("add", aten.add.Tensor, terms, slice_)

    def _summed_result(self) -> Node:
        """This rank's part of the sum, or all of it."""
        site = self.summed
        parts = []
        everything = site.kind is Kind.ALL_REDUCE
        for slice_ in range(self.region.slices) if everything else self.schedule.owned_by(site.rank):
            total = self.sums[slice_]
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
            parts = [self.held[first + part] for part in range(m)]
            blocks.append(parts[0] if m == 1 else self.emit("block", aten.cat.default, (parts, site.dim), None))
        joined = self.emit("result", aten.cat.default, (blocks, site.peer_dim), None)
        return self.with_strides_of(site.wait, joined)

    def _gathered_results(self) -> dict[Node, Node]:
        """The results of all ranks side by side, and the blocks of single ranks that others read."""
        site, m = self.site, self.region.slices_per_rank
        whole, dim = site.gathered
        slices = [self.held[slice_] for slice_ in range(self.schedule.slices)]
        # What lies side by side in the result is joined first: where slices are rows, so are the tensors that are joined last.
        if site.dim != dim:
            slices = [self.emit("rows", aten.cat.default, (slices[part::m], dim), None) for part in range(m)]
        joined = self.with_strides_of(whole, self.emit("result", aten.cat.default, (slices, site.dim), None))
        return {whole: joined, **self.blocks(joined)}
