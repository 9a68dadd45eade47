"""The schedule of a region, as data: for each rank the actions that it performs, in order.

A region is cut into slices: `N` ranks in the group, `m` slices a rank (`slices_per_rank`).

For three kinds slice `owner * m + part` is *owned* by one rank, and every rank computes every slice:

- `ALL_GATHER`: the owner holds the slice at the start.
- `REDUCE_SCATTER`: every rank computes a partial sum; the owner holds the full sum at the end.
- `ALL_REDUCE`: likewise, and in the end every rank holds every full sum. The owner is where a sum is finished.
- `CHAIN`: an all-gather and a reduce-scatter of the same slices. The owner holds a slice at the start, every rank
  computes a partial sum from it, and the owner holds the full sum at the end.

In an `ALL_GATHER_OUT` a rank computes the slices that it owns alone, and in the end every rank holds all of them.

For an all-to-all slice `(source * N + destination) * m + part` goes from one rank to one other:

- `ALL_TO_ALL`: the source holds it at the start, the destination computes it.
- `ALL_TO_ALL_OUT`: the source computes it, the destination holds the result at the end.

Neighbouring slices of one block may travel, or be computed, as one piece: `count` says how many. Their number is then
that of the first.

Source: arXiv 2604.24013, section 3; notation as in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar


class Kind(str, Enum):
    """What the region's collective does."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_OUT = "all_to_all_out"
    ALL_GATHER_OUT = "all_gather_out"
    CHAIN = "chain"

    @property
    def reduces(self) -> bool:
        """Whether partial sums travel (else slices, unchanged; in a chain both do)."""
        return self in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.CHAIN)

    @property
    def is_all_to_all(self) -> bool:
        return self in (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_OUT)

    @property
    def collective(self) -> Kind:
        """The collective that runs where the region is left alone: one that is seen from two sides has one name."""
        return _OTHER_SIDE.get(self, self)

    @property
    def collectives(self) -> tuple[Kind, ...]:
        """The collectives that run where the region is left alone."""
        return (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) if self is Kind.CHAIN else (self.collective,)

    def blocks(self, ranks: int) -> int:
        """In how many blocks of `m` slices each a rank's body is cut: one for each rank, or its own alone."""
        return 1 if self is Kind.ALL_GATHER_OUT else ranks

    @property
    def fewest_slices(self) -> int:
        """The fewest slices a rank that hide anything: a rank that only makes its own has nothing to do beside one."""
        return 2 if self is Kind.ALL_GATHER_OUT else 1

    @property
    def arrives_first(self) -> bool:
        """Whether the body computes on what arrives (else it only makes what leaves)."""
        return self in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.CHAIN)

    def __str__(self) -> str:
        return self.value


_OTHER_SIDE = {Kind.ALL_TO_ALL_OUT: Kind.ALL_TO_ALL, Kind.ALL_GATHER_OUT: Kind.ALL_GATHER}

# The kinds that are one collective.
COLLECTIVES = tuple(kind for kind in Kind if kind is not Kind.CHAIN)


class Stream(str, Enum):
    """Where an action runs on a device with streams."""

    COMPUTE = "compute"
    COMM = "comm"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Send:
    """Send `slice` to rank `peer`: the slice itself (gather) or this rank's running sum of it (reduce-scatter)."""

    slice: int
    peer: int
    count: int = 1


@dataclass(frozen=True)
class Recv:
    """Receive `slice` from rank `peer`: the slice itself (gather) or the peer's running sum of it (reduce-scatter)."""

    slice: int
    peer: int
    count: int = 1


@dataclass(frozen=True)
class Compute:
    """Run the region's body on `slice`. In a reduce-scatter the result joins the running sum of the slice."""

    slice: int
    stream: Stream = Stream.COMPUTE
    count: int = 1


@dataclass(frozen=True)
class Post:
    """Start the transfers of one step together, without waiting. `step` numbers the posts of a rank.

    In a chain `sums` says that running sums travel, on their way to the owner, and not slices that the body computes on.
    """

    step: int
    send: Send | None
    recv: Recv | None
    stream: Stream = Stream.COMM
    sums: bool = False


@dataclass(frozen=True)
class Wait:
    """Wait until both transfers of the `Post` with the same `step` are done."""

    step: int
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class Add:
    """Add what `Post` `step` received to this rank's running sum of `slice` (kinds that reduce)."""

    slice: int
    step: int
    stream: Stream = Stream.COMPUTE
    count: int = 1


@dataclass(frozen=True)
class Store:
    """Take what `Post` `step` received as the finished sum of `slice`, in place of the own part (all-reduce only)."""

    slice: int
    step: int
    stream: Stream = Stream.COMPUTE
    count: int = 1


