"""Split an all-reduce: its reduce-scatter half runs under the matmuls before it, its all-gather half under those after it.

    matmul -> all_reduce(x) -> residual add, norm -> matmuls
    matmul -> reduce_scatter(x, dim) -> all_gather(., dim) -> residual add, norm -> matmuls

The two halves are ordinary collectives, and become ordinary regions: what lies between the gather and the next matmuls
runs slice by slice as slices arrive, on every rank with the operands that this rank has. Nothing is assumed about which
tensors are equal on all ranks, no other tensor is saved for backward, and every rank holds the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from torch.fx import Graph, Node

from ..options import Options
from ..schedule import Kind, Schedule
from ..schedule.choose import Choice, collective_us
from .decide import Decision, decide, machine_of, size_bytes_of
from .edit import Edit, c10d
from .regions import Region, first_matmuls, ways_of
from .separability import NotSeparable, example_shape, is_contiguous, tensor_of
from .sites import Groups, Site, site_of

Wanted = Mapping[Node, tuple[Node, float]]  # matmul -> a collective that can hide under it, and what this saves in us


@dataclass(frozen=True)
class Halves:
    """An all-reduce that is split in the graph, and how its halves are rewritten."""

    edit: Edit
    parts: list[tuple[Region, Schedule]]  # the reduce-scatter where it is no plain collective, and the all-gather
    saved_us: float  # against the plain all-reduce; what the split takes from other collectives is taken off
    reason: str


def split_all_reduce(
    graph: Graph,
    site: Site,
    whole_us: float,
    options: Options,
    groups: Groups,
    reserved: frozenset[Node],
    wanted: Wanted,
) -> Halves | None:
    """Split the all-reduce of `site` in the graph, along the dim that saves most.

    None, and the graph as it was, where no split has matmuls behind it or none is predicted to save more than `whole_us`, what
    the all-reduce in one region does. With rewrite='always' a split into two regions needs no better prediction.
    `wanted` are matmuls that another collective can be hidden under, with that collective and the time that this saves: to
    take one away costs as much. `reserved` is as for `decide`.
    """
    # A part in a million is no difference: one region is simpler than two.
    least_us = whole_us + 1e-6 * abs(whole_us) if isfinite(whole_us) else whole_us
    best: tuple[float, Site] | None = None
    for along in (site, *site.alternatives):
        halves = _split_along(graph, along, options, groups, reserved, wanted)
        if halves is None:
            continue
        halves.edit.undo()
        both_always = options.rewrite == "always" and len(halves.parts) == 2
        if (both_always or halves.saved_us > least_us) and (best is None or halves.saved_us > best[0]):
            best = (halves.saved_us, along)
    return None if best is None else _split_along(graph, best[1], options, groups, reserved, wanted)


def _split_along(
    graph: Graph, along: Site, options: Options, groups: Groups, reserved: frozenset[Node], wanted: Wanted
) -> Halves | None:
    """The split along one dim, applied to the graph; None, and the graph as it was, where it is not to be used."""
    if not is_contiguous(tensor_of(along.wait)):
        return None  # what is gathered is, and readers may depend on strides
    try:
        if 0 in example_shape(along.value):
            return None  # there is nothing to split
    except NotSeparable:
        return None  # of no size that predictions could be made for
    edit = Edit(graph, along.wait.next)
    op, ranks, group, name = "avg" if along.averages else "sum", along.ranks, along.group_name, along.collective.name
    scatter, shard = edit.reduce_scatter(along.value, along.dim, op, ranks, group, f"{name}_scatter_half")
    gather, joined = edit.all_gather(shard, along.dim, ranks, group, f"{name}_gather_half")
    edit.replace(along.wait, joined)
    edit.dead = [along.collective, along.wait]
    scattered, gathered = (_decided(node, options, groups, reserved) for node in (scatter, gather))
    judged = None if gathered is None else _judge(along, scattered, gathered, options, wanted)
    if judged is None:
        edit.undo()
        return None
    parts = [(half.region, half.best) for half in (scattered, gathered) if half is not None and half.best is not None]
    return Halves(edit, parts, *judged)


def _decided(node: Node, options: Options, groups: Groups, reserved: frozenset[Node]) -> Decision | None:
    try:
        return decide(_site(node, groups), options, reserved)
    except NotSeparable:
        return None


def _site(node: Node, groups: Groups) -> Site:
    site = site_of(node, groups)
    if not isinstance(site, Site):
        raise NotSeparable(site.reason)
    return site


def _judge(
    along: Site, scatter: Decision | None, gather: Decision, options: Options, wanted: Wanted
) -> tuple[float, str] | None:
    """What the split saves against the plain all-reduce, and the reason for the record; None where it is not to be used."""
    if gather.best is None or (scatter is not None and scatter.best is None):
        return None
    taken = dict(wanted[node] for node in gather.region.matmuls if node in wanted)
    always = options.rewrite == "always"
    if always and taken:
        return None  # with fewer of them split, more are rewritten
    regions = [gather] if scatter is None else [scatter, gather]
    choices = [region.choice for region in regions if region.choice is not None]
    if len(choices) < len(regions):
        return 0.0, gather.reason
    machine = machine_of(options, tensor_of(along.value).device.type)
    block_bytes = size_bytes_of(along.value) / along.ranks
    plain_us = sum(map(_compute_us, choices)) + collective_us(Kind.ALL_REDUCE, machine, along.ranks, block_bytes)
    split_us = sum(map(_predicted_us, choices))
    if scatter is None:
        split_us += collective_us(Kind.REDUCE_SCATTER, machine, along.ranks, block_bytes)
        how = "its all-gather half under the matmuls after it, and a plain reduce-scatter, as no matmul makes what is summed"
    else:
        how = "its reduce-scatter half under the matmuls before it and its all-gather half under those after it"
    saved_us = plain_us - split_us
    least_gain = machine.least_gain(options.margin, along.ranks, *(half.region.site.kind for half in regions))
    if not always and saved_us <= least_gain * plain_us:
        return None
    schedules = " + ".join(region.best.describe() for region in regions if region.best is not None)
    reason = (
        f"predicted {saved_us / plain_us:.1%} faster on machine {machine.name} with {how}: "
        f"plain {plain_us / 1e3:.4g} ms, {schedules} {split_us / 1e3:.4g} ms"
    )
    return saved_us - sum(taken.values()), f"rewrite='always'; {reason}" if always else reason


def _predicted_us(choice: Choice) -> float:
    assert choice.best is not None
    return choice.best.predicted_us


def _compute_us(choice: Choice) -> float:
    return choice.plain_us - choice.communication_us


def wanted_matmuls(collectives: Sequence[Node], options: Options, groups: Groups) -> dict[Node, tuple[Node, float]]:
    """The matmuls that make what each collective of a graph sums or gathers, where this can be hidden under them.

    Nothing for a graph without an all-reduce: there nobody asks, and to plan every region once more takes time.
    """
    wanted: dict[Node, tuple[Node, float]] = {}
    if not any(node.target is c10d.all_reduce.default for node in collectives):
        return wanted
    for node in collectives:
        try:
            site = _site(node, groups)
            if site.kind.reduces or len(ways_of(site)) > 1:
                decision = decide(site, options)
                if decision.schedule is not None and not decision.region.is_gather:
                    taken = first_matmuls(site if site.kind.reduces else decision.region.site)
                    wanted |= {matmul: (node, decision.saved_us) for matmul in taken}
        except NotSeparable:
            continue
    return wanted
