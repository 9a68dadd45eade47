"""Which schedule a region gets, or none: all candidates and the plain collective by predicted time.

    choice = choose(
        Kind.ALL_GATHER, find_machine("h100-nvlink"), ranks=8,
        region=Region(compute_us=lambda m: 8 * [time of a matmul of 1 / (8 m) of the rows], slice_bytes=shard_bytes),
    )
    if choice.rewrite:
        graph = emit(choice.schedule)
    record.reason = choice.reason

The answer depends on the arguments only, and ties go to the candidate named first: equal inputs give equal choices on all ranks.
Nothing here knows a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from .bound import Bound, Certificate, lower_bound
from .families import FAMILIES, TWO_LEVEL, build
from .ir import Kind, Schedule
from .machine import Machine
from .memory import buffer_slices
from .search import SEARCHED, is_irregular, search
from .simulate import RegionCost, simulate
from .taper import TAPERED, TAPERS, tapered
from .transform import OWN_ALONE, own_together

DEFAULT_SLICES_PER_RANK = (1, 2, 4, 8)
_SLICES_PER_RANK = {Kind.ALL_GATHER_OUT: (2, 4, 8, 16)}  # where a rank cuts its own block alone, into all its slices
LARGE_GROUP = 16  # ranks; beyond, what is far behind as a rule is not even simulated
HUGE_GROUP = 128  # ranks
FAR_BEHIND = 1.5  # times the fastest candidate
WORTH_PIECES = 0.002  # what more or unequal pieces have to gain: the model does not see all that they cost
DEFAULT_CHUNKS = 8  # of the k-slice overlap that is reported for comparison


def slices_to_try(kind: Kind) -> tuple[int, ...]:
    """The numbers of slices a rank among which a schedule of `kind` is chosen where none is asked for."""
    return _SLICES_PER_RANK.get(kind, DEFAULT_SLICES_PER_RANK)


@dataclass(frozen=True)
class Region:
    """What a region costs, in numbers.

    - `compute_us(m)`: time of the body on one slice when every rank's share is cut in `m` (kernel launches included); on a piece
      of several slices `m` is a fraction
    - `slice_bytes`: bytes of one rank's slice at m = 1: the shard of a gather, the scattered part of a reduce-scatter,
      1 / N of an all-reduce, one block of an all-to-all, the larger of the two of a chain
    - `whole_compute_us`: time of the uncut body; None = N slices at m = 1 (one where a rank computes its own alone)
    - `add_us(m)`: time to add one received partial sum; None = by the machine's memory bandwidth
    - `finish_us`: time after the last slice, to put the result together, that the plain collective does not take
    """

    compute_us: Callable[[int | Fraction], float]
    slice_bytes: float
    whole_compute_us: float | None = None
    add_us: Callable[[int | Fraction], float] | None = None
    finish_us: float = 0.0

    def cost(self, kind: Kind, machine: Machine, m: int, *, in_pieces: bool = False) -> RegionCost:
        """Of a slice; with `in_pieces` also of several neighbouring ones that are computed, or added, in one piece."""
        size_bytes = self.slice_bytes / m
        pieces = [Fraction(m, count) for count in range(1, m + 1)] if in_pieces else []
        adds = kind.reduces
        return RegionCost(
            float(self.compute_us(m)),
            size_bytes,
            self._add_us(machine, m) if adds else 0.0,
            tuple(float(self.compute_us(share)) for share in pieces),
            tuple(self._add_us(machine, share) for share in pieces) if adds else (),
        )

    def _add_us(self, machine: Machine, m: int | Fraction) -> float:
        return float(self.add_us(m)) if self.add_us is not None else machine.add_us(self.slice_bytes / float(m))

    def whole_us(self, kind: Kind, ranks: int) -> float:
        return self.whole_compute_us if self.whole_compute_us is not None else kind.blocks(ranks) * self.compute_us(1)

    def bound(
        self, kind: Kind, machine: Machine, ranks: int, m: int, cost: RegionCost, *, merged: bool = False
    ) -> Bound:
        """What no schedule of `m` slices is below; with `merged`, of as many or fewer messages, down to one for each block."""
        if merged:
            machine = replace(machine, post_us=machine.post_us / m, gap_us=machine.gap_us / m)
        bound = lower_bound(kind, machine, ranks, m, cost.least())
        return replace(bound, us=bound.us + self.finish_us)


@dataclass(frozen=True)
class Candidate:
    """A schedule that was considered. `certificate` compares it with the bound for its number of slices."""

    schedule: Schedule
    predicted_us: float
    exposed_us: float
    buffer_bytes: float  # beyond the region's own input and output
    certificate: Certificate

    @property
    def name(self) -> str:
        return self.schedule.describe()


@dataclass(frozen=True)
class Choice:
    """The decision for one region. `rewrite` says whether to use `schedule`, the best candidate, at all.

    `schedule` is None only where no candidate is allowed. `hidden_fraction` is the share of the plain collective's time that the
    schedule takes off: 1 = communication is free, 0 = as slow as the plain collective, below 0 = slower.
    """

    rewrite: bool
    reason: str
    best: Candidate | None
    plain_us: float
    sliced_us: float
    bound: Bound
    communication_us: float
    candidates: tuple[Candidate, ...]

    @property
    def schedule(self) -> Schedule | None:
        return self.best.schedule if self.best else None

    @property
    def predicted_us(self) -> float:
        """Of what will run: the schedule where it is used, else the plain collective."""
        return self.best.predicted_us if self.rewrite and self.best else self.plain_us

    @property
    def hidden_fraction(self) -> float:
        return hidden_fraction(self.plain_us, self.predicted_us, self.communication_us)


def hidden_fraction(plain_us: float, predicted_us: float, communication_us: float) -> float:
    return (plain_us - predicted_us) / communication_us if communication_us > 0 else 1.0


def collective_us(kind: Kind, machine: Machine, ranks: int, slice_bytes: float) -> float:
    """Time of the plain collective: as the machine measured it, else the best of our own schedules without compute."""
    if ranks == 1:
        return 0.0
    total_us = 0.0
    for collective in kind.collectives:
        us = machine.collective_us(collective, ranks, slice_bytes)
        total_us += _collective_us(collective, machine, ranks, slice_bytes) if us is None else us
    return total_us


@lru_cache(maxsize=256)
def _collective_us(kind: Kind, machine: Machine, ranks: int, slice_bytes: float) -> float:
    add_us = machine.add_us(slice_bytes) if kind.reduces else 0.0
    cost = RegionCost(0.0, slice_bytes, add_us)
    return min(
        simulate(_schedule(kind, family, machine, ranks, 1, cost), machine, cost).makespan_us
        for family in families_for(kind, machine, ranks)
        if family not in TAPERS
    )


def _schedule(kind: Kind, family: str, machine: Machine, ranks: int, m: int, cost: RegionCost) -> Schedule:
    if family == SEARCHED:
        return search(kind, machine, ranks, m, cost)
    return build(kind, family, ranks, m, ranks_per_node(machine, ranks))


def ranks_per_node(machine: Machine, ranks: int) -> int | None:
    """The size of the machine's nodes, or None where it has none."""
    islands = machine.fabric(ranks).islands if not machine.is_uniform else ()
    return len(islands[0]) if islands else None


