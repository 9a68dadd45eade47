"""Schedules for networks that no family fits."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.schedule import COLLECTIVES, FAMILIES, Kind, build, verify
from fo_compiler.schedule.bound import lower_bound
from fo_compiler.schedule.choose import Region, choose
from fo_compiler.schedule.machine import Machine, simple_machine
from fo_compiler.schedule.network import Matrix, Uniform
from fo_compiler.schedule.search import _proposals, search
from fo_compiler.schedule.simulate import RegionCost, simulate


def one_slow_link(ranks: int) -> Machine:
    """Between ranks 1 and 2 bytes take five times as long as elsewhere."""
    bandwidth = tuple(tuple(0.2 if {a, b} == {1, 2} else 1.0 for b in range(ranks)) for a in range(ranks))
    return simple_machine("one slow link", network=Matrix(((0.0,) * ranks,) * ranks, bandwidth))


def one_slow_rank(ranks: int) -> Machine:
    return simple_machine("one slow rank", network=Uniform(0.0, 1.0), compute_scale=(1.0, 1.5) + (1.0,) * (ranks - 2))


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_a_slow_link_is_gone_round(kind: Kind, ranks: int) -> None:
    machine, cost = one_slow_link(ranks), RegionCost(10.0, 8e3)
    found = simulate(search(kind, machine, ranks, 1, cost), machine, cost).makespan_us
    assert found == pytest.approx(lower_bound(kind, machine, ranks, 1, cost).us)
    assert simulate(build(kind, "ring", ranks), machine, cost).makespan_us > 3 * found


@pytest.mark.slow
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_no_family_beats_the_choice(kind: Kind) -> None:
    for machine in (one_slow_link(4), one_slow_rank(4)):
        choice = choose(kind, machine, 4, Region(lambda m: 10.0 / m, 8e3, add_us=lambda m: 0.0), slices_per_rank=(1, 2))
        assert choice.best is not None
        for family in FAMILIES[kind]:
            for m in (1, 2):
                cost = RegionCost(10.0 / m, 8e3 / m)
                us = simulate(build(kind, family, 4, m), machine, cost).makespan_us
                assert choice.best.predicted_us <= us * (1 + 2e-6)


TIMES = [0.0, 0.2, 1.0, 3.0, 10.0]


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("FO_TEST_INSTANCES", "25")), deadline=None)
@given(st.sampled_from(COLLECTIVES), st.integers(2, 5), st.integers(1, 3), st.data())
def test_whatever_the_search_proposes_is_a_right_schedule(kind: Kind, ranks: int, m: int, data: st.DataObject) -> None:
    """Latencies far apart make transfers overtake each other in a plan: its posts and waits still have to fit."""
    row = st.lists(st.sampled_from(TIMES), min_size=ranks, max_size=ranks).map(tuple)
    latency = data.draw(st.lists(row, min_size=ranks, max_size=ranks).map(tuple))
    bandwidth = data.draw(st.lists(row, min_size=ranks, max_size=ranks).map(tuple))
    bandwidth = tuple(tuple(value + 0.1 for value in of_rank) for of_rank in bandwidth)
    scale = tuple(data.draw(st.lists(st.sampled_from([1.0, 1.5, 3.0]), min_size=ranks, max_size=ranks)))
    machine = simple_machine(network=Matrix(latency, bandwidth), compute_scale=scale)
    cost = RegionCost(data.draw(st.floats(0.1, 20.0)), 4e3)
    bound_us = lower_bound(kind, machine, ranks, m, cost).us
    rings = 24 if kind is not Kind.ALL_REDUCE else 0
    for schedule in islice(_proposals(kind, machine, ranks, m, cost), rings + 12):
        verify(schedule)
        assert simulate(schedule, machine, cost).makespan_us >= bound_us * (1 - 1e-9)


def test_every_process_finds_the_same_schedule() -> None:
    code = (
        "from fo_compiler.schedule import Kind\n"
        "from fo_compiler.schedule.machine import simple_machine\n"
        "from fo_compiler.schedule.network import Matrix\n"
        "from fo_compiler.schedule.search import search\n"
        "from fo_compiler.schedule.simulate import RegionCost\n"
        "b = tuple(tuple(1.0 + (3 * i + 5 * j) % 7 for j in range(5)) for i in range(5))\n"
        "machine = simple_machine(network=Matrix(((1.0,) * 5,) * 5, b))\n"
        "print(search(Kind.REDUCE_SCATTER, machine, 5, 2, RegionCost(3.0, 9e3)).programs)\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("0", "1")
    }
    assert len(answers) == 1
