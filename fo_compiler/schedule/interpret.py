"""Run a schedule on real tensors, all ranks in one process: the oracle of the property tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from .execute import World
from .ir import Kind, Schedule

T = TypeVar("T")


def interpret_all_gather(
    schedule: Schedule, shards: Sequence[Sequence[Tensor]], body: Callable[[int, Tensor], Tensor]
) -> list[list[Tensor]]:
    """Gather `shards[rank][part]` under `body(rank, slice)`.

    Returns for each rank the results of the body on all `N * m` slices, in the order of the slices.
    """
    assert schedule.kind is Kind.ALL_GATHER
    m = schedule.slices_per_rank

    def compute(rank: int, slice_: int, value: Tensor | None) -> Tensor:
        assert value is not None
        return body(rank, value)

    world: World[Tensor] = World(
        schedule, compute, add=lambda a, b: a + b, own=lambda slice_: shards[slice_ // m][slice_ % m]
    )
    return [[state.computed[s] for s in range(schedule.slices)] for state in world.run()]


def interpret_reduce_scatter(schedule: Schedule, partial: Callable[[int, int], Tensor]) -> list[list[Tensor]]:
    """Sum `partial(rank, slice)` over the ranks. Returns for each rank the sums of the `m` slices that it owns."""
    assert schedule.kind is Kind.REDUCE_SCATTER
    world: World[Tensor] = World(
        schedule, lambda rank, slice_, _: partial(rank, slice_), add=lambda a, b: a + b
    )
    return [[state.sums[s] for s in schedule.owned_by(state.rank)] for state in world.run()]
