"""Run all programs of a schedule in one process, round-robin, with first-in-first-out links between the ranks.

This is the semantics of a schedule. `verify` runs it on symbols, `interpret` on tensors; both see the same rules:
a `Post` reads what it sends at once, the k-th send from a to b meets the k-th receive of b from a, a `Wait` blocks
until the step's transfers are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ..errors import ScheduleError
from .ir import Action, Add, Compute, Post, Schedule, Store, Wait

V = TypeVar("V")


class RankState(Generic[V]):
    """What one rank holds while its program runs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.position = 0  # of the next action
        self.ready: dict[int, V] = {}  # what travels unchanged: slices that may be read, by slice
        self.computed: dict[int, V] = {}  # results of the body, by slice
        self.sums: dict[int, V] = {}  # what is reduced: running sums, by slice
        self.in_flight: dict[int, tuple[Post, int]] = {}  # step -> (its post, its turn on the incoming link)
        self.awaited: set[int] = set()  # steps
        # step -> first slice and received sums of them, until they are added or stored
        self.inbox: dict[int, tuple[int, list[V]]] = {}


class World(Generic[V]):
    """All ranks of a schedule in one process.

    `compute(rank, slice, value)` runs the region's body: `value` is the slice where slices arrive first, and None where
    the body makes what is sent. `add(a, b)` adds two partial sums. `own(slice)` is what its owner holds at the start.
    """

    def __init__(
        self,
        schedule: Schedule,
        compute: Callable[[int, int, V | None], V],
        add: Callable[[V, V], V],
        own: Callable[[int], V] | None = None,
    ) -> None:
        self.schedule = schedule
        self.compute = compute
        self.add = add
        self.programs = [schedule.program(rank) for rank in range(schedule.ranks)]
        self.states: list[RankState[V]] = [RankState(rank) for rank in range(schedule.ranks)]
        # (source, destination) -> everything sent on that link (first slice, values), and how many receives were posted on it
        self.sent: dict[tuple[int, int], list[tuple[int, list[V]]]] = defaultdict(list)
        self.receives: dict[tuple[int, int], int] = defaultdict(int)
        if schedule.kind.arrives_first:
            assert own is not None, "a gather or an all-to-all starts from the slices that each rank owns"
            for state in self.states:
                state.ready = {s: own(s) for s in schedule.owned_by(state.rank)}

    def fail(self, state: RankState[V], action: Action, what: str) -> ScheduleError:
        s = self.schedule
        return ScheduleError(
            f"{s.kind} schedule {s.describe()!r} of {s.ranks} ranks: rank {state.rank}, "
            f"action {state.position} {action}: {what}"
        )

    def run(self) -> list[RankState[V]]:
        """Run to the end. Raises ScheduleError with the first offending action."""
        progress = True
        while progress:
            progress = False
            for state, program in zip(self.states, self.programs, strict=True):
                while state.position < len(program) and self._step(state, program[state.position]):
                    state.position += 1
                    progress = True
        for state, program in zip(self.states, self.programs, strict=True):
            if state.position < len(program):
                raise self.fail(state, program[state.position], "waits forever (a cyclic wait or a missing send)")
        return self.states

    def _step(self, state: RankState[V], action: Action) -> bool:
        """Perform one action; False when it has to wait for another rank."""
        match action:
            case Compute(first, _, count):
                for slice_ in range(first, first + count):
                    self._compute(state, action, slice_)
            case Post():
                self._post(state, action)
            case Wait(step):
                return self._wait(state, action, step)
            case Add():
                for slice_, value in self._received(state, action):
                    self._accumulate(state, slice_, value)
            case Store():
                state.sums.update(self._received(state, action))
        return True

    def _received(self, state: RankState[V], action: Add | Store) -> Iterator[tuple[int, V]]:
        first, values = state.inbox.pop(action.step, (-1, []))
        if first != action.slice or len(values) != action.count:
            raise self.fail(state, action, "takes what this step did not receive, or takes it twice")
        return zip(range(first, first + action.count), values, strict=True)

    def _compute(self, state: RankState[V], action: Action, slice_: int) -> None:
        if slice_ in state.computed:
            raise self.fail(state, action, "computes the slice a second time")
        kind = self.schedule.kind
        if kind.arrives_first and slice_ not in state.ready:
            raise self.fail(state, action, "computes a slice that has not been awaited")
        made = self.compute(state.rank, slice_, state.ready[slice_] if kind.arrives_first else None)
        state.computed[slice_] = made
        if kind.reduces:
            self._accumulate(state, slice_, made)
        elif not kind.arrives_first:
            state.ready[slice_] = made

    def _accumulate(self, state: RankState[V], slice_: int, value: V) -> None:
        state.sums[slice_] = self.add(state.sums[slice_], value) if slice_ in state.sums else value

    def _post(self, state: RankState[V], action: Post) -> None:
        if action.step in state.in_flight or action.step in state.awaited:
            raise self.fail(state, action, "posts the same step twice")
        turn = -1
        if action.send is not None:
            held = state.sums if self.schedule.carries_sums(action) else state.ready
            slices = range(action.send.slice, action.send.slice + action.send.count)
            if not all(slice_ in held for slice_ in slices):
                raise self.fail(state, action, "sends a slice that it does not hold")
            self.sent[state.rank, action.send.peer].append((slices[0], [held[slice_] for slice_ in slices]))
        if action.recv is not None:
            turn = self.receives[action.recv.peer, state.rank]
            self.receives[action.recv.peer, state.rank] += 1
        state.in_flight[action.step] = (action, turn)

    def _wait(self, state: RankState[V], action: Action, step: int) -> bool:
        if step not in state.in_flight:
            raise self.fail(state, action, "waits for a step that was not posted, or waits twice")
        post, turn = state.in_flight[step]
        if post.recv is not None:
            arrived = self.sent[post.recv.peer, state.rank]
            if len(arrived) <= turn:
                return False
            first, values = arrived[turn]
            if (first, len(values)) != (post.recv.slice, post.recv.count):
                what = f"slice {first}" if len(values) == 1 else f"slices {first} to {first + len(values) - 1}"
                raise self.fail(state, post, f"gets {what} from rank {post.recv.peer}, not what is expected")
            if self.schedule.carries_sums(post):
                state.inbox[step] = (first, values)
            else:
                state.ready.update(zip(range(first, first + len(values)), values, strict=True))
        del state.in_flight[step]
        state.awaited.add(step)
        return True