def families_for(kind: Kind, machine: Machine, ranks: int) -> tuple[str, ...]:
    """The families that make sense on a machine, in the order in which ties are broken."""
    if (
        kind is Kind.CHAIN
    ):  # between huge nodes it takes many seconds to simulate; its two ends are regions of their own
        return tuple(FAMILIES[kind]) if ranks <= HUGE_GROUP or machine.is_uniform else ()
    if kind is Kind.ALL_GATHER_OUT and ranks > HUGE_GROUP:
        return ()  # every slice has N - 1 messages: they take seconds to simulate, and most of the time of a small slice
    if is_irregular(machine):
        return (*FAMILIES[kind], SEARCHED) if ranks <= LARGE_GROUP or not kind.is_all_to_all else ("direct", SEARCHED)
    # In huge groups the compute of one block is little beside all of it: nothing is to be won at the end.
    tapers = (TAPERED,) if ranks <= HUGE_GROUP else ()
    if kind.is_all_to_all:  # to relay slices only pays where links differ
        return (TWO_LEVEL, "direct") if ranks_per_node(machine, ranks) else ("direct", *tapers)
    if ranks_per_node(machine, ranks) is None:
        # The last part of a direct all-reduce has N - 1 transfers at once on each port: slow to simulate, hardly faster.
        huge = kind is Kind.ALL_REDUCE and ranks > HUGE_GROUP
        return tuple(family for family in FAMILIES[kind] if not (huge and family == "direct")) + tapers
    # The others know nothing of nodes: in large groups they are far behind, and dear to simulate.
    return (TWO_LEVEL, *FAMILIES[kind]) if ranks <= LARGE_GROUP else (TWO_LEVEL,)


def sliced_us(compute_us: float, communication_us: float, chunks: int = DEFAULT_CHUNKS) -> float:
    """The usual overlap: compute and collective both cut in `chunks`, one chunk of the smaller one exposed at the end."""
    return max(compute_us + communication_us / chunks, communication_us + compute_us / chunks)


