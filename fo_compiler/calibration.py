"""Measure a `Machine` on a real process group: links, matmuls, what they do to each other, and what posting costs.

Every function that measures has to be called by all ranks of the default process group together; the answer is the same on
all of them. `fo-compiler calibrate` prints it and writes it to a file.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .runtime.ops import exchange, wait
from .runtime.transport import Transfer, current_transport
from .schedule.ir import Kind
from .schedule.machine import DEFAULT_MARGIN, CollectiveTime, Machine
from .schedule.matmul import MatmulPoint as Point
from .schedule.matmul import Measured, dtype_name
from .schedule.network import Matrix, Network, Uniform
from .trials import Trial, try_regions, with_margins

T = TypeVar("T")
Run = tuple[Callable[[], object], int]  # what is timed, and how many of it in a row

LINK_SIZES = (4_096, 65_536, 524_288, 2_097_152)  # bytes
LARGE_SIZE = 8_388_608  # as well, where links are fast: it does not fit the caches that the smaller ones stay in
FAST_US = 5_000  # of the largest of LINK_SIZES
QUICK_US = 20_000  # of a message of a whole region
SUMMED_SIZE = 16_777_216  # bytes of each tensor, more than caches hold
MATMUL_SHAPES = (
    (16, 64, 64), (64, 128, 128), (128, 256, 256), (256, 512, 512), (512, 512, 512), (512, 1024, 1024), (1024, 1024, 1024),
    # thin ones: few rows, a short sum, few columns
    (16, 1024, 1024), (64, 2048, 512), (64, 512, 2048), (128, 2048, 2048), (2048, 32, 512), (4096, 64, 64), (256, 32, 256),
    (16, 32, 2048), (2048, 512, 32), (32, 512, 32), (128, 2048, 128), (8192, 128, 128), (512, 256, 64),
)  # fmt: skip
ALIKE = 1.3  # links whose bandwidths differ by less than this factor are one kind of link
PAUSE_S = 0.002  # of other work between the ops of a step
SHARED = 1.25  # times as long with the other direction in use: both share one port


@dataclass(frozen=True)
class LinkFit:
    """`latency_us + bytes / bandwidth`, fitted to measured transfers; errors are shares of the measured times."""

    latency_us: float
    bandwidth_GBps: float
    median_error: float
    worst_error: float


@dataclass(frozen=True)
class Calibration:
    """A measured machine, and how well it fits what was measured."""

    machine: Machine
    links: dict[tuple[int, int], LinkFit] = field(repr=False)
    notes: tuple[str, ...] = ()
    collectives: dict[str, LinkFit] = field(default_factory=dict, repr=False)
    trials: dict[str, Trial] = field(default_factory=dict, repr=False)

    @property
    def points(self) -> tuple[Point, ...]:
        """The measured matmuls."""
        assert isinstance(self.machine.matmul, Measured)
        return self.machine.matmul.points

    @property
    def median_error(self) -> float:
        return statistics.median(fit.median_error for fit in self.links.values()) if self.links else 0.0

    @property
    def worst_error(self) -> float:
        return max((fit.worst_error for fit in self.links.values()), default=0.0)


def fit_link(samples: Sequence[tuple[float, float]]) -> LinkFit:
    """Fit (bytes, microseconds) samples, each weighted by its relative error; the latency is not below 0."""
    if len({size for size, _ in samples}) < 2:
        raise ValueError("a fit needs transfers of at least two sizes")
    weights = [1 / us**2 for _, us in samples]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, samples, strict=True)) / total
    mean_us = sum(w * us for w, (_, us) in zip(weights, samples, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, samples, strict=True))
    slope = sum(w * (s - mean_size) * (us - mean_us) for w, (s, us) in zip(weights, samples, strict=True)) / spread
    latency = mean_us - slope * mean_size
    if latency < 0 or slope <= 0:  # through the origin
        latency = 0.0
        slope = sum(w * size * us for w, (size, us) in zip(weights, samples, strict=True)) / sum(
            w * size**2 for w, (size, _) in zip(weights, samples, strict=True)
        )
    errors = [abs(latency + slope * size - us) / us for size, us in samples]
    return LinkFit(latency, 1 / (slope * 1e3), statistics.median(errors), max(errors))


def network_of(links: dict[tuple[int, int], LinkFit], ranks: int, full_duplex: bool) -> Network:
    """The simplest network that says what was measured of every ordered pair of ranks."""
    speeds = [fit.bandwidth_GBps for fit in links.values()]
    if max(speeds) <= ALIKE * min(speeds):
        latency = statistics.median(fit.latency_us for fit in links.values())
        return Uniform(latency, statistics.median(speeds), full_duplex=full_duplex)

    def table(value: Callable[[LinkFit], float], diagonal: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(value(links[a, b]) if a != b else diagonal for b in range(ranks)) for a in range(ranks))

    return Matrix(
        table(lambda fit: fit.latency_us, 0.0), table(lambda fit: fit.bandwidth_GBps, max(speeds)), (), full_duplex
    )


def slowdowns(compute_us: float, transfer_us: float, computed_us: float, total_us: float) -> tuple[float, float]:
    """How much compute and a transfer slow each other down, from one longer transfer that runs under some compute.

    `compute_us` and `transfer_us` are each alone; together the compute took `computed_us` and all of it `total_us`.
    While both ran the transfer did what it would do alone in `transfer_us - (total_us - computed_us)`.
    """
    compute = max(1.0, computed_us / compute_us)
    done_us = transfer_us - max(total_us - computed_us, 0.0)
    if done_us <= 0.02 * transfer_us:  # it hardly moved
        return compute, 50.0
    return compute, max(1.0, computed_us / done_us)


def _by_name(values: dict[Kind, T]) -> dict[str, T]:
    return {str(kind): value for kind, value in values.items()}


def _quick_size(links: dict[tuple[int, int], LinkFit], sizes: Sequence[int]) -> int:
    """The largest of these messages that links carry soon enough to be sent a hundred times, or the smallest."""
    slowest = min(fit.bandwidth_GBps for fit in links.values())
    return max((size for size in sizes if size / (slowest * 1e3) < QUICK_US), default=min(sizes))


def noise_of(times: Sequence[float]) -> float:
    """By what share of it a measurement of this kind is off, half of the time: half of what lies between the quartiles."""
    if len(times) < 2:
        return 0.0
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / 2 / median


# --- measuring ------------------------------------------------------------------------------------------------------

# torch 2.13 has new names for these two, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# One run of a collective: `part` is one rank's slice, `whole` that of all ranks.
COLLECTIVES: dict[Kind, Callable[[Tensor, Tensor], Any]] = {
    Kind.ALL_GATHER: lambda part, whole: _all_gather(torch.empty_like(whole), part),
    Kind.REDUCE_SCATTER: lambda part, whole: _reduce_scatter(torch.empty_like(part), whole),
    Kind.ALL_REDUCE: lambda part, whole: dist.all_reduce(whole.clone()),
    Kind.ALL_TO_ALL: lambda part, whole: dist.all_to_all_single(torch.empty_like(whole), whole),
}


def _in_a_row(size_bytes: int) -> int:
    """How many messages are timed together, so that a late start, or a burst that a limited link lets through, matters less."""
    return max(6, min(20, 2_000_000 // max(size_bytes, 1)))


class Calibrator:
    """Measures the default process group. `device` is where tensors live; `repeats` of each measurement, median taken.

    Measurements of one kind take turns. What disturbs the machine for a while is then in a turn of each of them, which the
    median leaves out, and not in all turns of one.
    """

    def __init__(self, device: str = "cpu", repeats: int = 5) -> None:
        self.device = torch.device(device)
        self.repeats = repeats
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None
        self.group_name = dist.group.WORLD.group_name
        self._noise: list[float] = []  # of each measurement so far
        self.transport = current_transport()  # the one of the ops: messages of both have one order

    def links(
        self, sizes: Sequence[int] = LINK_SIZES, shifts: Sequence[int] | None = None
    ) -> dict[tuple[int, int], LinkFit]:
        """Fits of the links from each rank to the rank `shift` above, all of one shift at the same time."""
        tensors = [self._ones(size) for size in sizes]
        asked = [(shift, sent) for shift in shifts or range(1, self.ranks) for sent in tensors]
        times = self._each_us([self._exchange(sent, shift) for shift, sent in asked])
        links: dict[tuple[int, int], LinkFit] = {}
        for receiver, of_rank in enumerate(self._gathered(times)):
            samples: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
            for (shift, sent), us in zip(asked, of_rank, strict=True):
                samples[shift].append((float(sent.nbytes), us))
            for shift, of_shift in samples.items():
                links[(receiver - shift) % self.ranks, receiver] = fit_link(of_shift)
        return links

    def full_duplex(self, size_bytes: int) -> bool:
        """Whether a message is as fast with one in the other direction as without (asked of pairs of neighbours)."""
        if self.ranks % 2:
            return True
        sent = self._ones(size_bytes)
        times = self.slowest_us([self._exchange(sent, 1, both=False), self._exchange(sent, 1)] * 3)
        # Medians of three: where ranks share cores the answer differed from run to run.
        return statistics.median(times[1::2]) < SHARED * statistics.median(times[::2])

    def _exchange(self, sent: Tensor, shift: int, both: bool = True) -> Run:
        """Until a tensor from the rank `shift` below is here, while one to the rank `shift` above leaves.

        With `both` False only even ranks send, so that a pair uses one direction.
        """
        above, below = (self.rank + shift) % self.ranks, (self.rank - shift) % self.ranks
        sends = both or self.rank % 2 == 0
        receives = both or below % 2 == 0

        def once() -> None:  # into new memory, as in a rewritten graph
            self._post((sent, above) if sends else None, (torch.empty_like(sent), below) if receives else None)

        return once, _in_a_row(sent.nbytes)

    def collectives(self, sizes: Sequence[int] = LINK_SIZES) -> dict[Kind, LinkFit]:
        """Fits of the backend's own collectives; a kind that it does not have is absent. Sizes are of one rank's slice."""
        tensors = [(part, part.repeat(self.ranks)) for part in map(self._ones, sizes)]
        asked = []
        for kind, run in COLLECTIVES.items():
            try:
                run(*tensors[0])
            except (RuntimeError, NotImplementedError):  # the same on all ranks: the backend lacks it
                continue
            asked += [(kind, part, whole) for part, whole in tensors]
        times = self.slowest_us(
            [(partial(COLLECTIVES[kind], part, whole), _in_a_row(part.nbytes)) for kind, part, whole in asked]
        )
        samples: defaultdict[Kind, list[tuple[float, float]]] = defaultdict(list)
        for (kind, part, _), us in zip(asked, times, strict=True):
            samples[kind].append((float(part.nbytes), us))
        return {kind: fit_link(of_kind) for kind, of_kind in samples.items()}

    def post_us(self) -> float:
        """How long a step holds up a rank: to post it, and to wait for it when it is done.

        Through the ops of a rewritten graph, and with a pause between, as they run beside compute: a processor that
        comes back to them after milliseconds of other work takes several times as long as one that does nothing else.
        """
        small = torch.ones(8, device=self.device)
        above, below = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        times = []
        for _ in range(4 * self.repeats):
            dist.barrier()
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            received = exchange(small, above, below, self.group_name, "calibration")
            posted = time.perf_counter()
            time.sleep(PAUSE_S)
            before = time.perf_counter()
            wait(received, small)
            times.append((posted - start + time.perf_counter() - before) * 1e6)
        return max(self._gathered(statistics.median(times)))

    def matmuls_us(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> list[float]:
        """[M, K] @ [K, N] of each (M, K, N), with every rank computing."""
        runs = []
        for m, k, n in shapes:
            a, b = torch.ones(m, k, dtype=dtype, device=self.device), torch.ones(k, n, dtype=dtype, device=self.device)
            out = torch.empty(m, n, dtype=dtype, device=self.device)
            runs.append((partial(torch.mm, a, b, out=out), max(1, min(200, int(2e8 / (2.0 * m * k * n))))))
        return self.slowest_us(runs)

    def memory_GBps(self) -> float:
        """Bandwidth of adding two large tensors into new memory: that of a received partial sum, and of joining slices.

        What is small and stays in caches is several times as fast, but is soon done in either case.
        """
        a, b = self._ones(SUMMED_SIZE), self._ones(SUMMED_SIZE)
        (each_us,) = self.slowest_us([(partial(torch.add, a, b), 3)])
        return 3 * SUMMED_SIZE / (each_us * 1e3)

    def link_sizes(self) -> tuple[int, ...]:
        """The sizes that links are fitted to: large ones, too, where links are fast enough to be asked for them."""
        (us,) = self.slowest_us([self._exchange(self._ones(LINK_SIZES[-1]), 1)])
        return (*LINK_SIZES, LARGE_SIZE) if us < FAST_US else LINK_SIZES

    def contention(self, size_bytes: int) -> tuple[float, float]:
        """(compute_slowdown, transfer_slowdown), from a transfer that lasts about three times its compute."""
        a, b = (torch.ones(256, 256, device=self.device) for _ in range(2))
        out = torch.empty_like(a)
        sent = self._ones(size_bytes)
        above, below = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

        transfer, _ = self._exchange(sent, 1)

        def multiply() -> None:
            torch.mm(a, b, out=out)

        one_us, of_transfer_us = self.slowest_us([(multiply, 6), (transfer, 1)])
        count = max(1, int(of_transfer_us / one_us / 3))
        turns = []
        for _ in range(2 * self.repeats):
            alone_us, compute_us = self._timed_us(transfer), self._timed_us(multiply, count)
            dist.barrier()
            start = time.perf_counter()
            posted = self.transport.post(self.group_name, (sent, above), (torch.empty_like(sent), below))
            for _ in range(count):
                multiply()
            self._synchronize()
            computed = time.perf_counter()
            posted.wait()
            self._synchronize()
            turns.append((compute_us, alone_us, (computed - start) * 1e6, (time.perf_counter() - start) * 1e6))
        return slowdowns(*self._slowest([statistics.median(times) for times in zip(*turns, strict=True)]))

    def margin(self) -> float:
        """What a prediction has to gain here: no less than what a transfer or a collective measured so far was off by."""
        noise = max(self._gathered(statistics.median(self._noise))) if self._noise else 0.0
        return min(max(DEFAULT_MARGIN, noise), 0.5)

    def machine(
        self,
        name: str = "calibrated",
        dtypes: Sequence[torch.dtype] = (torch.float32,),
        shapes: Sequence[tuple[int, int, int]] = MATMUL_SHAPES,
        say: Callable[[str], None] = lambda _: None,
    ) -> Calibration:
        """Measure it all."""
        links: dict[tuple[int, int], LinkFit] = {}
        network: Network = Uniform(0.0, 1e3)
        post_us, slow = 0.0, (1.0, 1.0)
        collectives: dict[Kind, LinkFit] = {}
        margin = DEFAULT_MARGIN
        notes = []
        if self.ranks > 1:
            say("links ...")
            sizes = self.link_sizes()
            links = self.links(sizes)
            full_duplex = self.full_duplex(sizes[-1])
            if not full_duplex:
                notes.append("both directions of a pair share one port (half duplex)")
                # A message that had a direction to itself would have been faster: the model shares the port itself.
                links = {
                    pair: LinkFit(fit.latency_us, 2 * fit.bandwidth_GBps, fit.median_error, fit.worst_error)
                    for pair, fit in links.items()
                }
            network = network_of(links, self.ranks, full_duplex)
            say("collectives ...")
            collectives = self.collectives()
            notes += [f"{kind}: this backend has none" for kind in COLLECTIVES if kind not in collectives]
            margin = self.margin()
            say("posting ...")
            post_us = self.post_us()
            say("compute and transfers together ...")
            slow = self.contention(LARGE_SIZE)
        say("matmuls ...")
        points = tuple(
            Point(m, k, n, dtype_name(str(dtype)), us)
            for dtype in dtypes
            for (m, k, n), us in zip(shapes, self.matmuls_us(shapes, dtype), strict=True)
        )
        machine = Machine(
            name,
            f"fo-compiler calibrate: {self.ranks} ranks, {dist.get_backend()}, {self.device.type}, torch {torch.__version__}",
            network,
            Measured(points, self.memory_GBps()),
            post_us=post_us,
            compute_slowdown=slow[0],
            transfer_slowdown=slow[1],
            margin=margin,
            collectives=tuple(
                CollectiveTime(kind.value, self.ranks, fit.latency_us, fit.bandwidth_GBps)
                for kind, fit in collectives.items()
            ),
        )
        trials: dict[Kind, Trial] = {}
        if self.ranks > 1:
            say("whole regions ...")
            trials, untried = try_regions(self, machine, _quick_size(links, sizes), dtypes[0], collectives)
            notes += untried
            machine = with_margins(machine, trials)
        return Calibration(machine, links, tuple(notes), _by_name(collectives), _by_name(trials))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _post(self, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> None:
        if send is None and recv is None:
            return
        transfer: Transfer = self.transport.post(self.group_name, send, recv)
        transfer.wait()
        self._synchronize()

    def slowest_us(self, runs: Sequence[Run], repeats: int | None = None) -> list[float]:
        """The time of one of each of these, on the slowest rank: the median of the turns that they take."""
        return self._slowest(self._each_us(runs, repeats))

    def _each_us(self, runs: Sequence[Run], repeats: int | None = None) -> list[float]:
        """The same, on this rank."""
        times: list[list[float]] = [[] for _ in runs]
        for turn in range(1 + (repeats or self.repeats)):
            for of_run, (run, count) in zip(times, runs, strict=True):
                us = self._timed_us(run, count) / count
                if turn > 0:  # the first one warms up
                    of_run.append(us)
        self._noise += [noise_of(of_run) for of_run in times]
        return [statistics.median(of_run) for of_run in times]

    def _slowest(self, times: list[float]) -> list[float]:
        return [max(of_ranks) for of_ranks in zip(*self._gathered(times), strict=True)]

    def _ones(self, size_bytes: int) -> Tensor:
        return torch.ones(max(size_bytes // 4, 1), device=self.device)

    def _timed_us(self, run: Callable[[], object], count: int = 1) -> float:
        """Of `count` in a row, on ranks that begin together."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            run()
        self._synchronize()
        return (time.perf_counter() - start) * 1e6

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _gathered(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values
