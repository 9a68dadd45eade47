"""The race checker: hand-broken plans that it must find, and random plans against a slow oracle."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fo_compiler.errors import RewriteError
from fo_compiler.passes.races import Launch, Plan, check_plan, find_races
from fo_compiler.runtime.streams import CALLER, COMM, NO_EVENT


def launch(name: str, stream: int = CALLER, after: tuple[int, ...] = (), event: int = NO_EVENT, **uses: str) -> Launch:
    return Launch(name, stream, after, event, **{use: frozenset(names.split()) for use, names in uses.items()})


# x is sent on the communication stream while the caller computes y; r arrives and is read behind the wait.
GOOD: Plan = (
    launch("make", writes="x"),
    launch("exchange", COMM, (CALLER,), 1, reads="x", writes="r"),
    launch("mm", reads="x", writes="y"),
    launch("wait", CALLER, (1,), holds="r x"),
    launch("use", reads="r", writes="z"),
    launch("output", reads="y z"),
)


def changed(name: str, **fields: object) -> Plan:
    return tuple(replace(step, **fields) if step.name == name else step for step in GOOD)  # type: ignore[arg-type]


def test_a_transfer_under_a_matmul_is_no_race() -> None:
    check_plan(GOOD)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (changed("exchange", after=()), "exchange reads x while make may still write it"),
        (changed("exchange", after=()), "stream 1 starts with exchange and is not forked"),
        (changed("wait", after=()), "use reads r while exchange may still write it"),
        (changed("wait", after=()), "stream 1 is not joined"),
        (changed("wait", after=(2,)), "wait waits for event 2, which is not recorded yet"),
        (changed("exchange", event=NO_EVENT), "wait waits for event 1, which is not recorded yet"),
        (changed("mm", writes=frozenset({"x"})), "mm writes x while exchange may still read it"),
        (
            (*changed("wait", holds=frozenset({"r"}))[:4], *GOOD[4:]),
            "x is named last by mm, while exchange may still use it",
        ),
        (
            (launch("older"), *changed("exchange", after=(7,))[1:2]),
            "exchange waits for event 7",
        ),
    ],
)
def test_a_broken_plan_is_found(plan: Plan, said: str) -> None:
    assert any(said in race for race in find_races(plan)), find_races(plan)
    with pytest.raises(RewriteError, match="race"):
        check_plan(plan)


def test_memory_that_is_taken_behind_the_fork_is_not_free_for_the_side_stream() -> None:
    plan = (
        launch("fork", event=1),
        launch("free", reads="old"),  # its memory may become that of `new`
        launch("side", 2, (1,), 2, writes="new"),
        launch("join", after=(2,), holds="new"),
    )
    assert find_races(plan) == ["side uses new before its memory is free on the caller's stream"]
    named = (plan[1], replace(plan[0], holds=frozenset({"new"})), *plan[2:])
    assert find_races(named) == []


STREAMS, BUFFERS = 3, ("a", "b", "c")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    steps = []
    for index in range(draw(st.integers(2, 9))):
        used = draw(st.lists(st.sampled_from(BUFFERS), unique=True, max_size=2))
        writes = frozenset(used[: draw(st.integers(0, len(used)))])
        after = tuple(draw(st.lists(st.integers(0, index), unique=True, max_size=2)))
        steps.append(
            Launch(f"n{index}", draw(st.integers(0, STREAMS - 1)), after, index + 1, frozenset(used) - writes, writes)
        )
    return tuple(steps)


def unordered_conflicts(plan: Plan) -> set[tuple[str, str]]:
    """Pairs with a conflict and no path between them, by the transitive closure of a graph of launches."""
    before: list[set[int]] = []
    for index, step in enumerate(plan):
        direct = [i for i in range(index) if plan[i].stream == step.stream][-1:]
        for event in step.after:
            direct += [i for i in range(index) if plan[i].event == event and event != CALLER]
            direct += [i for i in range(index) if plan[i].stream == CALLER and event == CALLER][-1:]
        before.append(set(direct).union(*(before[i] for i in direct)))
    return {
        (plan[i].name, plan[j].name)
        for i, j in combinations(range(len(plan)), 2)
        if i not in before[j] and (plan[i].writes & (plan[j].reads | plan[j].writes) or plan[i].reads & plan[j].writes)
    }


@pytest.mark.slow
@given(plans())
def test_conflicts_are_those_that_no_path_orders(plan: Plan) -> None:
    found = {
        (race.split(" while ")[1].split()[0], race.split()[0])
        for race in find_races(plan)
        if " while " in race and "named last" not in race
    }
    assert found == unordered_conflicts(plan)


@given(plans())
def test_a_plan_on_the_callers_stream_alone_has_no_race(plan: Plan) -> None:
    assert find_races(tuple(replace(step, stream=CALLER, after=()) for step in plan)) == []
