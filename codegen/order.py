"""The order in which a whole-region kernel works through its slices: read off the schedule, handed over as data.

Slices are numbered as they lie in the kernel's buffers: by their place among those that the rank computes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import KernelError
from ..schedule.ir import Add, Compute, Kind, Post, Schedule


@dataclass(frozen=True)
class GatherGroup:
    """The tiles of one slice. `own_part` is its place among the rank's own slices; None: it arrives, under a flag."""

    slice: int
    own_part: int | None


@dataclass(frozen=True)
class ScatterGroup:
    """The tiles of one slice. `peer` is where the result goes; None: it stays. `adds` are the steps whose sum is added."""

    slice: int
    peer: int | None
    adds: tuple[int, ...]


def gather_order(schedule: Schedule, rank: int) -> list[GatherGroup]:
    """Own slices first, then the others as they arrive. Raises KernelError where slices do not arrive."""
    if not schedule.kind.arrives_first:
        raise KernelError.wrong("schedule", "slices that arrive", schedule.kind)
    position = {slice_: i for i, slice_ in enumerate(schedule.computed_by(rank))}
    own = [slice_ for slice_ in position if schedule.owner(slice_) == rank]
    return [
        GatherGroup(position[action.slice], own.index(action.slice) if action.slice in own else None)
        for action in schedule.program(rank)
        if isinstance(action, Compute)
    ]


def scatter_order(schedule: Schedule, rank: int) -> list[ScatterGroup]:
    """Peers' slices first, own slices last, each with what is added to it before it goes.

    Raises KernelError where results do not leave, or come back (all-reduce).
    """
    if schedule.kind not in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL_OUT):
        raise KernelError.wrong("schedule", "results that leave", schedule.kind)
    program = schedule.program(rank)
    position = {slice_: i for i, slice_ in enumerate(schedule.computed_by(rank))}
    sent = {action.send.slice: action.send.peer for action in program if isinstance(action, Post) and action.send}
    return [
        ScatterGroup(
            position[action.slice],
            sent.get(action.slice),
            tuple(add.step for add in program if isinstance(add, Add) and add.slice == action.slice),
        )
        for action in program
        if isinstance(action, Compute)
    ]
