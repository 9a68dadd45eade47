"""A time that no schedule can beat, for every kind on any machine, and the certificate of a schedule that comes near.

The bound is the largest of these, for `n = (N - 1) m` slices that have to cross a rank's port (t_c: one slice of compute):

    work       a rank's own compute, adds and posts; with contention, what its transfers take from it
    first      the first slice to arrive cannot be there before latency + one transfer; n slices are computed after it
    last       the last of n slices arrives after latency + n transfers at the port's rate; one is computed after it
    distance   a slice from far away travels along the quickest path; one is computed after it
    cut        what has to enter (or leave) a group of ranks does so through the links and ports that cross its border

Kinds in which results leave are the mirror image in time: `last` is then the first departure. An all-reduce has both,
and in all moves 2 (N - 1) messages a slice. In an all-gather of results a rank computes m slices, and what it computes last
reaches the others after that. The reasons are written out in docs/scheduling.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from .ir import Kind
from .machine import Machine
from .network import BYTES_PER_US_PER_GBPS, Uniform
from .simulate import RegionCost


@dataclass(frozen=True)
class Bound:
    """`us`: no schedule of this many slices is faster. `why`: the argument that gave it."""

    us: float
    why: str


@dataclass(frozen=True)
class Certificate:
    """How near a schedule is to what is possible. `gap_us` 0 means that it is optimal in the model."""

    makespan_us: float
    bound: Bound

    @property
    def gap_us(self) -> float:
        # The two are computed along different paths of floating point: what is below one part in 10^9 is equal.
        gap = self.makespan_us - self.bound.us
        return gap if gap > 1e-9 * self.makespan_us else 0.0

    @property
    def is_optimal(self) -> bool:
        return self.gap_us == 0.0

    def __str__(self) -> str:
        if self.is_optimal:
            return f"optimal: it meets the lower bound of {self.bound.us / 1e3:.4g} ms ({self.bound.why})"
        share = self.gap_us / self.makespan_us
        return f"{share:.1%} above the lower bound of {self.bound.us / 1e3:.4g} ms ({self.bound.why})"


class _Crossing(NamedTuple):
    """The links that cross the border of a group of ranks in one direction."""

    links: frozenset[tuple[float, float]]  # those that differ: latency_us, GB/s alone
    links_GBps: float  # of all of them
    ports_GBps: float  # of the ports at either end, which together they cannot outrun


@lru_cache(maxsize=8192)  # the same for all sizes and numbers of slices
def _crossing(machine: Machine, ranks: int, inside: frozenset[int], mirrored: bool) -> _Crossing:
    """From the other ranks to those `inside`. With `mirrored`, time runs backwards: what leaves is what arrives."""
    fabric = machine.fabric(ranks)
    outside = [rank for rank in range(ranks) if rank not in inside]
    links = [fabric.link(i, o) if mirrored else fabric.link(o, i) for o in outside for i in sorted(inside)]
    ends = [sum(fabric.port_GBps[port] for port in {fabric.ports[link][end] for link in links}) for end in (0, 1)]
    pairs = [(fabric.latency_us[link], fabric.alone_GBps[link]) for link in links]
    return _Crossing(frozenset(pairs), sum(GBps for _, GBps in pairs), min(ends))


class _Border:
    """What crosses the border of a group of ranks: how soon, and how fast."""

    def __init__(self, crossing: _Crossing, cost: RegionCost, machine: Machine) -> None:
        links, links_GBps, ports_GBps = crossing
        self.latency_us = min(latency for latency, _ in links)
        slowest = min(GBps for _, GBps in links)
        rate = min(links_GBps, ports_GBps) * BYTES_PER_US_PER_GBPS
        self.slice_us = (cost.slice_bytes + machine.gap_us * slowest * BYTES_PER_US_PER_GBPS) / rate
        self.one_us = min(
            latency + machine.gap_us + cost.slice_bytes / (GBps * BYTES_PER_US_PER_GBPS) for latency, GBps in links
        )

    @classmethod
    def of(cls, machine: Machine, ranks: int, inside: Iterable[int], cost: RegionCost, *, mirrored: bool) -> _Border:
        """From the other ranks to those `inside`. With `mirrored`, time runs backwards: what leaves is what arrives."""
        if isinstance(machine.network, Uniform):  # all ranks alike: the port of one
            return cls(_one_port(machine.network, ranks - 1), cost, machine)
        return cls(_crossing(machine, ranks, frozenset(inside), mirrored), cost, machine)

    @classmethod
    def both_ways(cls, machine: Machine, ranks: int, cost: RegionCost) -> _Border:
        """In and out of one rank of a uniform network through its only port."""
        assert isinstance(machine.network, Uniform)
        return cls(_one_port(machine.network, 2 * (ranks - 1)), cost, machine)

    def nth_us(self, n: int) -> float:
        """The n-th crossing is not over before this."""
        return max(self.one_us, self.latency_us + n * self.slice_us)


def _one_port(network: Uniform, links: int) -> _Crossing:
    port = network.port_GBps or network.bandwidth_GBps
    alone = min(network.bandwidth_GBps, port)
    return _Crossing(frozenset({(network.latency_us, alone)}), links * alone, port)


def lower_bound(kind: Kind, machine: Machine, ranks: int, slices_per_rank: int, cost: RegionCost) -> Bound:
    """The bound for schedules of `kind` that cut a region into `slices_per_rank` slices a rank at `cost` each."""
    m = slices_per_rank
    scales = [machine.scale(rank) for rank in range(ranks)]
    t_c = [cost.compute_us * scale for scale in scales]
    if ranks == 1:
        return Bound(m * t_c[0], "its compute")
    # Where all ranks are alike the ports of rank 0 speak for all.
    some = [0] if machine.has_equal_ranks else list(range(ranks))
    groups: Sequence[frozenset[int]] = ()
    ways: dict[int, _Ways] = {}
    if not isinstance(machine.network, Uniform):
        groups, ways = _groups(machine, ranks), _ways(machine, ranks, cost)
    bounds = [Bound(_work_us(kind, machine, ranks, m, cost, rank), f"work of rank {rank}") for rank in some]
    if kind is Kind.ALL_REDUCE:
        bounds += _all_reduce_bounds(machine, ranks, m, cost, t_c, some, groups)
        bounds += [
            Bound(ranks * m * t_c[r] + max(way.out_us), f"the last slice of rank {r} on its way")
            for r, way in ways.items()
        ]
        return max(bounds, key=lambda bound: bound.us)
    if kind is Kind.ALL_GATHER_OUT:
        bounds += _gather_out_bounds(machine, ranks, m, cost, t_c, some, groups, ways)
        return max(bounds, key=lambda bound: bound.us)
    if kind is Kind.CHAIN:
        bounds += _chain_bounds(machine, ranks, m, cost, t_c, some, groups)
        return max(bounds, key=lambda bound: bound.us)
    if machine.is_uniform and _is_half_duplex(machine):
        border = _Border.both_ways(machine, ranks, cost)
        count = (ranks - 1) * m
        bounds.append(Bound(border.nth_us(2 * count) + t_c[0], f"{count} slices in and {count} out of one port"))
    mirrored = not kind.arrives_first
    verb = "leave" if mirrored else "enter"
    n = (ranks - 1) * m
    for r in some:
        border = _Border.of(machine, ranks, [r], cost, mirrored=mirrored)
        bounds.append(Bound(border.nth_us(1) + n * t_c[r], f"the first slice to {verb} rank {r}, then its compute"))
        bounds.append(Bound(border.nth_us(n) + t_c[r], f"{n} slices {verb} rank {r} through its port"))
        if r in ways:
            us = ways[r].out_us if mirrored else ways[r].in_us
            far = sorted(us[:r] + us[r + 1 :])
            bounds += [Bound(far[i] + (n - i * m) * t_c[r], f"the way to rank {r} from afar") for i in range(ranks - 1)]
        # The other side of the port: what each rank owns has to get out at all (in an all-to-all, to everybody).
        other = _Border.of(machine, ranks, [r], cost, mirrored=not mirrored)
        count = n if kind.is_all_to_all else m
        elsewhere = min(t_c[o] for o in range(ranks) if o != r)
        bounds.append(Bound(other.nth_us(count) + elsewhere, f"{count} slices of rank {r} through its port"))
    for group in groups:
        across = len(group) * (ranks - len(group)) * m
        entering = across if kind.is_all_to_all else (ranks - len(group)) * m
        leaving = across if kind.is_all_to_all else len(group) * m
        inside = min(t_c[r] for r in group)
        outside = min(t_c[r] for r in range(ranks) if r not in group)
        names = ", ".join(map(str, sorted(group)[:4])) + (", ..." if len(group) > 4 else "")
        way_in = _Border.of(machine, ranks, group, cost, mirrored=mirrored)
        way_out = _Border.of(machine, ranks, group, cost, mirrored=not mirrored)
        bounds.append(Bound(way_in.nth_us(entering) + inside, f"{entering} slices {verb} the group {names}"))
        bounds.append(
            Bound(way_out.nth_us(leaving) + outside, f"{leaving} slices of the group {names} cross its border")
        )
    return max(bounds, key=lambda bound: bound.us)


def _work_us(kind: Kind, machine: Machine, ranks: int, m: int, cost: RegionCost, rank: int) -> float:
    """What a rank has to do itself, and what contention makes of it."""
    scale = machine.scale(rank)
    messages = (ranks * m) if kind is Kind.ALL_REDUCE else (ranks - 1) * m
    if kind is Kind.CHAIN and machine.is_uniform:
        messages *= 2  # one that arrives and one that leaves; on unlike ranks the average is not everybody's
    work = kind.blocks(ranks) * m * cost.compute_us * scale + messages * machine.post_us
    if kind.reduces:
        # Somebody adds N - 1 partial sums for each slice; only on alike ranks is the average everybody's.
        adds = (ranks - 1) * m if machine.is_uniform else m if kind is Kind.REDUCE_SCATTER else 0
        work += adds * cost.add_us * scale
    # While its port is in use for `moving`, compute runs at 1 / c and bytes at 1 / d; or the two take turns.
    if machine.is_uniform and _is_half_duplex(machine):
        # What leaves takes the same port as what enters; some rank moves at least the average.
        moving = 2 * messages * _Border.both_ways(machine, ranks, cost).slice_us
    else:
        mirrored = not kind.arrives_first and kind is not Kind.ALL_GATHER_OUT  # there they enter all the same
        moving = messages * _Border.of(machine, ranks, [rank], cost, mirrored=mirrored).slice_us
    c, d = machine.compute_slowdown, machine.transfer_slowdown
    return work + min(moving, d * moving * (1 - 1 / c))


def _is_half_duplex(machine: Machine) -> bool:
    """Whether what enters a rank shares a port with what leaves it (looked at on uniform machines only)."""
    return isinstance(machine.network, Uniform) and not machine.network.full_duplex


def _all_reduce_bounds(
    machine: Machine,
    ranks: int,
    m: int,
    cost: RegionCost,
    t_c: list[float],
    some: list[int],
    groups: Sequence[frozenset[int]],
) -> list[Bound]:
    """Each rank sends something about every slice and receives something about every slice, after some compute."""
    slices = ranks * m
    bounds = []
    for r in some:
        out = _Border.of(machine, ranks, [r], cost, mirrored=True)
        in_ = _Border.of(machine, ranks, [r], cost, mirrored=False)
        others = min(t_c[o] for o in range(ranks) if o != r)
        bounds += [
            Bound(slices * t_c[r] + out.nth_us(1), f"the last slice of rank {r} leaves"),
            Bound(t_c[r] + out.nth_us(slices), f"{slices} slices leave rank {r} through its port"),
            Bound(others + in_.nth_us(slices), f"{slices} slices enter rank {r} through its port"),
        ]
    first = min(t_c)
    for group in groups:
        for mirrored in (False, True):
            border = _Border.of(machine, ranks, group, cost, mirrored=mirrored)
            bounds.append(Bound(first + border.nth_us(slices), f"{slices} slices cross the border of a group"))
    latency_us, ports_GBps = _all_ports(machine, ranks)
    total = 2 * (ranks - 1) * slices * cost.slice_bytes / (ports_GBps * BYTES_PER_US_PER_GBPS)
    bounds.append(Bound(first + latency_us + total, f"{2 * (ranks - 1) * slices} messages through all ports"))
    return bounds


def _gather_out_bounds(
    machine: Machine,
    ranks: int,
    m: int,
    cost: RegionCost,
    t_c: list[float],
    some: list[int],
    groups: Sequence[frozenset[int]],
    ways: dict[int, _Ways],
) -> list[Bound]:
    """The slices of all others enter each rank: none before it is computed, and the last of each when all of them are."""
    bounds = []
    half_duplex = machine.is_uniform and _is_half_duplex(machine)
    for inside in (*(frozenset({r}) for r in some), *groups):
        outside = [rank for rank in range(ranks) if rank not in inside]
        names = ", ".join(map(str, sorted(inside)[:4])) + (", ..." if len(inside) > 4 else "")
        for mirrored, makers in ((False, outside), (True, sorted(inside))):
            border = _Border.of(machine, ranks, inside, cost, mirrored=mirrored)
            if half_duplex:  # what enters takes the same port as what leaves: as much, as all ranks are alike
                border, makers = _Border.both_ways(machine, ranks, cost), 2 * outside
            first, verb = min(t_c[rank] for rank in makers), "leave" if mirrored else "enter"
            bounds += [
                Bound(
                    computed * first + border.nth_us(len(makers) * (m - computed + 1)),
                    f"{len(makers) * (m - computed + 1)} slices {verb} {names} after {computed} of each are computed",
                )
                for computed in {1, m}
            ]
    bounds += [Bound(m * t_c[r] + max(way.out_us), f"the last slice of rank {r} on its way") for r, way in ways.items()]
    return bounds


def _chain_bounds(
    machine: Machine,
    ranks: int,
    m: int,
    cost: RegionCost,
    t_c: list[float],
    some: list[int],
    groups: Sequence[frozenset[int]],
) -> list[Bound]:
    """n slices have to enter each rank and are computed there, and a sum of each has to leave it."""
    n = (ranks - 1) * m
    bounds = []
    for r in some:
        in_ = _Border.of(machine, ranks, [r], cost, mirrored=False)
        out = _Border.of(machine, ranks, [r], cost, mirrored=True)
        bounds += [
            Bound(in_.nth_us(1) + n * t_c[r] + out.nth_us(1), f"the foreign slices of rank {r} between two transfers"),
            Bound(in_.nth_us(n) + t_c[r] + out.nth_us(1), f"{n} slices enter rank {r}, and the last one leaves"),
        ]
        if machine.is_uniform:
            border = _Border.both_ways(machine, ranks, cost) if _is_half_duplex(machine) else in_
            count = (4 if _is_half_duplex(machine) else 2) * n
            bounds.append(Bound(border.nth_us(count), f"{count} slices and sums through one port"))
    for group in (*groups, *(frozenset({r}) for r in some)):
        for mirrored in (False, True):
            # Every slice crosses the border: to be computed on the other side, or as a sum on its way home.
            border = _Border.of(machine, ranks, group, cost, mirrored=mirrored)
            bounds.append(Bound(border.nth_us(ranks * m), f"{ranks * m} slices and sums cross a border"))
    return bounds


def _all_ports(machine: Machine, ranks: int) -> tuple[float, float]:
    """The least latency, and what all ways out can carry together."""
    network = machine.network
    if isinstance(network, Uniform):
        port = network.port_GBps or network.bandwidth_GBps
        # On half duplex a message takes two of the ports that there are.
        return network.latency_us, ranks * port / (1 if network.full_duplex else 2)
    fabric = machine.fabric(ranks)
    links = [fabric.link(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    ports = {fabric.ports[link][0] for link in links}
    return min(fabric.latency_us[link] for link in links), sum(fabric.port_GBps[port] for port in ports)


@lru_cache(maxsize=64)
def _groups(machine: Machine, ranks: int) -> tuple[frozenset[int], ...]:
    """Groups of ranks whose border may be narrow: the nodes, and what falls apart when slow links are taken away."""
    fabric = machine.fabric(ranks)
    if machine.has_equal_ranks:  # one node speaks for all; more of them have as many ways out each
        return tuple(frozenset(island) for island in fabric.islands[:1])
    groups = {frozenset(island) for island in fabric.islands}
    links = [(fabric.alone_GBps[fabric.link(a, b)], a, b) for a in range(ranks) for b in range(ranks) if a != b]
    # Single-linkage clustering: join the ranks along ever slower links, and note each group that arises.
    group_of = {rank: frozenset({rank}) for rank in range(ranks)}
    for _, a, b in sorted(links, key=lambda link: -link[0]):
        if group_of[a] is not group_of[b]:
            joined = group_of[a] | group_of[b]
            groups.add(joined)
            for rank in joined:
                group_of[rank] = joined
    proper = [group for group in groups if 1 < len(group) < ranks]
    return tuple(sorted(proper, key=lambda group: (len(group), sorted(group))))


class _Ways(NamedTuple):
    """Time of one slice along the quickest path, forwarded whole at each stop; by the other rank, 0 for the own."""

    out_us: list[float]
    in_us: list[float]


def _ways(machine: Machine, ranks: int, cost: RegionCost) -> dict[int, _Ways]:
    """By rank; of rank 0 only where all are alike."""
    fabric = machine.fabric(ranks)
    direct = [
        [0.0 if a == b else fabric.transfer_us(a, b, cost.slice_bytes) + machine.gap_us for b in range(ranks)]
        for a in range(ranks)
    ]
    if machine.has_equal_ranks:
        from_0 = _quickest(direct, 0)
        return {0: _Ways(from_0, from_0)}
    best = [_quickest(direct, rank) for rank in range(ranks)]
    return {rank: _Ways(best[rank], [row[rank] for row in best]) for rank in range(ranks)}


def _quickest(direct: list[list[float]], start: int) -> list[float]:
    """Dijkstra's algorithm on all pairs."""
    best = direct[start].copy()
    left = set(range(len(direct))) - {start}
    while left:
        via = min(left, key=best.__getitem__)
        left.remove(via)
        there = best[via]
        best = [old if old <= there + way else there + way for old, way in zip(best, direct[via], strict=True)]
    return best