def choose(
    kind: Kind,
    machine: Machine,
    ranks: int,
    region: Region,
    *,
    families: Sequence[str] | None = None,
    slices_per_rank: Sequence[int] = DEFAULT_SLICES_PER_RANK,
    margin: float | None = None,
    max_buffer_bytes: float | None = None,
    chunks: int = DEFAULT_CHUNKS,
    in_pieces: bool = False,
    units: int | None = None,
) -> Choice:
    """Choose among `families` x `slices_per_rank` and leaving the region alone.

    `families=None` means every family of the kind; a caller that forces a schedule passes one family and one number, and may
    use `choice.schedule` whatever `choice.rewrite` says. Only numbers of slices that the region
    has rows for may be passed; slices that differ by a row are taken to be equal, of the longest. With `in_pieces` neighbouring
    slices may be computed, and travel, together: a rank's own ones are, and where there are `units`, blocks of so many slices
    are cut in pieces that shrink (families `TAPERS`, `taper.py`).

    `margin` is what a prediction has to gain, as a share of the plain time; None: the machine's.

    Raises ValueError for an unknown family, MachineError where the machine does not fit the group.
    """
    margin = machine.least_gain(margin, ranks, kind)
    scale = max(machine.scale(rank) for rank in range(ranks))
    whole_us = region.whole_us(kind, ranks) * scale
    communication_us = collective_us(kind, machine, ranks, region.slice_bytes)
    plain_us = whole_us + communication_us
    candidates: list[Candidate] = []
    too_large: list[str] = []
    costs = {m: region.cost(kind, machine, m, in_pieces=in_pieces) for m in slices_per_rank}
    bounds = {m: region.bound(kind, machine, ranks, m, cost) for m, cost in costs.items()}
    fastest_us = math.inf

    def consider(schedule: Schedule, cost: RegionCost, bound: Bound) -> float | None:
        """Time of a schedule, which is now a candidate; None where it takes too much memory."""
        nonlocal fastest_us
        buffer_bytes = buffer_slices(schedule) * cost.slice_bytes
        if max_buffer_bytes is not None and buffer_bytes > max_buffer_bytes:
            too_large.append(f"{schedule.describe()} ({_bytes(buffer_bytes)})")
            return None
        simulation = simulate(schedule, machine, cost)
        us = simulation.makespan_us + region.finish_us
        fastest_us = min(fastest_us, us)
        candidates.append(Candidate(schedule, us, simulation.exposed_us, buffer_bytes, Certificate(us, bound)))
        return us

    if families is None:
        families = families_for(kind, machine, ranks)
    before: dict[str, float] = {}  # each family's time with the number of slices before this one
    hopeless: set[str] = set()
    for m, cost in costs.items():
        for family in families:
            if bounds[m].us >= fastest_us:
                break  # no schedule of this many slices can win
            if family in hopeless or family in TAPERS:
                continue
            schedule = _schedule(kind, family, machine, ranks, m, cost)
            us = consider(own_together(schedule) if in_pieces else schedule, cost, bounds[m])
            if us is None:
                continue
            # Finer slices first help, then harm: what got slower, or is far behind, is not tried any finer.
            if us > before.get(family, FAR_BEHIND * fastest_us):
                hopeless.add(family)
            before[family] = us
    tapers = [family for family in families if family in TAPERS] if kind in OWN_ALONE and ranks > 1 else []
    if tapers and units is not None:
        cost = region.cost(kind, machine, units, in_pieces=True)
        bounds[units] = region.bound(kind, machine, ranks, units, cost, merged=True)
        for family in tapers if bounds[units].us < fastest_us else ():
            for schedule in tapered(kind, family, machine, ranks, units, cost):
                consider(schedule, cost, bounds[units])
    best = _best(candidates)
    bound = min(bounds.values(), key=lambda bound: bound.us, default=Bound(whole_us, "its compute"))
    rewrite = best is not None and ranks > 1 and best.predicted_us < plain_us * (1 - margin)
    return Choice(
        rewrite,
        _reason(best, rewrite, plain_us, communication_us, bound, margin, machine, too_large, max_buffer_bytes),
        best,
        plain_us,
        sliced_us(whole_us, communication_us, chunks),
        bound,
        communication_us,
        tuple(candidates),
    )


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest; where there is no difference the one that is named first, which is simpler."""
    best: Candidate | None = None
    for candidate in candidates:
        least_gain = WORTH_PIECES if candidate.schedule.family in TAPERS else 1e-6
        if best is None or candidate.predicted_us < best.predicted_us * (1 - least_gain):
            best = candidate
    return best


def _reason(
    best: Candidate | None,
    rewrite: bool,
    plain_us: float,
    communication_us: float,
    bound: Bound,
    margin: float,
    machine: Machine,
    too_large: list[str],
    max_buffer_bytes: float | None,
) -> str:
    """The numbers behind the decision, for the record."""
    memory = ""
    if too_large:
        memory = f"; over the memory limit of {_bytes(max_buffer_bytes or 0.0)}: {', '.join(too_large)}"
    numbers = f"on machine {machine.name}: plain {_ms(plain_us)}"
    if best is None:
        return f"left alone, no schedule is allowed {numbers}{memory}"
    hidden = hidden_fraction(plain_us, best.predicted_us, communication_us)
    numbers += (
        f", {best.name} {_ms(best.predicted_us)}, bound {_ms(bound.us)}; hides {hidden:.0%} of {_ms(communication_us)}"
        f" of communication, {_bytes(best.buffer_bytes)} of buffers"
    )
    gain = 1 - best.predicted_us / plain_us if plain_us > 0 else 0.0
    verdict = (
        f"predicted {gain:.1%} faster"
        if rewrite
        else f"left alone, {best.name} would gain {gain:.1%}, less than the margin of {margin:.0%}"
    )
    return f"{verdict} {numbers}{memory}"


def _ms(us: float) -> str:
    return f"{us / 1e3:.4g} ms"


def _bytes(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
