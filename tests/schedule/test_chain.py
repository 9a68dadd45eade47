"""Chains of gather, body and scatter: order, values, time, and what a broken one is refused for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.errors import ScheduleError
from fo_compiler.schedule import Compute, Kind, Post, Schedule, build, verify
from fo_compiler.schedule.bound import lower_bound
from fo_compiler.schedule.choose import Region, choose, collective_us
from fo_compiler.schedule.interpret import interpret_chain
from fo_compiler.schedule.machine import Machine, simple_machine
from fo_compiler.schedule.memory import buffer_slices
from fo_compiler.schedule.network import Uniform
from fo_compiler.schedule.presets import PRESETS
from fo_compiler.schedule.simulate import RegionCost, simulate

FAMILIES = ("ring", "direct")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_a_chain_is_verified_and_sums_what_all_ranks_computed(family: str, ranks: int, m: int) -> None:
    schedule = build(Kind.CHAIN, family, ranks, m)
    verify(schedule)
    generator = torch.Generator().manual_seed(0)
    shards = torch.randn(ranks, m, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(ranks, 3, 3, generator=generator, dtype=torch.float64)
    sums = interpret_chain(schedule, list(shards), lambda rank, slice_: torch.tanh(slice_ @ weights[rank]))
    for rank in range(ranks):
        want = sum(torch.tanh(shards[rank] @ weight) for weight in weights)
        torch.testing.assert_close(torch.stack(sums[rank]), want)


def computes(schedule: Schedule, rank: int) -> list[int]:
    return [action.slice for action in schedule.program(rank) if isinstance(action, Compute)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_of_the_own_slice_comes_first_and_its_tail_last(family: str) -> None:
    assert computes(build(Kind.CHAIN, family, 3, 2), 1) == [2, 0, 1, 4, 5, 3]
    assert computes(build(Kind.CHAIN, family, 3, 4), 0) == [0, 1, *range(8, 12), *range(4, 8), 2, 3]


def machine_of(latency_us: float = 0.0) -> Machine:
    return simple_machine(network=Uniform(latency_us, 1.0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_communication_is_hidden_where_two_transfers_fit_under_a_slice(family: str, ranks: int) -> None:
    cost = RegionCost(
        compute_us=100.0, slice_bytes=50e3
    )  # 50 us each: one arrives and one leaves in the time of a slice
    simulation = simulate(build(Kind.CHAIN, family, ranks, 2), machine_of(), cost)
    assert simulation.exposed_us == pytest.approx(0.0)
    assert lower_bound(Kind.CHAIN, machine_of(), ranks, 2, cost).us == pytest.approx(simulation.makespan_us)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.integers(2, 6),
    st.integers(1, 4),
    st.floats(0.1, 100),
    st.floats(0.1, 100),
    st.sampled_from([*PRESETS.values(), machine_of(), machine_of(5.0)]),
)
def test_no_chain_beats_the_bound_and_one_rank_stands_for_all(
    family: str, ranks: int, m: int, compute_us: float, kilobytes: float, machine: Machine
) -> None:
    schedule = build(Kind.CHAIN, family, ranks, m)
    cost = RegionCost(compute_us, kilobytes * 1e3, machine.add_us(kilobytes * 1e3))
    simulation = simulate(schedule, machine, cost)
    assert simulation.makespan_us >= lower_bound(Kind.CHAIN, machine, ranks, m, cost).us * (1 - 1e-9)
    assert simulate(schedule, machine, cost, spans=True).makespan_us == pytest.approx(simulation.makespan_us)
    assert 0 < buffer_slices(schedule) <= 2 * ranks * m


@pytest.mark.parametrize("family", FAMILIES)
def test_a_broken_chain_is_refused(family: str) -> None:
    schedule = build(Kind.CHAIN, family, 3, 2)
    relative = list(schedule.relative or ())
    posts = [at for at, action in enumerate(relative) if isinstance(action, Post)]
    for at in posts:
        post = relative[at]
        assert isinstance(post, Post)
        broken = replace(schedule, relative=(*relative[:at], replace(post, sums=not post.sums), *relative[at + 1 :]))
        with pytest.raises(ScheduleError):
            verify(broken)


def test_a_chain_is_chosen_by_its_time_and_counts_both_collectives_as_plain() -> None:
    machine = machine_of()
    region = Region(lambda m: 100.0 / m, 40e3, add_us=lambda m: 0.0)
    choice = choose(Kind.CHAIN, machine, 4, region)
    assert choice.rewrite
    assert choice.best is not None
    assert choice.best.certificate.is_optimal
    halves = sum(collective_us(kind, machine, 4, 40e3) for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER))
    assert choice.plain_us == pytest.approx(400.0 + halves)
    with pytest.raises(ValueError, match="two_level"):
        build(Kind.CHAIN, "two_level", 4, 1, 2)
