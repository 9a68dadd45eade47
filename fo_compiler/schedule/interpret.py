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
    world: World[Tensor] = World(schedule, lambda rank, slice_, _: partial(rank, slice_), add=lambda a, b: a + b)
    return [[state.sums[s] for s in schedule.owned_by(state.rank)] for state in world.run()]


def interpret_all_gather_out(schedule: Schedule, body: Callable[[int], Tensor]) -> list[list[Tensor]]:
    """Gather the results of `body(slice)`. Returns for each rank all `N * m` of them, in the order of the slices."""
    assert schedule.kind is Kind.ALL_GATHER_OUT
    world: World[Tensor] = World(schedule, lambda rank, slice_, _: body(slice_), add=lambda a, b: a + b)
    return [[state.ready[s] for s in schedule.arriving_at(state.rank)] for state in world.run()]


def interpret_chain(
    schedule: Schedule, shards: Sequence[Sequence[Tensor]], body: Callable[[int, Tensor], Tensor]
) -> list[list[Tensor]]:
    """Gather `shards[rank][part]` under `body(rank, slice)`, and sum its results over the ranks.

    Returns for each rank the sums of the `m` slices that it owns.
    """
    assert schedule.kind is Kind.CHAIN
    m = schedule.slices_per_rank

    def compute(rank: int, slice_: int, value: Tensor | None) -> Tensor:
        assert value is not None
        return body(rank, value)

    world: World[Tensor] = World(
        schedule, compute, add=lambda a, b: a + b, own=lambda slice_: shards[slice_ // m][slice_ % m]
    )
    return [[state.sums[s] for s in schedule.owned_by(state.rank)] for state in world.run()]


def interpret_all_reduce(schedule: Schedule, partial: Callable[[int, int], Tensor]) -> list[list[Tensor]]:
    """Sum `partial(rank, slice)` over the ranks. Returns for each rank the sums of all `N * m` slices."""
    assert schedule.kind is Kind.ALL_REDUCE
    world: World[Tensor] = World(schedule, lambda rank, slice_, _: partial(rank, slice_), add=lambda a, b: a + b)
    return [[state.sums[s] for s in range(schedule.slices)] for state in world.run()]


def interpret_all_to_all(
    schedule: Schedule, blocks: Sequence[Sequence[Sequence[Tensor]]], body: Callable[[int, Tensor], Tensor]
) -> list[list[Tensor]]:
    """Send `blocks[source][destination][part]` to its destination, either before `body(rank, slice)` or after it.

    Returns for each rank the results on the blocks that were for it, by source and part.
    """
    assert schedule.kind.is_all_to_all
    m = schedule.slices_per_rank

    def block(slice_: int) -> Tensor:
        group, part = divmod(slice_, m)
        return blocks[group // schedule.ranks][group % schedule.ranks][part]

    world: World[Tensor] = World(
        schedule,
        lambda rank, slice_, value: body(rank, block(slice_) if value is None else value),
        add=lambda a, b: a + b,
        own=block,
    )
    states = world.run()
    first = schedule.kind.arrives_first
    return [
        [(state.computed if first else state.ready)[s] for s in schedule.destined_to(state.rank)] for state in states
    ]
