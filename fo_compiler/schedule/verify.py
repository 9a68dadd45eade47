"""Check a schedule: what a rewrite relies on, checked before a graph is touched."""

from __future__ import annotations

from collections import Counter

from ..errors import ScheduleError
from .execute import RankState, World
from .ir import Kind, Schedule


def verify(schedule: Schedule) -> None:
    """Raise ScheduleError with the offending action, or return.

    Holds afterwards: every rank computes every slice exactly once, and none before it arrived; every send meets one
    receive of the same slice, in the order of the link; every transfer is awaited exactly once, before what it
    brought is read; nothing waits in a cycle; and who is to hold a result holds it at the end, a sum with the part of
    every rank exactly once.
    """
    # A value is the multiset of (rank, slice) contributions it is made of.
    world: World[tuple[tuple[int, int], ...]] = World(
        schedule,
        compute=lambda rank, slice_, value: ((rank, slice_),) if schedule.kind.reduces or value is None else value,
        add=lambda a, b: a + b,
        own=lambda slice_: ((schedule.owner(slice_), slice_),),
    )
    for state in world.run():
        _check_rank(schedule, state)
    for (source, destination), messages in world.sent.items():
        received = world.receives[source, destination]
        if len(messages) != received:
            raise ScheduleError(
                f"{schedule.kind} schedule {schedule.describe()!r}: rank {source} sends {len(messages)} slices "
                f"to rank {destination}, which receives {received}"
            )


def _check_rank(schedule: Schedule, state: RankState[tuple[tuple[int, int], ...]]) -> None:
    def fail(what: str) -> ScheduleError:
        return ScheduleError(
            f"{schedule.kind} schedule {schedule.describe()!r} of {schedule.ranks} ranks: rank {state.rank} {what}"
        )

    expected = set(schedule.computed_by(state.rank))
    if missing := expected - state.computed.keys():
        raise fail(f"never computes slices {sorted(missing)}")
    if foreign := state.computed.keys() - expected:
        raise fail(f"computes slices {sorted(foreign)} that are not its to compute")
    if state.in_flight:
        raise fail(f"never waits for steps {sorted(state.in_flight)}")
    if state.inbox:
        raise fail(f"never adds or stores what it received in steps {sorted(state.inbox)}")
    if not schedule.kind.reduces and not schedule.kind.arrives_first:
        absent = [s for s in schedule.arriving_at(state.rank) if s not in state.ready]
        if absent:
            raise fail(f"ends without slices {absent}, which were for it")
    if not schedule.kind.reduces:
        return
    whole = schedule.kind is Kind.ALL_REDUCE
    for slice_ in range(schedule.slices) if whole else schedule.owned_by(state.rank):
        contributions = Counter(state.sums[slice_])
        if contributions != Counter((rank, slice_) for rank in range(schedule.ranks)):
            raise fail(f"ends with the contributions {dict(contributions)} for slice {slice_}, not one of each rank")
