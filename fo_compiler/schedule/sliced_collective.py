"""The library's own collective, slice by slice: the collective of a slice starts as soon as the slice is computed.

    compute   0000000000000000 | 11111111 | 2222 | 33 | 4
    sum                        | 00000000 | 1111 | 22 | 3 | 4

What is exposed is the collective of the last slice, so slices get smaller: each one's collective runs under the next one's
compute, down to a last slice that costs next to nothing. Where communication takes longer than compute slices grow instead,
so that the links start early and never stand still. This is for an all-reduce without a matmul behind it, half of whose
transfers between pairs of ranks would be exposed, and for links on which the library is better than pairs are (NVLink SHARP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from .machine import Machine

Cost = Callable[[Fraction], float]  # time in us, of a share of the whole
COUNTS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
CAUTION = 1.25  # slices shrink as if collectives took so many times as long as the machine says
STEEPEST = 8.0  # a slice has at most this many times the rows of the next one


@dataclass(frozen=True)
class Slices:
    """Slices of `units` equal units: slice i is made of the units from `ends[i - 1]` (0 for the first) up to `ends[i]`."""

    units: int
    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        starts = (0, *self.ends[:-1])
        if not self.ends or self.ends[-1] != self.units or any(a >= b for a, b in zip(starts, self.ends, strict=True)):
            raise ValueError(f"expected ends that grow up to {self.units}, got {self.ends}")

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip((0, *self.ends[:-1]), self.ends, strict=True))

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Of the whole, in the order of the slices."""
        return tuple(Fraction(end - start, self.units) for start, end in self.bounds)

    def describe(self) -> str:
        sizes = ":".join(str(end - start) for start, end in self.bounds)
        return f"library x{len(self.ends)} ({sizes})"


@dataclass(frozen=True)
class SlicedTime:
    slices: Slices
    predicted_us: float


def choose_slices(
    machine: Machine, units: int, compute_us: Cost, collective_us: Cost, *, equal: bool = False
) -> SlicedTime | None:
    """The fastest of a few geometric series of slices, or `equal` ones of a unit each; None where there is one unit only.

    `compute_us(share)` is the time of the matmuls on a share of the whole, `collective_us(share)` that of its collective.
    """
    if units < 2:
        return None
    compute_us, collective_us = cache(compute_us), cache(collective_us)
    if equal:
        candidates = [Slices(units, tuple(range(1, units + 1)))]
    else:
        candidates = list(series(units, _ratio(compute_us(Fraction(1)), collective_us(Fraction(1)))))
    times = {slices: sliced_us(machine, slices, compute_us, collective_us) for slices in candidates}
    best_us = min(times.values())
    # A part in a million is no difference: fewer slices come first.
    best = next(slices for slices, us in times.items() if us <= best_us * (1 + 1e-6))
    return SlicedTime(best, times[best])


def _ratio(compute_us: float, collective_us: float) -> float:
    """By what the sizes of slices change. One that is too small for the collective before it exposes all that is left of it."""
    ratio = collective_us / compute_us if compute_us else STEEPEST
    return min(max(ratio, 1 / STEEPEST, min(CAUTION * ratio, 1.0)), STEEPEST)


def series(units: int, ratio: float) -> Iterator[Slices]:
    """Slices whose sizes go down (or up) by the ratio of communication to compute, by its root, and not at all."""
    found: dict[Slices, None] = {}
    for count in COUNTS:
        for growth in (1.0, ratio**0.5, ratio):
            if count <= units:
                found.setdefault(_geometric(units, count, growth))
    yield from sorted(found, key=lambda slices: len(slices.ends))


def _geometric(units: int, count: int, growth: float) -> Slices:
    weights = [growth**i for i in range(count)]
    ends: list[int] = []
    for i in range(1, count + 1):
        end = round(units * sum(weights[:i]) / sum(weights))
        # At least one unit for each slice before and behind.
        ends.append(min(max(end, ends[-1] + 1 if ends else 1), units - (count - i)))
    return Slices(units, tuple(ends))


def sliced_us(machine: Machine, slices: Slices, compute_us: Cost, collective_us: Cost) -> float:
    """When the last collective is done: one after the other, each behind its slice, with the contention of the machine."""
    scale = max(machine.compute_scale, default=1.0)
    compute = [compute_us(share) * scale + machine.post_us for share in slices.shares]
    return overlapped_us(
        compute, [collective_us(share) for share in slices.shares], machine.compute_slowdown, machine.transfer_slowdown
    )


def overlapped_us(
    compute: Sequence[float], collectives: Sequence[float], slow_compute: float, slow_collective: float
) -> float:
    """Two queues, the second of which may begin its i-th item once the first has done its own; each slows the other one down."""
    computing, left = list(reversed(compute)), list(reversed(collectives))
    ready, now = 0, 0.0
    while left:
        working, sending = bool(computing), ready > 0
        compute_rate = 1 / slow_compute if sending else 1.0
        collective_rate = 1 / slow_collective if working else 1.0
        until = [computing[-1] / compute_rate] if working else []
        until += [left[-1] / collective_rate] if sending else []
        step = min(until)
        now += step
        if working:
            computing[-1] -= step * compute_rate
        if sending:
            left[-1] -= step * collective_rate
        if sending and (until[-1] == step):
            left.pop()
            ready -= 1
        if working and (until[0] == step):
            computing.pop()
            ready += 1
    return now
