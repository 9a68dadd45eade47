"""An all-reduce slice by slice, by the library: the matmul makes a slice, whose all-reduce runs under the next one.

    matmul -> all_reduce(x)     ->     mm, all_reduce, mm, all_reduce, mm, all_reduce, wait, wait, wait, cat

Slices are of unequal size, so that the last all-reduce, which nothing hides, is a small one
(`schedule/sliced_collective.py`). The library's sums are those of the plain collective: of the same dtype, and with the
same bits on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from torch.fx import Graph, Node

from ..errors import MachineError
from ..options import LIBRARY, Options
from ..schedule import Kind, Stream
from ..schedule.choose import collective_us
from ..schedule.machine import Machine
from ..schedule.sliced_collective import SlicedTime, choose_slices
from ..schedule.sliced_collective import Slices as Series
from .decide import LONG_ROWS, WHOLE, Products, body_us, copied_us, machine_of, products_of, slice_bytes_of
from .edit import c10d
from .regions import Region, most_slices, plan_region
from .rules import aten
from .separability import NotSeparable, Spans, tensor_of
from .sites import Site
from .slice_writer import SliceWriter, replace_region

UNITS = 64  # how finely slices are sized


@dataclass(frozen=True)
class SlicedAllReduce:
    """A region whose all-reduce runs by slices, and what that saves against the plain one."""

    region: Region
    series: Series
    saved_us: float
    reason: str

    def describe(self) -> str:
        return self.series.describe()


def slice_all_reduce(site: Site, options: Options, reserved: frozenset[Node]) -> SlicedAllReduce | None:
    """The all-reduce of `site` in slices; None where it has no matmul to be sliced with, or no slices are predicted to pay.

    `reserved` is as for `decide`. With rewrite='always' no gain has to be predicted.
    """
    if options.schedule not in ("auto", LIBRARY) or site.ranks == 1:
        return None
    best: SlicedAllReduce | None = None
    try:
        finest = options.slices_per_rank or max(1, min(UNITS // site.ranks, most_slices(site, LONG_ROWS)))
        for depth in (options.depth,) if options.depth is not None else (1, 2):
            region = plan_region(site, finest, depth, reserved)
            found = _predicted(region, options)
            if found is not None and (best is None or found.saved_us > best.saved_us):
                best = found
    except (MachineError, NotSeparable):
        return None
    return best


def _predicted(region: Region, options: Options) -> SlicedAllReduce | None:
    site = region.site
    machine = machine_of(options, tensor_of(site.value).device.type)
    equal = options.slices_per_rank is not None
    chosen, plain_us = _chosen(machine, site.ranks, region.slices, products_of(region), slice_bytes_of(region), equal)
    if chosen is None:
        return None
    predicted_us = chosen.predicted_us + copied_us(site.value, machine)
    saved_us = plain_us - predicted_us
    if options.rewrite == "auto" and saved_us <= machine.least_gain(options.margin) * plain_us:
        return None
    reason = (
        f"predicted {saved_us / plain_us:.1%} faster on machine {machine.name} with the library's all-reduce of each slice "
        f"behind its matmuls: plain {plain_us / 1e3:.4g} ms, {chosen.slices.describe()} {predicted_us / 1e3:.4g} ms"
    )
    if options.rewrite == "always":
        reason = f"rewrite='always'; {reason}"
    return SlicedAllReduce(region, chosen.slices, saved_us, reason)


@lru_cache(maxsize=1024)  # the layers of a model ask the same question
def _chosen(
    machine: Machine,
    ranks: int,
    units: int,
    products: Products,
    slice_bytes: float,
    equal: bool,
) -> tuple[SlicedTime | None, float]:
    """The best slices, and the time of the plain all-reduce behind its matmuls."""

    def compute_us(share: Fraction) -> float:
        return body_us(products, machine, share)

    def summed_us(share: Fraction) -> float:
        return collective_us(Kind.ALL_REDUCE, machine, ranks, float(share) * slice_bytes)

    scale = max(machine.scale(rank) for rank in range(ranks))
    plain_us = compute_us(WHOLE) * scale + summed_us(WHOLE)
    return choose_slices(machine, units, compute_us, summed_us, equal=equal), plain_us


def rewrite_in_slices(graph: Graph, sliced: SlicedAllReduce, tag: str, which: str) -> None:
    """Replace the region by its slices. The graph is valid before and after; nodes keep their values."""
    replace_region(graph, sliced.region, lambda after: _Writer(graph, sliced, tag, which, after))


class _Writer(SliceWriter):
    def __init__(self, graph: Graph, sliced: SlicedAllReduce, tag: str, which: str, after: Node) -> None:
        super().__init__(graph, sliced.region, tag, which, after)
        units = self.slices
        self.slices = Spans(units.ranks, units.per_rank, units.rows, ends=sliced.series.ends)
        self.sums: list[Node] = []

    def program(self) -> None:
        op, group_name = self.site.collective.args[1:3]
        for index in self.slices.numbers:
            value = self.compute(index)[self.site.value]
            arguments = (value, op, group_name)
            self.sums.append(
                self.emit("sum", c10d.all_reduce.default, arguments, index, stream=Stream.COMM, pinned=True)
            )
            self.step += 1

    def results(self) -> dict[Node, Node]:
        parts = [
            self.emit("wait", c10d.wait_tensor.default, (summed,), index, pinned=True)
            for index, summed in zip(self.slices.numbers, self.sums, strict=True)
        ]
        joined = self.emit("result", aten.cat.default, (parts, self.site.dim), None)
        return {self.site.wait: self.with_strides_of(self.site.wait, joined)}
