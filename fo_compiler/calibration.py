"""Measure a `Machine` on a real process group: links, matmuls, what they do to each other, and what posting costs.

Every function that measures has to be called by all ranks of the default process group together; the answer is the same on
all of them. `fo-compiler calibrate` prints it and writes it to a file.
"""

from __future__ import annotations

import statistics
import time
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

T = TypeVar("T")

LINK_SIZES = (4_096, 65_536, 524_288, 2_097_152)  # bytes
MATMUL_SHAPES = (
    (16, 64, 64), (64, 128, 128), (128, 256, 256), (256, 512, 512), (512, 512, 512), (512, 1024, 1024), (1024, 1024, 1024),
    # thin ones: few rows, a short sum, few columns
    (16, 1024, 1024), (64, 2048, 512), (64, 512, 2048), (128, 2048, 2048), (2048, 32, 512), (4096, 64, 64), (256, 32, 256),
    (16, 32, 2048), (2048, 512, 32), (32, 512, 32), (128, 2048, 128), (8192, 128, 128), (512, 256, 64),
)  # fmt: skip
ALIKE = 1.3  # links whose bandwidths differ by less than this factor are one kind of link
PAUSE_S = 0.002  # of other work between the ops of a step
SHARED = 1.4  # times as long with the other direction in use: both share one port


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
    return max(3, min(20, 1_000_000 // max(size_bytes, 1)))


class Calibrator:
    """Measures the default process group. `device` is where tensors live; `repeats` of each measurement, median taken."""

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
        links: dict[tuple[int, int], LinkFit] = {}
        for shift in range(1, self.ranks) if shifts is None else shifts:
            samples = [(float(size), self.exchange_us(size, shift)) for size in sizes]
            for receiver, of_rank in enumerate(self._gathered(samples)):
                links[(receiver - shift) % self.ranks, receiver] = fit_link(of_rank)
        return links

    def exchange_us(self, size_bytes: int, shift: int = 1, both: bool = True) -> float:
        """Time until a message from the rank `shift` below is here, while one to the rank `shift` above leaves.

        With `both` False only even ranks send, so that a pair uses one direction.
        """
        sent = torch.ones(max(size_bytes // 4, 1), device=self.device)
        above, below = (self.rank + shift) % self.ranks, (self.rank - shift) % self.ranks
        sends = both or self.rank % 2 == 0
        receives = both or below % 2 == 0

        def once() -> None:  # into new memory, as in a rewritten graph
            self._post((sent, above) if sends else None, (torch.empty_like(sent), below) if receives else None)

        return self._each_us(once, _in_a_row(size_bytes))

    def full_duplex(self, size_bytes: int) -> bool:
        """Whether a message is as fast with one in the other direction as without (asked of pairs of neighbours)."""
        if self.ranks % 2:
            return True
        one_us, both_us = self.exchange_us(size_bytes, 1, both=False), self.exchange_us(size_bytes, 1)
        return max(self._gathered(both_us)) < SHARED * max(self._gathered(one_us))

    def collectives(self, sizes: Sequence[int] = LINK_SIZES) -> dict[Kind, LinkFit]:
        """Fits of the backend's own collectives; a kind that it does not have is absent. Sizes are of one rank's slice."""
        fits = {}
        for kind, run in COLLECTIVES.items():
            samples = []
            try:
                for size in sizes:
                    part = torch.ones(max(size // 4, 1), device=self.device)
                    whole = part.repeat(self.ranks)
                    each_us = self._each_us(partial(run, part, whole), _in_a_row(size))
                    samples.append((float(size), max(self._gathered(each_us))))
            except (RuntimeError, NotImplementedError):  # the same on all ranks: the backend lacks it
                continue
            fits[kind] = fit_link(samples)
        return fits

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

    def matmul_us(self, m: int, k: int, n: int, dtype: torch.dtype) -> float:
        """One [M, K] @ [K, N] with every rank computing."""
        a, b = torch.ones(m, k, dtype=dtype, device=self.device), torch.ones(k, n, dtype=dtype, device=self.device)
        out = torch.empty(m, n, dtype=dtype, device=self.device)
        torch.mm(a, b, out=out)
        in_a_row = max(1, min(200, int(2e8 / (2.0 * m * k * n))))
        return max(self._gathered(self._each_us(lambda: torch.mm(a, b, out=out), in_a_row)))

    def memory_GBps(self) -> float:
        """Bandwidth of adding two tensors into a third, 2 MB each: that of a received partial sum."""
        size = 524_288
        a, b = torch.ones(size, device=self.device), torch.ones(size, device=self.device)
        out = torch.empty_like(a)

        each_us = self._each_us(lambda: torch.add(a, b, out=out), 10)
        return 3 * 4 * size / (max(self._gathered(each_us)) * 1e3)

    def contention(self, size_bytes: int) -> tuple[float, float]:
        """(compute_slowdown, transfer_slowdown), from a transfer that lasts about three times its compute."""
        a, b = (torch.ones(256, 256, device=self.device) for _ in range(2))
        out = torch.empty_like(a)
        one_us = self.matmul_us(256, 256, 256, torch.float32)
        sent = torch.ones(max(size_bytes // 4, 1), device=self.device)
        above, below = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks

        def post() -> Transfer:
            return self.transport.post(self.group_name, (sent, above), (torch.empty_like(sent), below))

        alone_us = max(self._gathered(self._median_us(lambda: post().wait())))
        count = max(1, int(alone_us / one_us / 3))

        def compute() -> None:
            for _ in range(count):
                torch.mm(a, b, out=out)
            self._synchronize()

        compute_us = max(self._gathered(self._median_us(compute)))
        pairs = []
        for _ in range(2 * self.repeats):
            dist.barrier()
            start = time.perf_counter()
            transfer = post()
            compute()
            computed = time.perf_counter()
            transfer.wait()
            self._synchronize()
            pairs.append(((computed - start) * 1e6, (time.perf_counter() - start) * 1e6))
        computed_us = max(self._gathered(statistics.median(pair[0] for pair in pairs)))
        total_us = max(self._gathered(statistics.median(pair[1] for pair in pairs)))
        return slowdowns(compute_us, alone_us, computed_us, total_us)

    def margin(self) -> float:
        """What a prediction has to gain here: no less than what a transfer or a collective measured so far was off by."""
        noise = max(self._gathered(statistics.median(self._noise))) if self._noise else 0.0
        return min(max(DEFAULT_MARGIN, noise), 0.5)

    def machine(
        self,
        name: str = "calibrated",
        dtypes: Sequence[torch.dtype] = (torch.float32,),
        sizes: Sequence[int] = LINK_SIZES,
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
            collectives = self.collectives(sizes)
            notes += [f"{kind}: this backend has none" for kind in COLLECTIVES if kind not in collectives]
            margin = self.margin()
            say("posting ...")
            post_us = self.post_us()
            say("compute and transfers together ...")
            slow = self.contention(4 * sizes[-1])
        say("matmuls ...")
        points = tuple(
            Point(m, k, n, dtype_name(str(dtype)), self.matmul_us(m, k, n, dtype))
            for dtype in dtypes
            for m, k, n in shapes
        )
        memory_GBps = self.memory_GBps()
        machine = Machine(
            name,
            f"fo-compiler calibrate: {self.ranks} ranks, {dist.get_backend()}, {self.device.type}, torch {torch.__version__}",
            network,
            Measured(points, memory_GBps),
            post_us=post_us,
            compute_slowdown=slow[0],
            transfer_slowdown=slow[1],
            margin=margin,
            collectives=tuple(
                CollectiveTime(kind.value, self.ranks, fit.latency_us, fit.bandwidth_GBps)
                for kind, fit in collectives.items()
            ),
        )
        return Calibration(machine, links, tuple(notes), {str(kind): fit for kind, fit in collectives.items()})

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _post(self, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> None:
        if send is None and recv is None:
            return
        transfer: Transfer = self.transport.post(self.group_name, send, recv)
        transfer.wait()
        self._synchronize()

    def _median_us(self, once: Callable[[], None]) -> float:
        once()
        times = []
        for _ in range(self.repeats):
            dist.barrier()
            start = time.perf_counter()
            once()
            self._synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        self._noise.append(noise_of(times))
        return statistics.median(times)

    def _each_us(self, run: Callable[[], object], times: int) -> float:
        """Of `times` in a row, the time of each."""

        def in_a_row() -> None:
            for _ in range(times):
                run()

        return self._median_us(in_a_row) / times

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _gathered(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values
