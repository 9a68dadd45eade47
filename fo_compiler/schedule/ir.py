"""The schedule of a region, as data: for each rank the actions that it performs, in order.

A region is cut into `N * m` slices: `N` ranks in the group, `m` slices a rank. Slice `owner * m + part` is *owned*
by one rank:

- `ALL_GATHER`: the owner holds the slice at the start; every rank computes every slice.
- `REDUCE_SCATTER`: every rank computes a partial sum of every slice; the owner holds the full sum at the end.

Source: arXiv 2604.24013, section 3; notation as in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Kind(str, Enum):
    """What the region's collective does."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"

    def __str__(self) -> str:
        return self.value


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


@dataclass(frozen=True)
class Recv:
    """Receive `slice` from rank `peer`: the slice itself (gather) or the peer's running sum of it (reduce-scatter)."""

    slice: int
    peer: int


@dataclass(frozen=True)
class Compute:
    """Run the region's body on `slice`. In a reduce-scatter the result joins the running sum of the slice."""

    slice: int
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class Post:
    """Start the transfers of one step together, without waiting. `step` numbers the posts of a rank."""

    step: int
    send: Send | None
    recv: Recv | None
    stream: Stream = Stream.COMM


@dataclass(frozen=True)
class Wait:
    """Wait until both transfers of the `Post` with the same `step` are done."""

    step: int
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class Add:
    """Add what `Post` `step` received to this rank's running sum of `slice` (reduce-scatter only)."""

    slice: int
    step: int
    stream: Stream = Stream.COMPUTE


Action = Compute | Post | Wait | Add
Program = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """Programs of all ranks of a group.

    A *uniform* family gives `relative` alone: the program of rank 0, from which rank r's follows by adding r to every
    peer and every slice owner, modulo `ranks`. Any other schedule gives `programs`, one a rank.
    """

    kind: Kind
    family: str
    ranks: int
    slices_per_rank: int
    relative: Program | None = None
    programs: tuple[Program, ...] = ()

    @property
    def slices(self) -> int:
        """Number of slices in all, `N * m`."""
        return self.ranks * self.slices_per_rank

    @property
    def is_uniform(self) -> bool:
        return self.relative is not None

    def owner(self, slice_: int) -> int:
        return slice_ // self.slices_per_rank

    def owned_by(self, rank: int) -> range:
        """The slices that `rank` owns, in the order of their parts."""
        return range(rank * self.slices_per_rank, (rank + 1) * self.slices_per_rank)

    def program(self, rank: int) -> Program:
        """The actions of `rank`, with ranks and slices absolute."""
        if self.relative is None:
            return self.programs[rank]
        return tuple(self._shifted(action, rank) for action in self.relative)

    def _shifted(self, action: Action, rank: int) -> Action:
        def slice_(s: int) -> int:
            return (s + rank * self.slices_per_rank) % self.slices

        def peer(p: int) -> int:
            return (p + rank) % self.ranks

        match action:
            case Compute() | Add():
                return replace(action, slice=slice_(action.slice))
            case Post(_, send, recv):
                return replace(
                    action,
                    send=send and Send(slice_(send.slice), peer(send.peer)),
                    recv=recv and Recv(slice_(recv.slice), peer(recv.peer)),
                )
            case Wait():
                return action

    def describe(self) -> str:
        """Short name for records: `ring` or, with several slices a rank, `ring x4`."""
        return self.family if self.slices_per_rank == 1 else f"{self.family} x{self.slices_per_rank}"


def posts(program: Sequence[Action]) -> list[Post]:
    return [action for action in program if isinstance(action, Post)]
