"""Collective sites: each collective of a graph, in whatever form it was written, as one record.

Forms of an all-gather along dim d, and of a reduce-scatter (read upwards), that are brought to one record here:

    functional, d = 0      all_gather -> wait
    DTensor, d > 0         all_gather -> wait -> split(0) -> getitem x N -> cat(d)
    dist.all_gather(list)  all_gather -> wait -> slice(0) x N [-> copy x N] -> cat(d)

Any other form keeps dim 0 here, and its views are left to the separability rules.

Where a size S does not divide by the ranks, DTensor pads each shard to C rows, and afterwards takes the padding off again:

    all-gather             [pad on a rank that has fewer] -> all-gather to ranks * C rows, as above -> slice(d, 0, S)
    reduce-scatter         split(C, d) -> pad the last piece, zeros for ranks without one -> cat(d) -> reduce-scatter, as above

What is cut is then the tensor of S rows (`passes/uneven.py`): padding is neither sent nor computed on.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.fx import Node

from ..schedule import Kind
from . import uneven
from .blocks import back_through_copies, block_source, blocks_of, cat_dim, through_copies
from .rules import aten
from .separability import NotSeparable, divides_by_ranks, shape_of
from .sizes import SizeNodes, UnknownSize, as_size, quotient

c10d = torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default

_KINDS: dict[object, Kind] = {
    c10d.all_gather_into_tensor.default: Kind.ALL_GATHER,
    c10d.reduce_scatter_tensor.default: Kind.REDUCE_SCATTER,
    c10d.all_reduce.default: Kind.ALL_REDUCE,
    c10d.all_to_all_single.default: Kind.ALL_TO_ALL,
}


class Groups(Protocol):
    """What is asked of a process group by its name."""

    def rank_and_size(self, group_name: str) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Site:
    """One collective, as the centre of a region.

    `value` is the tensor that is computed slice by slice, and `dim` the dim along which it is cut: what was gathered or
    arrives from all ranks, or what is to be summed or leaves for all ranks. `shard` is the tensor at the other side of the
    collective: what this rank sends, or what comes out. In an all-to-all `peer_dim` is the dim of `shard` along which its
    blocks for (or from) the peers lie. `glue` are the nodes between the collective and `value`; `blocks` are those of them
    that are the block of one rank, with that rank: others may read these, too. `alternatives` are other ways to see the same
    collective: an all-reduce cut along another dim, an all-to-all from its other side, a gathered list that is joined twice.

    `share` is the size of a rank's shard along `dim` where the last ranks have less of `value`, or nothing: see `uneven.py`.

    `rivals` of an all-gather are the same collective behind what makes its shard (`ALL_GATHER_OUT`), one for each dim: there
    `value` is what this rank makes and sends, `shard` the gathered tensor and `peer_dim` the dim along which that is gathered.
    The first of `alternatives` that can be planned is taken, but of `rivals` the one that saves most.
    """

    kind: Kind
    collective: Node
    wait: Node
    group_name: str
    rank: int
    ranks: int
    value: Node
    dim: int
    shard: Node
    glue: tuple[Node, ...]
    averages: bool = False
    peer_dim: int = 0
    blocks: tuple[tuple[Node, int], ...] = ()
    alternatives: tuple[Site, ...] = ()
    rivals: tuple[Site, ...] = ()
    share: int | None = None

    @property
    def gathered(self) -> tuple[Node, int]:
        """The tensor that an all-gather yields, and the dim along which the ranks' shards lie in it."""
        return (self.shard, self.peer_dim) if self.kind is Kind.ALL_GATHER_OUT else (self.value, self.dim)

    @property
    def is_gather(self) -> bool:
        """Whether what is gathered replaces nodes behind the collective: its glue, and what this glue leads to."""
        return self.kind.arrives_first or self.kind is Kind.ALL_GATHER_OUT


@dataclass(frozen=True)
class LeftAlone:
    """A collective that is not rewritten, and why."""

    collective: Node
    reason: str
    ranks: int = 0


