"""The protocols of the flags, as small models: every interleaving of small groups is visited.

A model is a set of actors, each a list of steps; a step is (guard, effect) on a shared state. `explore` runs every order in which
the guards allow the steps, and fails on a state in which nobody can go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

State = dict[Any, int]
Step = tuple[Callable[[State], bool], Callable[[State], None]]
TORN = -1


class Race(AssertionError):
    """Something was read that is not what the step needs."""


class Stuck(AssertionError):
    """Nobody can go on, and not all are done."""


def explore(actors: list[list[Step]], state: State) -> int:
    """Visit every reachable state; the number of them. Raises Race or Stuck."""
    start = (tuple(0 for _ in actors), tuple(sorted(state.items())))
    seen, todo = {start}, [start]
    while todo:
        counters, items = todo.pop()
        moved = False
        for i, steps in enumerate(actors):
            if counters[i] == len(steps):
                continue
            guard, effect = steps[counters[i]]
            now = dict(items)
            if not guard(now):
                continue
            moved = True
            effect(now)
            after = ((*counters[:i], counters[i] + 1, *counters[i + 1 :]), tuple(sorted(now.items())))
            if after not in seen:
                seen.add(after)
                todo.append(after)
        if not moved and any(c < len(steps) for c, steps in zip(counters, actors, strict=True)):
            raise Stuck(counters)
    return len(seen)


def always(_: State) -> bool:
    return True


def store(name: Any, value: int) -> Step:
    return always, lambda state: state.__setitem__(name, value)


def wait(name: Any, value: int) -> Step:
    return lambda state: state[name] >= value, lambda _: None


def read(name: Any, value: int) -> Step:
    def effect(state: State) -> None:
        if state[name] != value:
            raise Race(f"{name} holds {state[name]}, the step needs {value}")

    return always, effect


@dataclass(frozen=True)
class Gather:
    """All-gathers of some steps, one after the other: each rank sends its slice to all others, then raises their flags.

    A rank has two actors. Its kernel, in step e, waits for each peer's flag and reads the slice twice (by an early and a late
    tile). Its transport starts step e when the kernel of step e - 1 has ended (x of step e is computed from it), and writes in
    two parts.
    """

    ranks: int
    steps: int
    buffers: int
    flag_first: bool = False

    def run(self) -> int:
        state: State = {}
        actors: list[list[Step]] = []
        peers = {r: [(r + i) % self.ranks for i in range(1, self.ranks)] for r in range(self.ranks)}
        for rank in range(self.ranks):
            state["done", rank] = 0
            kernel, transport = [], []
            for peer in peers[rank]:
                state["flag", rank, peer] = 0
                for buffer in range(self.buffers):
                    state["slice", rank, peer, buffer] = 0
            for epoch in range(1, self.steps + 1):
                buffer = epoch % self.buffers
                for peer in reversed(peers[rank]):
                    kernel += [wait(("flag", rank, peer), epoch), *[read(("slice", rank, peer, buffer), epoch)] * 2]
                kernel.append(store(("done", rank), epoch))
                transport.append(wait(("done", rank), epoch - 1))
                for peer in peers[rank]:
                    data = [store(("slice", peer, rank, buffer), TORN), store(("slice", peer, rank, buffer), epoch)]
                    flag = [store(("flag", peer, rank), epoch)]
                    transport += flag + data if self.flag_first else data + flag
            actors += [kernel, transport]
        return explore(actors, state)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 3), (2, 6), pytest.param(3, 3, marks=pytest.mark.nightly)])
def test_two_buffers_in_turn_need_no_acknowledgement(ranks: int, steps: int) -> None:
    assert Gather(ranks, steps, buffers=2).run() > 100


def test_one_buffer_is_written_while_the_step_before_reads_it() -> None:
    with pytest.raises(Race, match="holds"):
        Gather(2, 2, buffers=1).run()


def test_a_flag_before_its_data_lets_the_kernel_read_too_early() -> None:
    with pytest.raises(Race, match="holds"):
        Gather(2, 1, buffers=2, flag_first=True).run()


def count_tiles(programs: int, tiles: int, slices: int, launches: int, *, count_first: bool = False) -> int:
    """The tile counter of matmul_reduce_scatter: programs store tiles, count them, and the last one raises the flag.

    `count_first` is the mistake of a kernel that lacks the barrier between its stores and its count.
    """
    state: State = {("left", launch): programs for launch in range(launches)}
    actors: list[list[Step]] = []
    for s in range(slices):
        state |= {("counter", s): 0, ("flag", s): 0} | {("tile", s, t): 0 for t in range(tiles)}

    def count(p: int, s: int, epoch: int) -> list[Step]:
        def raise_if_last(now: State) -> None:
            if now["saw", p] == tiles - 1:
                if any(now["tile", s, t] != epoch for t in range(tiles)):
                    raise Race(f"flag of slice {s} raised before its tiles were stored")
                if now["flag", s] == epoch:
                    raise Race(f"flag of slice {s} raised twice")
                now["flag", s], now["counter", s] = epoch, 0

        def add(now: State) -> None:
            now["saw", p] = now["counter", s]
            now["counter", s] += 1

        return [(always, add), (always, raise_if_last)]

    for p in range(programs):
        state["saw", p] = -1
        steps: list[Step] = []
        for launch in range(launches):
            if launch:  # kernels of one stream follow each other
                steps.append((lambda now, before=launch - 1: now["left", before] == 0, lambda _: None))  # type: ignore[misc]
            for index in range(p, slices * tiles, programs):
                s, t = divmod(index, tiles)
                stored = [store(("tile", s, t), launch + 1)]
                steps += count(p, s, launch + 1) + stored if count_first else stored + count(p, s, launch + 1)

            def leave(now: State, launch: int = launch) -> None:
                now["left", launch] -= 1
                if now["left", launch] == 0 and any(
                    now["counter", s] or now["flag", s] != launch + 1 for s in range(slices)
                ):
                    raise Race("a slice was not counted to the end")

            steps.append((always, leave))
        actors.append(steps)
    return explore(actors, state)


@pytest.mark.parametrize(
    ("programs", "tiles", "slices", "launches"), [(2, 2, 2, 2), (3, 2, 2, 1), (2, 3, 2, 2), (3, 4, 1, 1)]
)
def test_the_last_tile_raises_the_flag_once_and_leaves_the_counter_at_zero(
    programs: int, tiles: int, slices: int, launches: int
) -> None:
    assert count_tiles(programs, tiles, slices, launches) > 20


def test_a_tile_that_is_counted_before_it_is_stored_leaves_without_it() -> None:
    with pytest.raises(Race, match="raised before its tiles were stored"):
        count_tiles(2, 2, 1, 1, count_first=True)


@pytest.mark.parametrize("order", ["own last", "own first"])
def test_rings_of_whole_region_kernels_wait_for_what_the_peer_computes_earlier(order: str) -> None:
    """Rank r adds what came from r - 1 to each slice, in the order of the schedule; the other way round everybody waits."""
    ranks = 3
    state: State = {("flag", r, s): 0 for r in range(ranks) for s in range(ranks)}
    actors: list[list[Step]] = []
    for rank in range(ranks):
        slices = [(rank - 1 - i) % ranks for i in range(ranks)]
        steps: list[Step] = []
        for s in slices if order == "own last" else slices[::-1]:
            if s != (rank - 1) % ranks:  # the first slice of the ring has nothing to add
                steps.append(wait(("flag", rank, s), 1))
            if s != rank:
                steps.append(store(("flag", (rank + 1) % ranks, s), 1))
        actors.append(steps)
    if order == "own last":
        assert explore(actors, state) > 1
    else:
        with pytest.raises(Stuck):
            explore(actors, state)
