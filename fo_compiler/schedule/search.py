"""Schedules for any network: list scheduling, improved by search, the same on every rank.

The families are blind to which link is slow. Here a gather is built transfer by transfer on a plan of the whole group: the
rank that will first run out of slices to compute is served next, with the slice and from the holder that reach it first. A
plan becomes programs by sorting what each rank does by planned time, so nothing can wait in a circle. A rank that computes
cannot post: what should start meanwhile is posted before or after, in three ways (`Posting`). What a plan is worth is what
the simulator says of its programs.

The search then shakes the plan: it weighs ranks and links anew, at random but from a fixed seed, and keeps what is faster. In
small groups it tries the rings in every order of the ranks too, in larger ones a ring along fast links.

Kinds in which results leave are found on the mirrored network and reversed (`transform.py`). An all-reduce is two gathers
that have to agree, and in a gather of results slices start one after the other: for these only the families are tried, on
the ranks in every order.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from .bound import lower_bound
from .families import FAMILIES, build
from .ir import Action, Compute, Kind, Post, Program, Recv, Schedule, Send, Wait
from .machine import Machine
from .network import BYTES_PER_US_PER_GBPS, Fabric, Matrix
from .simulate import RegionCost, simulate
from .transform import renumbered, reverse

SEARCHED = "searched"
EFFORT = 20_000  # transfers looked at: bounds the time to about a second, whatever the group's size
ROUNDS = (6, 120)  # at least and at most
SMALL_GROUP = 6  # ranks; up to here rings are tried in every order
LARGE_GROUP = (
    24  # ranks; beyond, planning transfer by transfer takes too long, and only a ring along quick links is tried
)


@dataclass(frozen=True)
class _Transfer:
    """A planned transfer of `slice` (an index of owner and part) from `source` to `destination`."""

    slice: int
    source: int
    destination: int
    start_us: float
    arrival_us: float


_FAMILIES_ALONE = (Kind.ALL_REDUCE, Kind.ALL_GATHER_OUT)


class Posting(Enum):
    """When a planned transfer is posted."""

    RECEIVES_EARLY = "a receive before the compute in which it is planned to start, a send after it"
    EARLY = "both ends before that compute, where the slice is there"
    STRICT = "when the transfer before it at the same end is done"


@dataclass
class _Weights:
    """What the search turns: how urgent a rank is, and how long a link seems."""

    rank: list[float]
    link: list[float]


@lru_cache(maxsize=64)
def search(kind: Kind, machine: Machine, ranks: int, slices_per_rank: int, cost: RegionCost) -> Schedule:
    """The fastest schedule found. Deterministic: the same arguments give the same schedule in every process."""
    bound_us = lower_bound(kind, machine, ranks, slices_per_rank, cost).us
    best: Schedule | None = None
    best_us = float("inf")
    for schedule in _proposals(kind, machine, ranks, slices_per_rank, cost):
        us = simulate(schedule, machine, cost).makespan_us
        if us < best_us * (1 - 1e-12):
            best, best_us = schedule, us
        if best_us <= bound_us * (1 + 1e-9):
            break
    return best if best is not None else build(kind, "direct", ranks, slices_per_rank)


def _proposals(kind: Kind, machine: Machine, ranks: int, m: int, cost: RegionCost) -> Iterator[Schedule]:
    fabric = machine.fabric(ranks)
    if not kind.arrives_first and kind is not Kind.ALL_GATHER_OUT:
        fabric = _mirrored(fabric)
    size_us = [
        machine.gap_us + cost.slice_bytes / (fabric.alone_GBps[link] * BYTES_PER_US_PER_GBPS)
        for link in range(ranks**2)
    ]
    for family in FAMILIES[kind] if kind in _FAMILIES_ALONE else () if kind.is_all_to_all else ("ring",):
        yield from (_reordered(build(kind, family, ranks, m), order) for order in _orders(fabric, size_us))
    if kind in _FAMILIES_ALONE or ranks > LARGE_GROUP:
        return
    t_c = [cost.compute_us * machine.scale(rank) for rank in range(ranks)]
    planner = _Planner(fabric, ranks, m, t_c, size_us, exchange=kind.is_all_to_all)
    work = ranks * (ranks - 1) * m * ranks
    rng = random.Random(0)
    weights = _Weights([1.0] * ranks, [1.0] * ranks**2)
    for round_ in range(min(max(ROUNDS[0], EFFORT // work), ROUNDS[1])):
        for posting in Posting:
            yield _from_gather(kind, planner.programs(weights, posting), ranks, m)
        spread = (0.1, 0.3, 1.0)[round_ % 3]
        weights = _Weights(
            [rng.uniform(1 - spread / 2, 1 + spread / 2) for _ in range(ranks)],
            [1 + rng.random() * spread for _ in range(ranks**2)],
        )


def _mirrored(fabric: Fabric) -> Fabric:
    """The network in which every link runs the other way."""
    ranks = range(fabric.ranks)
    links = [fabric.link(b, a) for a in ranks for b in ranks]
    return replace(
        fabric,
        latency_us=tuple(fabric.latency_us[link] for link in links),
        bandwidth_GBps=tuple(fabric.bandwidth_GBps[link] for link in links),
        ports=tuple(fabric.ports[link] for link in links),
    )


class _Planner:
    """Plans a gather (or an exchange) on one network."""

    def __init__(
        self, fabric: Fabric, ranks: int, m: int, t_c: list[float], size_us: list[float], *, exchange: bool
    ) -> None:
        self.fabric, self.ranks, self.m, self.t_c, self.size_us = fabric, ranks, m, t_c, size_us
        self.exchange = exchange

    def programs(self, weights: _Weights, posting: Posting) -> list[Program]:
        transfers, computes = self._plan(weights)
        return [self._program(rank, transfers, computes[rank], posting) for rank in range(self.ranks)]

    def _plan(self, weights: _Weights) -> tuple[list[_Transfer], list[list[tuple[float, int]]]]:
        """All transfers, and for each rank when it computes which slice. A slice is `owner * m + part`."""
        ranks, m, fabric = self.ranks, self.m, self.fabric
        port_free = [0.0] * len(fabric.port_GBps)
        held = [{rank * m + part: 0.0 for part in range(m)} for rank in range(ranks)]  # slice -> since when
        missing = [[s for s in range(ranks * m) if s // m != rank] for rank in range(ranks)]
        computes = [[(part * self.t_c[rank], rank * m + part) for part in range(m)] for rank in range(ranks)]
        compute_free = [m * self.t_c[rank] for rank in range(ranks)]
        copies = [1] * (ranks * m)
        transfers: list[_Transfer] = []
        while any(missing):
            rank = min((r for r in range(ranks) if missing[r]), key=lambda r: (compute_free[r] * weights.rank[r], r))
            best: tuple[float, int, int] | None = None
            for slice_ in missing[rank]:
                holders = (slice_ // m,) if self.exchange else range(ranks)
                for source in holders:
                    since = held[source].get(slice_)
                    if since is None or source == rank:
                        continue
                    link = source * ranks + rank
                    start = max(since, *(port_free[port] - fabric.latency_us[link] for port in fabric.ports[link]))
                    seems = start + (fabric.latency_us[link] + self.size_us[link]) * weights.link[link]
                    # Among equals a slice that few have yet: whoever gets it can pass it on.
                    key = (
                        seems + 1e-6 * copies[slice_] * self.size_us[link],
                        (slice_ - rank * m) % (ranks * m),
                        source,
                    )
                    if best is None or key < best:
                        best, chosen = key, (slice_, source, start)
            assert best is not None
            slice_, source, start = chosen
            link = source * ranks + rank
            start = max(start, 0.0)
            arrival = start + fabric.latency_us[link] + self.size_us[link]
            for port in fabric.ports[link]:
                port_free[port] = arrival
            held[rank][slice_] = arrival
            missing[rank].remove(slice_)
            copies[slice_] += 1
            transfers.append(_Transfer(slice_, source, rank, start, arrival))
            begin = max(arrival, compute_free[rank])
            computes[rank].append((begin, slice_))
            compute_free[rank] = begin + self.t_c[rank]
        return transfers, computes

    def _program(
        self, rank: int, transfers: list[_Transfer], computes: list[tuple[float, int]], posting: Posting
    ) -> Program:
        """What `rank` does, by planned time. A wait comes right before the first use of what it brings."""
        arrives_by: dict[int, int] = {}  # slice -> number of its transfer
        before: dict[int, int] = {}  # transfer -> the one before it at the same end
        last: dict[bool, int] = {}
        not_before: defaultdict[tuple[int, int] | bool, float] = defaultdict(float)  # by link, or by end
        steps_on: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by link
        arrived = {t.slice: t.arrival_us for t in transfers if t.destination == rank}
        # (planned time, posts before computes, number of the transfer, action)
        events: list[tuple[float, int, int, Action]] = []
        for number, transfer in enumerate(transfers):
            sends = transfer.source == rank
            if not sends and transfer.destination != rank:
                continue
            name = self._name(transfer.slice, transfer.destination)
            if sends:
                post = Post(number, Send(name, transfer.destination), None)
            else:
                post = Post(number, None, Recv(name, transfer.source))
                arrives_by[name] = number
            if sends in last:
                before[number] = last[sends]
            last[sends] = number
            steps_on[transfer.source, transfer.destination].append(number)
            # Both ends post the transfers of a link in one order. Nothing may be planned before what it waits for:
            # a circle of such waits would never end.
            strict = posting is Posting.STRICT
            after = sends if strict else (transfer.source, transfer.destination)
            wanted = self._post_at(rank, transfer, arrived.get(transfer.slice, 0.0), computes, posting)
            post_us = max(not_before[after], wanted)
            not_before[after] = transfer.arrival_us if strict else post_us
            events.append((post_us, 0, number, post))
        events += [(begin, 1, 0, Compute(self._name(slice_, rank))) for begin, slice_ in computes]
        program: list[Action] = []
        waited: set[int] = set()

        def wait(number: int | None) -> None:
            """Wait for a transfer, and before it for what came earlier on its link: so it can be run backwards too."""
            if number is None or number in waited:
                return
            link = transfers[number].source, transfers[number].destination
            for earlier in sorted(steps_on[link]):
                if earlier <= number and earlier not in waited:
                    waited.add(earlier)
                    program.append(Wait(earlier))

        for _, _, _, action in sorted(events, key=lambda event: event[:3]):
            match action:
                case Compute(slice_):
                    wait(arrives_by.get(slice_))
                case Post(number, send, _):
                    if send is not None:
                        wait(arrives_by.get(send.slice))
                    if posting is Posting.STRICT:
                        wait(before.get(number))
                case _:
                    pass
            program.append(action)
        for _, _, number, action in events:
            if isinstance(action, Post):
                wait(number)
        return renumbered(program)

    def _post_at(
        self, rank: int, transfer: _Transfer, held_us: float, computes: list[tuple[float, int]], posting: Posting
    ) -> float:
        """When an end posts a transfer. While a slice is computed nothing can be posted: so before it, where that may be."""
        if posting is Posting.STRICT or (posting is Posting.RECEIVES_EARLY and transfer.source == rank):
            return transfer.start_us
        before = max((begin for begin, _ in computes if begin <= transfer.start_us), default=0.0)
        return before if transfer.destination == rank else max(before, min(held_us, transfer.start_us))

    def _name(self, slice_: int, destination: int) -> int:
        if not self.exchange:
            return slice_
        owner, part = divmod(slice_, self.m)
        return (owner * self.ranks + destination) * self.m + part


def _from_gather(kind: Kind, gathers: list[Program], ranks: int, m: int) -> Schedule:
    """The schedule of `kind` that comes of the programs of a gather (of an exchange for an all-to-all)."""

    def transposed(slice_: int) -> int:
        group, part = divmod(slice_, m)
        return (group % ranks * ranks + group // ranks) * m + part

    match kind:
        case Kind.REDUCE_SCATTER:
            programs = [reverse(gather, reduces=True) for gather in gathers]
        case Kind.ALL_TO_ALL_OUT:
            programs = [reverse(gather, reduces=False, rename=transposed) for gather in gathers]
        case _:
            programs = gathers
    return Schedule(kind, SEARCHED, ranks, m, programs=tuple(programs))


def _orders(fabric: Fabric, size_us: list[float]) -> Iterator[tuple[int, ...]]:
    """Orders of the ranks in which a ring may be laid: all of them, or one along quick links."""
    ranks = range(fabric.ranks)
    if fabric.ranks <= SMALL_GROUP:
        return ((0, *rest) for rest in itertools.permutations(ranks[1:]))
    return iter([tuple(_quick_ring(fabric, size_us))])


def _quick_ring(fabric: Fabric, size_us: list[float]) -> list[int]:
    """Nearest neighbours, then ends of stretches exchanged as long as the slowest link, then the sum, gets smaller."""
    ranks = fabric.ranks

    def us(a: int, b: int) -> float:
        return fabric.latency_us[a * ranks + b] + size_us[a * ranks + b]

    def length(order: list[int]) -> tuple[float, float]:
        hops = [us(a, b) for a, b in zip(order, order[1:] + order[:1], strict=True)]
        return max(hops), sum(hops)

    order = [0]
    while len(order) < ranks:
        order.append(min((r for r in range(ranks) if r not in order), key=lambda r: (us(order[-1], r), r)))
    shortest, improved = length(order), True
    while improved and ranks <= 64:
        improved = False
        for i, j in itertools.combinations(range(1, ranks + 1), 2):
            turned = order[:i] + order[i:j][::-1] + order[j:]
            if length(turned) < shortest:
                order, shortest, improved = turned, length(turned), True
    return order


def _reordered(schedule: Schedule, order: tuple[int, ...]) -> Schedule:
    """The schedule with rank `order[i]` of the group in the place of rank i."""
    m = schedule.slices_per_rank

    def slice_(s: int) -> int:
        return order[s // m] * m + s % m

    def action(a: Action) -> Action:
        match a:
            case Post(_, send, recv):
                return replace(
                    a,
                    send=send and replace(send, slice=slice_(send.slice), peer=order[send.peer]),
                    recv=recv and replace(recv, slice=slice_(recv.slice), peer=order[recv.peer]),
                )
            case Wait():
                return a
            case _:
                return replace(a, slice=slice_(a.slice))

    position = {rank: i for i, rank in enumerate(order)}
    programs = [tuple(map(action, schedule.program(position[rank]))) for rank in range(len(order))]
    return Schedule(schedule.kind, SEARCHED, len(order), m, programs=tuple(programs))


def is_irregular(machine: Machine) -> bool:
    """Whether the families may be far from the best: any matrix of links, or ranks that differ in speed."""
    return isinstance(machine.network, Matrix) or len(set(machine.compute_scale)) > 1
