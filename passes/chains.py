"""Chains: whether an all-gather and a reduce-scatter become one region, with all that lies between them.

As two regions each transfer hides under the first, or the last, matmuls of its own; as a chain both hide under all of them,
and a matmul between the two is not claimed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..options import Options
from ..schedule import Kind, Schedule
from .decide import Decision, decide, decide_chain
from .edit import Edit, c10d
from .merge_sums import merge_sums
from .reach import Downstream
from .regions import Region
from .separability import NotSeparable
from .sites import Groups, Site, site_of


@dataclass(frozen=True)
class Chain:
    """A chain that is to be rewritten. `scatters` are the collectives at its end, and `edits` made them one."""

    region: Region
    schedule: Schedule
    reason: str
    scatters: tuple[Node, ...]
    edits: tuple[Edit, ...]


def find_chain(
    graph: Graph,
    gather: Site,
    alone: Decision | None,
    collectives: Sequence[Node],
    options: Options,
    groups: Groups,
    reserved: frozenset[Node],
) -> Chain | None:
    """The chain from the all-gather of `gather` to the first reduce-scatter behind it, if it is the best thing to do.

    `alone` is the decision on the all-gather as a region of its own, None where it has none; `reserved` as for `decide`.
    The graph is as it was, but for the edits of a chain that is returned.
    """
    scatter = _first_scatter(gather, collectives, groups)
    if scatter is None:
        return None
    merged = merge_sums(graph, scatter, groups)
    end = scatter if merged is None else merged.site
    try:
        chain = decide_chain(gather, end, options)
        if chain.schedule is not None and _is_better(chain, alone, _alone(end, options, reserved), options):
            if merged is None:
                return Chain(chain.region, chain.schedule, chain.reason, (scatter.collective,), ())
            return Chain(chain.region, chain.schedule, chain.reason, merged.collectives, (merged.edit,))
    except NotSeparable:
        pass
    if merged is not None:
        merged.edit.undo()
    return None


def _first_scatter(gather: Site, collectives: Sequence[Node], groups: Groups) -> Site | None:
    behind = Downstream(gather.value)
    for node in collectives:
        scatter = (
            site_of(node, groups) if node.target is c10d.reduce_scatter_tensor.default and node in behind else None
        )
        if isinstance(scatter, Site) and scatter.kind is Kind.REDUCE_SCATTER:
            return scatter
    return None


def _alone(scatter: Site, options: Options, reserved: frozenset[Node]) -> Decision | None:
    try:
        return decide(scatter, options, reserved)
    except NotSeparable:
        return None


def _is_better(chain: Decision, gather: Decision | None, scatter: Decision | None, options: Options) -> bool:
    """Whether a chain saves more than its two ends as regions of their own, of which a matmul can serve one alone."""
    ends = [end for end in (gather, scatter) if end is not None and end.schedule is not None]
    contested = len(ends) == 2 and set(ends[0].region.matmuls) & set(ends[1].region.matmuls)
    if options.rewrite == "always" and (contested or len(ends) < 2):
        return True  # both are rewritten as a chain only
    saved_us = [end.saved_us for end in ends]
    apart_us = max(saved_us) if contested else sum(saved_us)
    return chain.saved_us > apart_us + 1e-6 * abs(apart_us)