def is_collective(node: Node) -> bool:
    """Whether a node starts a collective (a wait does not)."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    namespace = node.target.namespace
    if namespace == "_dtensor":
        return node.target._opname == "shard_dim_alltoall"
    return namespace == "_c10d_functional" and node.target is not WAIT


def group_name_of(node: Node) -> str | None:
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, formal in enumerate(node.target._schema.arguments):
        if formal.name == "group_name":
            name = node.args[index] if index < len(node.args) else node.kwargs.get("group_name")
            return name if isinstance(name, str) else None
    return None


def site_of(node: Node, groups: Groups) -> Site | LeftAlone:
    """The site of the collective `node`, as the graph is now."""
    group_name = group_name_of(node)
    if group_name is None:
        return LeftAlone(node, "its process group is not known by name at compile time")
    rank, ranks = groups.rank_and_size(group_name)
    kind = Kind.ALL_TO_ALL if _is_shard_dim_alltoall(node) else _KINDS.get(node.target)
    if kind is None:
        kinds = ", ".join(kind.value for kind in _KINDS.values())
        return LeftAlone(node, f"{node.target} is not a kind that is sliced: {kinds} are", ranks)
    if ranks == 1:
        return LeftAlone(node, "the group has one rank: nothing is transferred", ranks)
    waits = [node] if _is_shard_dim_alltoall(node) else list(node.users)  # that one waits by itself
    if len(waits) != 1 or (waits[0].target is not WAIT and waits[0] is not node):
        return LeftAlone(node, "its result is not awaited exactly once in this graph", ranks)
    source = node.args[0]
    assert isinstance(source, Node)
    ends = Site(kind, node, waits[0], group_name, rank, ranks, waits[0], 0, source, ())
    try:
        SizeNodes(node.graph).check((*shape_of(source), *shape_of(ends.wait)))
        return _BY_KIND[kind](ends)
    except (NotSeparable, UnknownSize) as reason:
        return LeftAlone(node, str(reason), ranks)


def _all_gather(ends: Site) -> Site:
    """From the side of what reads it; as rivals from the side of what makes it, along each dim."""
    padded = _gathered(ends)
    site = _without_padding(padded)
    made = replace(
        padded, kind=Kind.ALL_GATHER_OUT, value=padded.shard, shard=padded.value, peer_dim=padded.dim, alternatives=()
    )
    dims = range(len(shape_of(made.value)))
    if site.share is not None and not uneven.made_alike(
        *uneven.sizes(padded.value, padded.dim, site.value), padded.ranks
    ):
        dims = range(0)
    return replace(
        site,
        alternatives=tuple(map(_without_padding, padded.alternatives)),
        rivals=tuple(replace(made, dim=dim) for dim in dims),
    )


def _without_padding(site: Site) -> Site:
    """The site of a gathered tensor from which its only reader takes padding off, if that is what it does."""
    value = uneven.read_without_padding(site.value, site.dim)
    inside = {*site.glue, site.value}
    if value is None or any(user not in inside for block, _ in site.blocks for user in block.users):
        return site
    padded, kept = uneven.sizes(site.value, site.dim, value)
    share = padded // site.ranks
    if kept <= share:
        return site  # only one rank has any
    mine = max(0, min(share, kept - site.rank * share))
    shard, padding = uneven.shard_without_padding(site.shard, site.dim, mine)
    return replace(
        site, value=value, shard=shard, share=share, glue=tuple(sorted({*inside, *padding})), blocks=(), alternatives=()
    )


def _gathered(ends: Site) -> Site:
    """Its value is `wait` itself, or the cat of its blocks where that is all that reads it."""
    chains = [through_copies(block) for block in blocks_of(ends.wait, 0, ends.ranks) or ()]
    cats = _cats([chain[-1] for chain in chains])
    blocks = {node: rank for rank, chain in enumerate(chains) for node in chain}
    glue = {*blocks, *ends.wait.users}
    firsts = {chain[0] for chain in chains}
    splits = {user for user in ends.wait.users if user.users and set(user.users) <= firsts}
    if not cats or any(user not in firsts | splits for user in ends.wait.users):
        return ends  # something reads the gathered tensor itself, or writes it somewhere
    whole = replace(ends, glue=tuple(sorted(glue)), blocks=tuple(blocks.items()))
    along = [replace(whole, value=cat, dim=cat_dim(cat)) for cat in cats]
    return replace(along[0], alternatives=tuple(along[1:]))


def _cats(pieces: list[Node]) -> list[Node]:
    """The nodes that join exactly these, in graph order."""
    users = pieces[0].users if pieces else ()
    return sorted(user for user in users if user.target is aten.cat.default and user.args[0] == pieces)


def _reduce_scatter(ends: Site) -> Site:
    value, dim, glue = _scattered(ends.shard, ends.ranks)
    site = replace(ends, value=value, dim=dim, shard=ends.wait, glue=glue, averages=_averages(ends))
    unpadded = uneven.scattered_without_padding(value, dim, ends.ranks)
    if unpadded is None:
        return site
    value, padding = unpadded
    padded, kept = uneven.sizes(site.value, dim, value)
    share = padded // ends.ranks
    if kept <= share:
        return site  # for one rank only
    return replace(site, value=value, share=share, glue=tuple(sorted({*glue, *padding})))


def _all_reduce(ends: Site) -> Site:
    value, ranks = ends.shard, ends.ranks
    dims = divides_by_ranks(shape_of(value), range(len(shape_of(value))), ranks)
    along = [replace(ends, value=value, dim=dim, shard=ends.wait, averages=_averages(ends)) for dim in dims]
    return replace(along[0], alternatives=tuple(along[1:]))


def _averages(ends: Site) -> bool:
    reduce_op = ends.collective.args[1]
    if reduce_op not in ("sum", "avg"):
        raise NotSeparable(f"its reduce op is {reduce_op!r}: partial results are only summed")
    return reduce_op == "avg"


def _all_to_all(ends: Site) -> Site:
    """From the side on which it arrives; as an alternative from the side on which it leaves."""
    source, result = ends.shard, ends.wait
    gather_dim = shard_dim = 0
    if _is_shard_dim_alltoall(ends.collective):
        gather_dim, shard_dim = (
            dim % len(shape_of(source)) for dim in ends.collective.args[1:3] if isinstance(dim, int)
        )
    else:
        even = [quotient(shape_of(source)[0], ends.ranks)] * ends.ranks
        if any(list(map(as_size, splits)) != even for splits in ends.collective.args[1:3]):  # type: ignore[arg-type]
            raise NotSeparable("its splits are not equal, known numbers: slices have one size")
    for node, dim in ((source, shard_dim), (result, gather_dim)):
        divides_by_ranks(shape_of(node), [dim], ends.ranks)
    leaving = replace(ends, kind=Kind.ALL_TO_ALL_OUT, value=source, dim=shard_dim, shard=result, peer_dim=gather_dim)
    return replace(ends, value=result, dim=gather_dim, peer_dim=shard_dim, alternatives=(leaving,))


def _is_shard_dim_alltoall(node: Node) -> bool:
    """DTensor's all-to-all between two dims."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_dtensor"


_BY_KIND = {
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.ALL_TO_ALL: _all_to_all,
}


def _scattered(source: Node, ranks: int) -> tuple[Node, int, tuple[Node, ...]]:
    """The tensor that is scattered: `source` itself, or the one whose blocks it is the cat of."""
    if source.target is aten.cat.default and cat_dim(source) == 0:
        pieces = source.args[0]
        assert isinstance(pieces, Sequence)
        chains = [back_through_copies(piece) for piece in pieces if isinstance(piece, Node)]
        first = block_source(chains[0][-1])
        if first is not None:
            whole, dim = first
            if blocks_of(whole, dim, ranks) == [chain[-1] for chain in chains]:
                glue = {source, *(node for chain in chains for node in chain)}
                glue |= {node.args[0] for node in glue if node.target is operator.getitem}  # type: ignore[misc]
                return whole, dim, tuple(sorted(glue))
    return source, 0, ()