Action = Compute | Post | Wait | Add | Store
End = TypeVar("End", Send, Recv)
Program = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """Programs of all ranks of a group.

    A *uniform* family gives `relative` alone: the program of rank 0, from which rank r's follows by adding r to every
    peer and every slice owner, modulo `ranks`; with `ranks_per_node` set, node and rank in the node are added each by itself.
    Any other schedule gives `programs`, one a rank.
    """

    kind: Kind
    family: str
    ranks: int
    slices_per_rank: int
    relative: Program | None = None
    programs: tuple[Program, ...] = ()
    ranks_per_node: int | None = None

    @property
    def slices(self) -> int:
        """Number of slices in all: `N * m`, or `N * N * m` in an all-to-all."""
        return self.ranks * self.slices_per_rank * (self.ranks if self.kind.is_all_to_all else 1)

    @property
    def is_uniform(self) -> bool:
        return self.relative is not None

    def owner(self, slice_: int) -> int:
        """The owner of a slice; in an all-to-all its source."""
        return slice_ // (self.slices // self.ranks)

    def destination(self, slice_: int) -> int:
        """Where a slice of an all-to-all goes."""
        assert self.kind.is_all_to_all
        return slice_ // self.slices_per_rank % self.ranks

    def owned_by(self, rank: int) -> range:
        """The slices that `rank` owns, in the order of their parts; in an all-to-all those that it is the source of."""
        count = self.slices // self.ranks
        return range(rank * count, (rank + 1) * count)

    def destined_to(self, rank: int) -> list[int]:
        """The slices of an all-to-all that go to `rank`, by source and part."""
        return [s for s in range(self.slices) if self.destination(s) == rank]

    def computed_by(self, rank: int) -> Sequence[int]:
        """The slices on which `rank` runs the body: `N * m`, or `m` where it only makes its own."""
        if self.kind is Kind.ALL_TO_ALL:
            return self.destined_to(rank)
        return self.owned_by(rank) if self.kind in _OTHER_SIDE else range(self.slices)

    def arriving_at(self, rank: int) -> Sequence[int]:
        """The slices that `rank` holds in the end where results leave unchanged."""
        return self.destined_to(rank) if self.kind.is_all_to_all else range(self.slices)

    def carries_sums(self, post: Post) -> bool:
        """Whether running sums travel in `post` (else slices, unchanged)."""
        return post.sums if self.kind is Kind.CHAIN else self.kind.reduces

    def slice_name(self, slice_: int, rank: int | None = None, count: int = 1) -> str:
        """`owner` or `owner.part`, in an all-to-all `source>destination`; with a `*` where `rank` is the owner.

        Several in one piece are `owner.first-last`, or `owner` where they are all that there are.
        """
        group, part = divmod(slice_, self.slices_per_rank)
        name = f"{group // self.ranks}>{group % self.ranks}" if self.kind.is_all_to_all else str(group)
        mark = "*" if rank is not None and self.owner(slice_) == rank else ""
        if count < self.slices_per_rank:
            name += f".{part}" if count == 1 else f".{part}-{part + count - 1}"
        return name + mark

    def program(self, rank: int) -> Program:
        """The actions of `rank`, with ranks and slices absolute."""
        if self.relative is None:
            return self.programs[rank]
        return tuple(self._shifted(action, rank) for action in self.relative)

    def shifted_rank(self, rank: int, by: int) -> int:
        """The rank that is to rank `by` what `rank` is to rank 0."""
        k = self.ranks_per_node
        if k is None:
            return (rank + by) % self.ranks
        return (rank // k + by // k) % (self.ranks // k) * k + (rank + by) % k

    def shifted_slice(self, slice_: int, by: int) -> int:
        """The slice that is to rank `by` what `slice_` is to rank 0."""
        group, part = divmod(slice_, self.slices_per_rank)
        if not self.kind.is_all_to_all:
            return self.shifted_rank(group, by) * self.slices_per_rank + part
        source, destination = divmod(group, self.ranks)
        source, destination = self.shifted_rank(source, by), self.shifted_rank(destination, by)
        return (source * self.ranks + destination) * self.slices_per_rank + part

    def _shifted(self, action: Action, by: int) -> Action:
        match action:
            case Compute() | Add() | Store():
                return replace(action, slice=self.shifted_slice(action.slice, by))
            case Post(_, send, recv):
                return replace(
                    action,
                    send=send and self._shifted_end(send, by),
                    recv=recv and self._shifted_end(recv, by),
                )
            case Wait():
                return action

    def _shifted_end(self, end: End, by: int) -> End:
        return replace(end, slice=self.shifted_slice(end.slice, by), peer=self.shifted_rank(end.peer, by))

    def describe(self) -> str:
        """Short name for records: `ring`; with several slices a rank `ring x4`, and in pieces `tapered (20+12 14+10+8)/32`."""
        family = f"chain {self.family}" if self.kind is Kind.CHAIN else self.family
        m = self.slices_per_rank
        pieces = self._pieces()
        if any(1 < size < m for of_block in pieces for size in of_block):
            return f"{family} ({' '.join('+'.join(map(str, of_block)) for of_block in pieces)})/{m}"
        return family if m == 1 else f"{family} x{m}"

    def _pieces(self) -> list[list[int]]:
        """The slices in each piece that rank 0 computes, by block but for its own, in the order of their computes."""
        blocks: dict[int, list[int]] = {}
        for action in self.programs[0] if self.relative is None else self.relative:
            if isinstance(action, Compute) and action.slice >= self.slices_per_rank:
                blocks.setdefault(action.slice // self.slices_per_rank, []).append(action.count)
        return list(blocks.values())


def posts(program: Sequence[Action]) -> list[Post]:
    return [action for action in program if isinstance(action, Post)]
