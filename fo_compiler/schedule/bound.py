"""A time that no schedule can beat, for every kind on any machine, and the certificate of a schedule that comes near.

The bound is the largest of these, for `n = (N - 1) m` slices that have to cross a rank's port (t_c: one slice of compute):

    work       a rank's own compute, adds and posts; with contention, what its transfers take from it
    first      the first slice to arrive cannot be there before latency + one transfer; n slices are computed after it
    last       the last of n slices arrives after latency + n transfers at the port's rate; one is computed after it
    distance   a slice from far away travels along the quickest path; one is computed after it
    cut        what has to enter (or leave) a group of ranks does so through the links and ports that cross its border

Kinds in which results leave are the mirror image in time: `last` is then the first departure. An all-reduce has both,
and in all moves 2 (N - 1) messages a slice. The reasons are written out in docs/scheduling.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .ir import Kind
from .machine import Machine
from .network import BYTES_PER_US_PER_GBPS, Fabric
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


class _Border:
    """What crosses from the ranks `outside` to the ranks `inside`: how soon, and how fast.

    With `mirrored`, time runs backwards: what leaves is what arrives.
    """

    def __init__(
        self, fabric: Fabric, inside: Iterable[int], cost: RegionCost, machine: Machine, *, mirrored: bool
    ) -> None:
        within = frozenset(inside)
        outside = [rank for rank in range(fabric.ranks) if rank not in within]
        links = [fabric.link(i, o) if mirrored else fabric.link(o, i) for o in outside for i in sorted(within)]
        alone = [fabric.alone_GBps(link) for link in links]
        self.latency_us = min(fabric.latency_us[link] for link in links)
        # A link cannot outrun its port, nor all links together the ports at either end.
        ends = [sum(fabric.port_GBps[port] for port in {fabric.ports[link][end] for link in links}) for end in (0, 1)]
        rate = min(sum(alone), *ends) * BYTES_PER_US_PER_GBPS
        gap_bytes = machine.gap_us * min(alone) * BYTES_PER_US_PER_GBPS
        self.one_us = min(
            fabric.latency_us[link] + machine.gap_us + cost.slice_bytes / (GBps * BYTES_PER_US_PER_GBPS)
            for link, GBps in zip(links, alone, strict=True)
        )
        self.slice_us = (cost.slice_bytes + gap_bytes) / rate

    def nth_us(self, n: int) -> float:
        """The n-th crossing is not over before this."""
        return max(self.one_us, self.latency_us + n * self.slice_us)


def lower_bound(kind: Kind, machine: Machine, ranks: int, slices_per_rank: int, cost: RegionCost) -> Bound:
    """The bound for schedules of `kind` that cut a region into `slices_per_rank` slices a rank at `cost` each."""
    m = slices_per_rank
    scales = [machine.scale(rank) for rank in range(ranks)]
    t_c = [cost.compute_us * scale for scale in scales]
    if ranks == 1:
        return Bound(m * t_c[0], "its compute")
    # On a uniform machine the ports of rank 0 speak for all.
    uniform = machine.is_uniform
    fabric = machine.fabric(ranks)
    some = [0] if uniform else list(range(ranks))
    groups = [] if uniform else _groups(fabric)
    bounds = [Bound(_work_us(kind, machine, ranks, m, cost, rank, fabric), f"work of rank {rank}") for rank in some]
    distance = [] if uniform else _distances(fabric, cost, machine)
    if kind is Kind.ALL_REDUCE:
        bounds += _all_reduce_bounds(fabric, machine, m, cost, t_c, some, groups)
        if distance:
            bounds += [
                Bound(ranks * m * t_c[r] + max(distance[r]), f"the last slice of rank {r} on its way") for r in some
            ]
        return max(bounds, key=lambda bound: bound.us)
    if uniform and _is_half_duplex(fabric):
        border = _Border(fabric, [0], cost, machine, mirrored=False)
        count = (ranks - 1) * m
        bounds.append(Bound(border.nth_us(2 * count) + t_c[0], f"{count} slices in and {count} out of one port"))
    mirrored = not kind.arrives_first
    verb = "leave" if mirrored else "enter"
    n = (ranks - 1) * m
    for r in some:
        border = _Border(fabric, [r], cost, machine, mirrored=mirrored)
        bounds.append(Bound(border.nth_us(1) + n * t_c[r], f"the first slice to {verb} rank {r}, then its compute"))
        bounds.append(Bound(border.nth_us(n) + t_c[r], f"{n} slices {verb} rank {r} through its port"))
        if distance:
            far = sorted(distance[r][o] if mirrored else distance[o][r] for o in range(ranks) if o != r)
            bounds += [Bound(far[i] + (n - i * m) * t_c[r], f"the way to rank {r} from afar") for i in range(ranks - 1)]
        # The other side of the port: what each rank owns has to get out at all (in an all-to-all, to everybody).
        other = _Border(fabric, [r], cost, machine, mirrored=not mirrored)
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
        way_in = _Border(fabric, group, cost, machine, mirrored=mirrored)
        way_out = _Border(fabric, group, cost, machine, mirrored=not mirrored)
        bounds.append(Bound(way_in.nth_us(entering) + inside, f"{entering} slices {verb} the group {names}"))
        bounds.append(
            Bound(way_out.nth_us(leaving) + outside, f"{leaving} slices of the group {names} cross its border")
        )
    return max(bounds, key=lambda bound: bound.us)


def _work_us(kind: Kind, machine: Machine, ranks: int, m: int, cost: RegionCost, rank: int, fabric: Fabric) -> float:
    """What a rank has to do itself, and what contention makes of it."""
    scale = machine.scale(rank)
    messages = (ranks * m) if kind is Kind.ALL_REDUCE else (ranks - 1) * m
    work = ranks * m * cost.compute_us * scale + messages * machine.post_us
    if kind.reduces:
        # Somebody adds N - 1 partial sums for each slice; only on alike ranks is the average everybody's.
        adds = (ranks - 1) * m if machine.is_uniform else m if kind is Kind.REDUCE_SCATTER else 0
        work += adds * cost.add_us * scale
    # While its port is in use for `moving`, compute runs at 1 / c and bytes at 1 / d; or the two take turns.
    border = _Border(fabric, [rank], cost, machine, mirrored=not kind.arrives_first)
    moving = messages * border.slice_us
    if machine.is_uniform and _is_half_duplex(fabric):
        moving *= 2  # what leaves takes the same port; some rank moves at least the average
    c, d = machine.compute_slowdown, machine.transfer_slowdown
    return work + min(moving, d * moving * (1 - 1 / c))


def _is_half_duplex(fabric: Fabric) -> bool:
    """Whether what enters rank 0 shares a port with what leaves it."""
    return bool(set(fabric.ports[fabric.link(0, 1)]) & set(fabric.ports[fabric.link(1, 0)]))


def _all_reduce_bounds(
    fabric: Fabric,
    machine: Machine,
    m: int,
    cost: RegionCost,
    t_c: list[float],
    some: list[int],
    groups: list[frozenset[int]],
) -> list[Bound]:
    """Each rank sends something about every slice and receives something about every slice, after some compute."""
    ranks = fabric.ranks
    slices = ranks * m
    bounds = []
    for r in some:
        out = _Border(fabric, [r], cost, machine, mirrored=True)
        in_ = _Border(fabric, [r], cost, machine, mirrored=False)
        others = min(t_c[o] for o in range(ranks) if o != r)
        bounds += [
            Bound(slices * t_c[r] + out.nth_us(1), f"the last slice of rank {r} leaves"),
            Bound(t_c[r] + out.nth_us(slices), f"{slices} slices leave rank {r} through its port"),
            Bound(others + in_.nth_us(slices), f"{slices} slices enter rank {r} through its port"),
        ]
    first = min(t_c)
    for group in groups:
        for mirrored in (False, True):
            border = _Border(fabric, group, cost, machine, mirrored=mirrored)
            bounds.append(Bound(first + border.nth_us(slices), f"{slices} slices cross the border of a group"))
    ports = {fabric.ports[fabric.link(a, b)][0] for a in range(ranks) for b in range(ranks) if a != b}
    rate = sum(fabric.port_GBps[port] for port in ports) * BYTES_PER_US_PER_GBPS
    latency = min(fabric.latency_us[fabric.link(a, b)] for a in range(ranks) for b in range(ranks) if a != b)
    total = 2 * (ranks - 1) * slices * cost.slice_bytes
    bounds.append(Bound(first + latency + total / rate, f"{2 * (ranks - 1) * slices} messages through all ports"))
    return bounds


def _groups(fabric: Fabric) -> list[frozenset[int]]:
    """Groups of ranks whose border may be narrow: the nodes, and what falls apart when slow links are taken away."""
    groups = {frozenset(island) for island in fabric.islands}
    links = [
        (fabric.alone_GBps(fabric.link(a, b)), a, b) for a in range(fabric.ranks) for b in range(fabric.ranks) if a != b
    ]
    # Single-linkage clustering: join the ranks along ever slower links, and note each group that arises.
    group_of = {rank: frozenset({rank}) for rank in range(fabric.ranks)}
    for _, a, b in sorted(links, key=lambda link: -link[0]):
        if group_of[a] is not group_of[b]:
            joined = group_of[a] | group_of[b]
            groups.add(joined)
            for rank in joined:
                group_of[rank] = joined
    proper = [group for group in groups if 1 < len(group) < fabric.ranks]
    return sorted(proper, key=lambda group: (len(group), sorted(group)))


def _distances(fabric: Fabric, cost: RegionCost, machine: Machine) -> list[list[float]]:
    """Time of one slice along the quickest path from each rank to each other, forwarded whole at each stop."""
    ranks = range(fabric.ranks)
    best = [
        [0.0 if a == b else fabric.transfer_us(a, b, cost.slice_bytes) + machine.gap_us for b in ranks] for a in ranks
    ]
    for via in ranks:
        row = best[via]
        for a in ranks:
            to_via = best[a][via]
            best[a] = [old if old <= to_via + way else to_via + way for old, way in zip(best[a], row, strict=True)]
    return best
