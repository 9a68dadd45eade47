"""Separable regions: what runs slice by slice around one site.

A region grows node by node, downstream from an all-gather and upstream from a reduce-scatter, as far as the rules carry
the cut and up to the first matmuls on each path, or through `depth` of them; then it is trimmed to what the matmuls need.
Pointwise work behind a gathered matmul, or before a scattered one, stays outside, where Inductor fuses it over the whole
tensor.

A region is convex: no input of it depends on it. So it can be computed in one place of the program.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from operator import getitem

import torch
from torch.fx import Node

from ..schedule import Kind
from .reach import between
from .rules import ADD_PRODUCT, MATMULS, VIEWS, aten, is_product_in_float32, is_shared_item, rule_of
from .separability import (
    SIXTEEN_BIT,
    Cut,
    NotSeparable,
    Slices,
    Split,
    divides_by_ranks,
    example_shape,
    example_size,
    name_of,
    row_size,
    shape_of,
    tensor_of,
)
from .sites import WAIT, Site
from .sizes import product, quotient


@dataclass
class Region:
    """The nodes that run slice by slice, in graph order, and how each is cut.

    `cuts` has every sliced tensor of the region: the site's value and the outputs of the members; those of a member
    whose output is a sum over slices are absent. `outputs` are read outside, and are joined (or summed) there. `shared`
    are results that are the same for every slice. `depth` is how many matmuls may stand one behind the other. With
    `wide_sums` a matmul may be a sum over slices in bfloat16 too, where its products can be had, and added, in float32.

    A chain ends in a second collective: `scatter`, whose value is a member. Its `body` is all that leads from the gathered
    tensor to that value.
    """

    site: Site
    slices_per_rank: int
    depth: int = 1
    reserved: frozenset[Node] = frozenset()
    wide_sums: bool = False
    members: list[Node] = field(default_factory=list)
    splits: dict[Node, Split] = field(default_factory=dict)
    cuts: dict[Node, Cut] = field(default_factory=dict)
    shared: set[Node] = field(default_factory=set)
    refusals: list[str] = field(default_factory=list)  # why the region did not grow further
    scatter: Site | None = None
    body: frozenset[Node] = frozenset()

    @property
    def slices(self) -> int:
        return self.site.kind.blocks(self.site.ranks) * self.slices_per_rank

    @cached_property
    def slicing(self) -> Slices:
        """How long the slices are."""
        return slices_of(self.site, self.slices_per_rank)

    @property
    def matmuls(self) -> list[Node]:
        return [node for node in self.members if node.target in MATMULS]

    @property
    def is_gather(self) -> bool:
        """Whether the region reads what arrives; else what it computes leaves."""
        return self.site.kind.arrives_first

    def sliced_tensors(self) -> set[Node]:
        """Every tensor of which the rewrite makes slices: those of the region, and inputs from outside."""
        inputs = {operand for split in self.splits.values() for operand in split.inputs}
        return {self.site.value, self.site.shard, *self.cuts, *inputs}

    def read_outside(self) -> tuple[list[Node], set[Node]]:
        """The sliced tensors that are joined (or summed) for readers outside, and the members that stay for that.

        Where a view of a member is read outside, the view stays in the graph as it is, and reads the joined tensor: a
        matmul can write its slice in place of the joined buffer, a view of it cannot.
        """
        inside = {*self.members, *self._collectives(self.members)}
        start = [self.site.value] if self.is_gather else []
        joined = bool(self.blocks_read_outside())
        outputs: list[Node] = []
        kept: set[Node] = set()
        for node in reversed([*start, *self.members]):
            if all(user in inside and user not in kept for user in node.users) and not (node in start and joined):
                continue
            is_view = node.target in VIEWS or (node.target is getitem and node.args[0].target in VIEWS)  # type: ignore[union-attr]
            if is_view and node not in start:
                kept.add(node)
            else:
                outputs.append(node)
        return outputs[::-1], kept

    def blocks_read_outside(self) -> list[tuple[Node, int]]:
        """The blocks of single ranks that others read, besides the tensor that joins them, each with its rank."""
        site = self.site
        inside = {*site.glue, site.gathered[0]}
        return [(node, rank) for node, rank in site.blocks if any(user not in inside for user in node.users)]

    def replaced(self) -> set[Node]:
        """What the rewrite takes out of the graph: the collective, members, and glue that nothing else reads."""
        _, kept = self.read_outside()
        dead = {*self.members} - kept
        return dead | self._collectives(dead) | ({self.site.gathered[0]} if self.site.is_gather else set())

    def _collectives(self, among: Iterable[Node]) -> set[Node]:
        """The collectives, and those nodes around them that only they and `among` read."""
        found = {node for site in self.sites for node in (site.collective, site.wait)}
        inside = {*found, *among}
        for site in self.sites:
            for node in reversed(site.glue):
                if site.is_gather or all(user in inside for user in node.users):
                    found.add(node)
                    inside.add(node)
        return found

    @property
    def sites(self) -> tuple[Site, ...]:
        return (self.site,) if self.scatter is None else (self.site, self.scatter)


class NoMatmul(NotSeparable):
    """Nothing stood in the way, but no matmul came of it."""


def ways_of(site: Site) -> tuple[Site, ...]:
    """The site, and its rivals where a matmul leads to what they send with no other collective between."""
    frontier, seen = [rival.value for rival in site.rivals[:1]], set[Node]()
    while frontier:
        node = frontier.pop()
        if node.target in MATMULS:
            return (site, *site.rivals)
        if node not in seen and node.target is not WAIT:
            seen.add(node)
            frontier += node.all_input_nodes
    return (site,)


def leads_from_matmul(node: Node, barren: set[Node] | None = None) -> bool:
    """Whether a region that grows upstream through `node` may come to a matmul: not through what is taken, nor a collective.

    Where it may not, all that was asked is added to `barren`, so that it need not be asked again.
    """
    barren = set() if barren is None else barren
    frontier, seen = [node], {node}
    while frontier:
        node = frontier.pop()
        if node in barren or _is_taken(node) or node.target is WAIT:
            continue
        if node.target in MATMULS:
            return True
        new = [operand for operand in node.all_input_nodes if operand not in seen]
        seen.update(new)
        frontier += new
    barren |= seen
    return False


def first_matmuls(site: Site) -> list[Node]:
    """The first matmuls on each path from or to a collective: of the first way that can be planned.

    Raises NotSeparable where there is none.
    """
    refusals = []
    for way in ways_of(site):
        try:
            return plan_region(way, way.kind.fewest_slices).matmuls
        except NotSeparable as refusal:
            refusals.append(refusal)
    raise refusals[0]


def plan_region(
    site: Site,
    slices_per_rank: int,
    depth: int = 1,
    reserved: frozenset[Node] = frozenset(),
    wide_sums: bool = False,
) -> Region:
    """Grow the region of a site, cut in at most `slices_per_rank` slices a rank, through at most `depth` matmuls a path.

    `reserved` matmuls are taken as the first of a path only: they are next to other collectives.

    Raises NotSeparable, with the reasons met on the way, if no matmul can be reached.
    """
    reasons: list[str] = []
    candidates = (site, *site.alternatives)
    for candidate, m in [(c, m) for c in candidates for m in _slice_counts(c, slices_per_rank)]:
        region = Region(candidate, m, depth, reserved, wide_sums)
        try:
            (_grow_downstream if region.is_gather else _grow_upstream)(region)
            if region.matmuls:
                _check_examples(region)
                _check_reach(region)
                return region
            reasons = reasons or region.refusals
        except NotSeparable as refusal:
            reasons = reasons or [str(refusal)]
    raise NotSeparable("; ".join(dict.fromkeys(reasons))) if reasons else NoMatmul(_no_matmul(site))


def plan_chain(gather: Site, scatter: Site, slices_per_rank: int) -> Region:
    """The region from an all-gather through all that leads to a reduce-scatter, cut in at most so many slices a rank.

    Other first matmuls that read the gathered tensor come along. Raises NotSeparable, with the reasons, where something
    on the way cannot be computed slice by slice, or no slice of what arrives becomes the same slice of what leaves.
    """
    if (gather.group_name, gather.ranks) != (scatter.group_name, scatter.ranks):
        raise NotSeparable("a chain has one group")
    body = between(gather.value, scatter.value)
    if not any(node.target in MATMULS for node in body):
        raise NotSeparable("no matmul between the gathered and the scattered tensor")
    reasons: list[str] = []
    for m in _slice_counts(gather, slices_per_rank):
        region = Region(replace(gather, kind=Kind.CHAIN, alternatives=()), m, scatter=scatter, body=body)
        try:
            _grow_downstream(region)
            _check_examples(region)
        except NotSeparable as refusal:
            reasons.append(str(refusal))
            continue
        if body <= set(region.members) and region.cuts.get(scatter.value) == Cut(scatter.dim):
            _check_shares(region, scatter)
            return region
        reasons += region.refusals
    raise NotSeparable("; ".join(dict.fromkeys(reasons)) or "what arrives and what leaves are cut along different dims")


def _check_shares(region: Region, scatter: Site) -> None:
    """Raises NotSeparable where the slices that arrive for a rank are not those that leave for it."""
    slices = region.slicing
    row = row_size(shape_of(scatter.value), Cut(scatter.dim), slices)
    share = product((row, slices.rows))
    if (scatter.share or quotient(shape_of(scatter.value)[scatter.dim], scatter.ranks)) != share:
        raise NotSeparable("what arrives and what leaves has its uneven shards at different places")


def _no_matmul(site: Site) -> str:
    what = {
        Kind.ALL_GATHER: "reads the gathered tensor or makes it",
        Kind.ALL_GATHER_OUT: "produces the gathered tensor",
        Kind.ALL_TO_ALL: "reads or produces the exchanged tensor",
    }.get(site.kind, "produces the summed tensor")
    if site.share is not None and site.kind is Kind.ALL_GATHER and not site.rivals:
        return "no matmul reads the gathered tensor, and what makes it is shorter on ranks with a short shard"
    return f"no matmul {what}: there is nothing to hide the transfer under"


def slices_of(site: Site, slices_per_rank: int) -> Slices:
    """The slices of a site, of which each rank has so many."""
    blocks, size = site.kind.blocks(site.ranks), shape_of(site.value)[site.dim]
    if site.share is not None:
        assert isinstance(size, int)
        return Slices.of_uneven(site.share, size, blocks, slices_per_rank)
    share = quotient(size, blocks)
    assert share is not None
    return Slices.of(share, blocks, slices_per_rank)


def rank_share(site: Site) -> Fraction:
    """The share of a rank in the tensor that is cut: the largest one, where they are not equal."""
    if site.share is None:
        return Fraction(1, site.kind.blocks(site.ranks))
    return Fraction(min(site.share, size := example_shape(site.value)[site.dim]), size)


def most_slices(site: Site, symbolic_rows: int = 2) -> int:
    """How many slices a rank may have: of a row each, or of `symbolic_rows` in the first call where their number is symbolic.

    Raises NotSeparable where it depends on data.
    """
    if site.share is not None:
        return site.share
    share = example_shape(site.value)[site.dim] // site.kind.blocks(site.ranks)
    return share if isinstance(shape_of(site.value)[site.dim], int) else max(1, share // symbolic_rows)


def _slice_counts(site: Site, at_most: int) -> list[int]:
    """The numbers of slices a rank to try: the largest first, then those that divide the shard evenly."""
    if 0 in shape_of(site.value):
        raise NotSeparable(f"a tensor of shape {list(shape_of(site.value))} is empty: there is nothing to transfer")
    kind = site.kind
    blocks, fewest = kind.blocks(site.ranks), kind.fewest_slices
    if site.share is None:
        divides_by_ranks(shape_of(site.value), [site.dim], blocks)
    if at_most < fewest:
        raise NotSeparable(f"in {at_most} slice a rank nothing is computed while results travel: it takes {fewest}")
    finest = min(at_most, most_slices(site))
    found = [m for m in range(at_most, fewest - 1, -1) if m == finest or slices_of(site, m).are_rows]
    if not found:
        raise NotSeparable(f"dim {site.dim} of {list(shape_of(site.value))} does not divide into 2 to {at_most} slices")
    return found


def _is_taken(node: Node) -> bool:
    return "fo" in node.meta


def _grow_downstream(region: Region) -> None:
    """Visit what depends on the gathered tensor, in graph order; stop when no more direct reader is left to ask."""
    site, slices = region.site, region.slicing
    start = Cut(site.dim)
    row_size(shape_of(site.value), start, slices)
    region.cuts[site.value] = start
    frontier: list[Node] = []
    seen: set[Node] = set()
    readers: set[Node] = set()  # of a cut tensor, not yet visited
    outside: set[Node] = set()  # depends on the region, and is not in it
    passed: dict[Node, int] = {site.value: 0}  # matmuls on the shortest way to here

    def push(node: Node, is_cut: bool) -> None:
        for user in node.users:
            if is_cut and user.op != "output" and (passed[node] < region.depth or user in region.body):
                readers.add(user)
            if user not in seen:
                seen.add(user)
                heapq.heappush(frontier, user)

    push(site.value, True)
    seen.add(site.value)
    for block, _ in site.blocks:  # what reads one depends on the region
        push(block, False)
    while readers:
        node = heapq.heappop(frontier)
        is_reader = node in readers
        readers.discard(node)
        try:
            if not is_reader:
                raise NotSeparable("")
            behind = min(passed[o] for o in node.all_input_nodes if o in passed)
            _check_reserved(region, node, behind)
            split = _try_member(region, node, outside)
        except NotSeparable as refusal:
            if str(refusal):
                region.refusals.append(str(refusal))
            outside.add(node)
            push(node, False)
            continue
        region.members.append(node)
        region.splits[node] = split
        if split.output is not None:
            region.cuts[node] = split.output
        passed[node] = behind + (node.target in MATMULS)
        push(node, split.output is not None)
    _trim(region, toward_matmuls=True)


def _try_member(region: Region, node: Node, outside: set[Node]) -> Split:
    if _is_taken(node):
        raise NotSeparable(f"{name_of(node)} already runs slice by slice in another region")
    cuts = {operand: region.cuts[operand] for operand in node.all_input_nodes if operand in region.cuts}
    blocking = [
        name_of(o) for o in node.all_input_nodes if o in outside or (o in region.splits and o not in region.cuts)
    ]
    if blocking:
        raise NotSeparable(f"{name_of(node)} also reads {blocking[0]}, which needs the whole gathered tensor first")
    split = rule_of(node).from_inputs(node, cuts, region.slicing)
    if split.output is None:
        _check_sum(node, region)
    _check_outside_inputs(split, region)
    return split


def _check_sum(node: Node, region: Region) -> None:
    """Raises NotSeparable where the results of the slices cannot be added up, or not without rounding each of them."""
    if node.target not in ADD_PRODUCT and node.target is not aten.sum.dim_IntList:
        raise NotSeparable(f"{name_of(node)}: no way to add up the partial results of {node.target}")
    dtype = tensor_of(node).dtype
    if dtype in SIXTEEN_BIT and not (region.wide_sums and is_product_in_float32(node)):
        raise NotSeparable(f"{name_of(node)} sums over this dim: each slice would round to {dtype} once more")


def _check_reserved(region: Region, node: Node, behind: int) -> None:
    if behind and node in region.reserved and node not in region.body:
        raise NotSeparable(f"{name_of(node)} is next to another collective")


def _check_outside_inputs(split: Split, region: Region) -> None:
    for operand, cut in split.inputs.items():
        row_size(shape_of(operand), cut, region.slicing)
        if operand not in region.cuts and not isinstance(operand.meta.get("val"), torch.Tensor):
            raise NotSeparable(f"{name_of(operand)} yields several tensors, and they are not cut")


def _check_examples(region: Region) -> None:
    """Raises NotSeparable where a slice has one item in this call, or none, and more in others: torch takes it for a constant."""
    cuts = [region.cuts, *(split.inputs for split in region.splits.values())]
    for node, cut in {(node, cut) for each in cuts for node, cut in each.items()}:
        size = product((row_size(shape_of(node), cut, region.slicing), region.slicing.fewest_rows()))
        example = 2 if isinstance(size, int) else example_size(size, node)
        if example < 2:
            raise NotSeparable(
                f"a slice of {name_of(node)} has {size} items, which is {example} in the first call: "
                "with a longer one it can be sliced"
            )


def _check_reach(region: Region) -> None:
    """Raises NotSeparable where unequal slices leave out a matmul that equal ones reach."""
    if region.slicing.are_rows:
        return
    whole = replace(region, slices_per_rank=1, members=[], splits={}, cuts={}, shared=set(), refusals=[])
    (_grow_downstream if region.is_gather else _grow_upstream)(whole)
    if len(whole.matmuls) > len(region.matmuls):
        explained = replace(region, members=[], splits={}, cuts={}, shared=set(), refusals=[])
        (_grow_downstream if region.is_gather else partial(_grow_upstream, explain=True))(explained)
        raise NotSeparable("; ".join(explained.refusals))


def _grow_upstream(region: Region, explain: bool = False) -> None:
    """Visit what the scattered tensor depends on, in reverse graph order, while a cut is left to be carried on.

    What no matmul leads to (an input, a table that is computed at the start of the graph) would be trimmed. It is visited, all
    the way back, for its refusals alone: where the region has no matmul, or to `explain`.
    """
    site, slices = region.site, region.slicing
    row_size(shape_of(site.value), Cut(site.dim), slices)
    wanted: dict[Node, Cut] = {site.value: Cut(site.dim)}
    whole: set[Node] = set()  # the region depends on it, and reads it whole or on a path that is not cut
    frontier: list[_Latest] = [_Latest(site.value)]
    seen: set[Node] = {site.value}
    pending, trimmed, barren = {site.value}, set[Node](), set[Node]()
    passed: dict[Node, int] = {site.value: 0}  # matmuls on the shortest way to here
    while pending or (trimmed and (explain or not region.matmuls)):
        node = heapq.heappop(frontier).node
        pending.discard(node)
        trimmed.discard(node)
        members_before = len(region.members)
        if node in wanted:
            try:
                if node in whole:
                    raise NotSeparable(f"{name_of(node)} is also read whole on the way to the collective")
                if any(user in whole for user in node.users):
                    raise NotSeparable(f"{name_of(node)} is also read on a path to the collective that is not cut")
                if _is_taken(node):
                    raise NotSeparable(f"{name_of(node)} already runs slice by slice in another region")
                _check_reserved(region, node, passed[node])
                split = rule_of(node).from_output(node, wanted[node], slices)
                if any(wanted.get(operand, cut) != cut for operand, cut in split.inputs.items()):
                    raise NotSeparable(f"an input of {name_of(node)} would have to be cut along two dims at once")
                for operand, cut in split.inputs.items():
                    row_size(shape_of(operand), cut, slices)
                region.members.append(node)
                region.splits[node] = split
                region.cuts[node] = wanted[node]
            except NotSeparable as refusal:
                region.refusals.append(str(refusal))
        is_member = len(region.members) > members_before
        if not is_member:
            whole.add(node)
        behind = passed.get(node, 0) + (node.target in MATMULS)
        for operand in node.all_input_nodes:
            if is_member and operand not in region.splits[node].inputs:
                whole.add(operand)
            elif is_member and behind < region.depth:
                wanted[operand] = region.splits[node].inputs[operand]
                passed[operand] = min(behind, passed.get(operand, behind))
                (pending if leads_from_matmul(operand, barren) else trimmed).add(operand)
            if operand not in seen:
                seen.add(operand)
                heapq.heappush(frontier, _Latest(operand))
    region.members.reverse()
    _trim(region, toward_matmuls=False)


@dataclass(order=False)
class _Latest:
    """Heap order: the node that comes last in the graph first."""

    node: Node

    def __lt__(self, other: _Latest) -> bool:
        return other.node < self.node


def _trim(region: Region, toward_matmuls: bool) -> None:
    """Keep the matmuls and what leads to them (gather) or from them (scatter), and sums of the gathered tensor."""
    kept: set[Node] = set()
    order: Iterable[Node] = reversed(region.members) if toward_matmuls else region.members
    for node in order:
        is_sum = node not in region.cuts
        neighbours = node.users if toward_matmuls else node.all_input_nodes
        if node.target in MATMULS or is_sum or node in region.body or any(other in kept for other in neighbours):
            kept.add(node)
    for node in list(kept):  # the results of an op with several go together
        for item in node.users if isinstance(node.meta.get("val"), (tuple, list)) else ():
            kept.add(item)
            region.splits[item] = Split({node: region.cuts[node]}, region.cuts[node])
            if is_shared_item(item):
                region.shared.add(item)
            else:
                region.cuts[item] = region.cuts[node]
    region.members = sorted(kept)
    region.splits = {node: region.splits[node] for node in region.members}
    if region.is_gather:
        kept.add(region.site.value)
    region.cuts = {node: cut for node, cut in region.cuts.items() if node in kept}
