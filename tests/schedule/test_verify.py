"""The verifier accepts every family and names the offending action of every kind of broken schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.errors import ScheduleError
from fo_compiler.schedule import (
    FAMILIES,
    TWO_LEVEL,
    Action,
    Add,
    Compute,
    Kind,
    Post,
    Recv,
    Schedule,
    Send,
    Store,
    Wait,
    build,
    verify,
)

FAMILY_OF_KIND = [(kind, family) for kind, families in FAMILIES.items() for family in families]
GATHER = build(Kind.ALL_GATHER, "ring", 4)
SCATTER = build(Kind.REDUCE_SCATTER, "ring", 4)
REDUCE = build(Kind.ALL_REDUCE, "ring", 4)
EXCHANGE = build(Kind.ALL_TO_ALL, "direct", 4)
GATHER_OUT = build(Kind.ALL_GATHER_OUT, "ring", 4, 2)
EXCHANGE_OUT = build(Kind.ALL_TO_ALL_OUT, "direct", 4)

Edit = Callable[[list[Action]], None]


def broken(schedule: Schedule, edit: Edit, rank: int = 1) -> Schedule:
    """The schedule with the program of one rank edited in place."""
    programs = [list(schedule.program(r)) for r in range(schedule.ranks)]
    edit(programs[rank])
    return replace(schedule, relative=None, programs=tuple(map(tuple, programs)))


def find(program: list[Action], what: type, nth: int = 0) -> int:
    return [i for i, action in enumerate(program) if isinstance(action, what)][nth]


def change_post(nth: int, **changes: object) -> Edit:
    def edit(program: list[Action]) -> None:
        i = find(program, Post, nth)
        post = program[i]
        assert isinstance(post, Post)
        program[i] = replace(post, **changes)  # type: ignore[arg-type]

    return edit


def drop(what: type, nth: int = 0) -> Edit:
    def edit(program: list[Action]) -> None:
        del program[find(program, what, nth)]

    return edit


def double(what: type, nth: int = 0) -> Edit:
    def edit(program: list[Action]) -> None:
        i = find(program, what, nth)
        program.insert(i, program[i])

    return edit


def swap(what: type, other: type) -> Edit:
    """Exchange the first action of one type with the first of another."""

    def edit(program: list[Action]) -> None:
        i, j = find(program, what), find(program, other)
        program[i], program[j] = program[j], program[i]

    return edit


def set_action(what: type, nth: int, action: Action) -> Edit:
    def edit(program: list[Action]) -> None:
        program[find(program, what, nth)] = action

    return edit


def add_the_first_stored(program: list[Action]) -> None:
    i = find(program, Store)
    store = program[i]
    assert isinstance(store, Store)
    program[i] = Add(store.slice, store.step)


@pytest.mark.parametrize(("kind", "family"), FAMILY_OF_KIND)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 13, 16])
def test_every_family_is_accepted(kind: Kind, family: str, ranks: int) -> None:
    for m in range(1, 5 if ranks <= 8 else 3):
        verify(build(kind, family, ranks, m))


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind is not Kind.CHAIN])  # a chain has no such schedule
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(4, 2), (6, 2), (6, 3), (8, 4), (12, 4), (4, 1), (4, 4), (1, 1)])
def test_every_two_level_schedule_is_accepted(kind: Kind, ranks: int, ranks_per_node: int) -> None:
    for m in (1, 2):
        verify(build(kind, TWO_LEVEL, ranks, m, ranks_per_node))


CASES: dict[str, tuple[Schedule, Edit, str]] = {
    "dropped receive": (GATHER, change_post(0, recv=None), r"rank 1, action 3 Post\(step=1.*does not hold"),
    "dropped send": (GATHER, change_post(0, send=None), r"rank \d, action \d+ "),
    "dropped last send": (
        GATHER,
        change_post(2, send=None),
        r"rank 2, action \d+ Wait\(step=2.*waits forever",
    ),
    "receive from a wrong peer": (GATHER, change_post(0, recv=Recv(0, 3)), r"rank \d, action \d+ "),
    "send to a wrong peer": (GATHER, change_post(0, send=Send(1, 3)), r"rank \d, action \d+ "),
    "send of a slice it does not hold": (
        GATHER,
        change_post(0, send=Send(3, 2)),
        r"rank 1, action 0 Post\(step=0.*does not hold",
    ),
    "double compute": (GATHER, double(Compute, 1), r"rank 1, action \d+ Compute\(slice=0.*second time"),
    "missing compute": (GATHER, drop(Compute, 2), r"rank 1 never computes slices \[3\]"),
    "wait missing": (GATHER, drop(Wait, 0), r"rank 1, action \d+ .*(does not hold|not been awaited)"),
    "last wait missing in a scatter": (SCATTER, drop(Wait, 2), r"rank 1, action \d+ Add\(.*did not receive"),
    "double wait": (GATHER, double(Wait, 0), r"rank 1, action \d+ Wait\(step=0.*waits twice"),
    "wait before the post": (GATHER, swap(Post, Wait), r"rank 1, action 0 Wait\(step=0.*not posted"),
    "read before the wait": (
        GATHER,
        set_action(Compute, 0, Compute(0)),
        r"rank 1, action 1 Compute\(slice=0",
    ),
    "step posted twice": (GATHER, double(Post, 0), r"rank 1, action 1 Post\(step=0.*same step twice"),
    "sum added twice": (SCATTER, double(Add, 0), r"rank 1, action \d+ Add\(.*takes it twice"),
    "sum never added": (
        SCATTER,
        drop(Add, 2),
        r"rank 1 never adds or stores what it received in steps \[2\]",
    ),
    "add of the wrong slice": (
        SCATTER,
        set_action(Add, 0, Add(2, 0)),
        r"rank 1, action \d+ Add\(slice=2, step=0",
    ),
    "partial sum missing": (SCATTER, drop(Compute, 1), r"rank 1(, action| never computes)"),
    "finished sum not stored": (
        REDUCE,
        drop(Store, 0),
        r"rank \d (ends with the contributions|never adds or stores)",
    ),
    "finished sum added instead": (REDUCE, add_the_first_stored, r"rank \d ends with the contributions"),
    "compute of a slice for another rank": (
        EXCHANGE,
        set_action(Compute, 0, Compute(4)),
        r"rank 1 never computes .*5",
    ),
    "result not received": (EXCHANGE_OUT, change_post(0, recv=None), r"rank 1 ends without slices \[1\]"),
    "compute of a slice that another rank makes": (
        GATHER_OUT,
        set_action(Compute, 0, Compute(0)),
        r"rank 1(, action .*does not hold| never computes)",
    ),
    "gathered result not received": (GATHER_OUT, change_post(5, recv=None), r"rank 1 ends without slices \[5\]"),
    "passed on before it arrived": (GATHER_OUT, drop(Wait, 0), r"rank 1, action \d+ Post\(.*does not hold"),
    "sent before it was added": (
        SCATTER,
        lambda program: program.insert(find(program, Add), program.pop(find(program, Post, 1))),
        r"rank \d ends with the contributions",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_schedule_is_refused(name: str) -> None:
    schedule, edit, message = CASES[name]
    with pytest.raises(ScheduleError, match=message):
        verify(broken(schedule, edit))


def test_a_cyclic_wait_is_refused() -> None:
    # Each rank waits for the other before it sends.
    programs = tuple(
        (
            Compute(rank),
            Post(0, None, Recv(1 - rank, 1 - rank)),
            Wait(0),
            Post(1, Send(rank, 1 - rank), None),
            Wait(1),
            Compute(1 - rank),
        )
        for rank in range(2)
    )
    with pytest.raises(ScheduleError, match=r"rank 0, action 2 Wait\(step=0.*waits forever \(a cyclic wait"):
        verify(Schedule(Kind.ALL_GATHER, "cycle", 2, 1, programs=programs))


def test_a_send_that_nobody_receives_is_refused() -> None:
    schedule = broken(GATHER, lambda program: program.append(Post(9, Send(1, 2), None)))
    with pytest.raises(ScheduleError, match=r"never waits for steps \[9\]"):
        verify(schedule)
    schedule = broken(GATHER, lambda program: program.extend([Post(9, Send(1, 2), None), Wait(9)]))
    with pytest.raises(ScheduleError, match="rank 1 sends 4 slices to rank 2, which receives 3"):
        verify(schedule)


@settings(deadline=None)
@given(st.data())
def test_no_single_deletion_goes_unnoticed(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(FAMILIES)))
    family = data.draw(st.sampled_from([*FAMILIES[kind], *([] if kind is Kind.CHAIN else [TWO_LEVEL])]))
    schedule = build(kind, family, data.draw(st.sampled_from([2, 4, 6])), data.draw(st.integers(1, 2)), 2)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    at = data.draw(st.integers(0, len(schedule.program(rank)) - 1))
    with pytest.raises(ScheduleError):
        verify(broken(schedule, lambda program: program.__delitem__(at), rank))
