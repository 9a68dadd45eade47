"""Schedules in pieces of any size: they are schedules, whatever the pieces are; and the pieces that are chosen pay."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.schedule import Kind, build, verify
from fo_compiler.schedule.choose import Region, choose
from fo_compiler.schedule.ir import Add, Compute, Post
from fo_compiler.schedule.machine import Machine, simple_machine
from fo_compiler.schedule.memory import buffer_slices
from fo_compiler.schedule.network import Matrix, Uniform
from fo_compiler.schedule.simulate import RegionCost, simulate
from fo_compiler.schedule.taper import TAPERS, in_pieces, tapered
from fo_compiler.schedule.timeline import text_timeline
from fo_compiler.schedule.transform import OWN_ALONE
from tests.tapers import cuts_of

UNITS = 8


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(OWN_ALONE), st.sampled_from(TAPERS), st.integers(1, 5), st.booleans(), st.data())
def test_any_pieces_make_a_schedule(kind: Kind, family: str, ranks: int, across: bool, data: st.DataObject) -> None:
    cuts = data.draw(cuts_of(ranks, UNITS))
    schedule = in_pieces(kind, family, ranks, UNITS, cuts, across)
    verify(schedule)
    for rank in range(ranks):
        program = schedule.program(rank)
        computed = [action.count for action in program if isinstance(action, Compute)]
        assert sorted(computed) == sorted([UNITS, *(count for of_block in cuts for count in of_block)])
        sent = sum(action.send.count for action in program if isinstance(action, Post) and action.send)
        assert sent == (ranks - 1) * UNITS, "each slice crosses the port once"
        if kind is Kind.REDUCE_SCATTER:
            assert sum(action.count for action in program if isinstance(action, Add)) == (ranks - 1) * UNITS
    assert buffer_slices(schedule) <= 2 * (ranks - 1) * UNITS
    assert text_timeline(schedule, 0).count("compute") == 1 + len(computed)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(OWN_ALONE),
    st.sampled_from(TAPERS),
    st.integers(2, 5),
    st.floats(0.05, 5.0),
    st.sampled_from([0.0, 3.0, 40.0]),
    st.sampled_from([0.0, 10.0]),
    st.sampled_from([1, 2, 5, 32]),
    st.booleans(),
)
def test_all_that_is_tried_is_a_schedule_and_no_faster_than_the_bound(
    kind: Kind, family: str, ranks: int, ratio: float, post_us: float, launch_us: float, units: int, half: bool
) -> None:
    machine = simple_machine(network=Uniform(5.0, 1.0, full_duplex=not half), post_us=post_us, gap_us=2.0)
    region = Region(lambda m: 1000 / ratio / m + launch_us, 1e6, add_us=lambda m: 20 / m + launch_us)
    cost = region.cost(kind, machine, units, in_pieces=True)
    bound = region.bound(kind, machine, ranks, units, cost, merged=True)
    tried = list(tapered(kind, family, machine, ranks, units, cost))
    assert tried
    for schedule in tried:
        verify(schedule)
        assert simulate(schedule, machine, cost).makespan_us >= bound.us * (1 - 1e-9)


@pytest.mark.parametrize("kind", OWN_ALONE)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.3, 2.0])
def test_pieces_that_shrink_beat_equal_slices_where_the_link_is_the_limit(kind: Kind, ranks: int, ratio: float) -> None:
    """Posts cost 2 % of a block; slices that are small enough at the end are too many before."""
    machine = simple_machine(post_us=20.0)
    region = Region(lambda m: (ranks - 1) * 1000 / ratio / ranks / m, 1e6, add_us=lambda m: 0.0)
    fixed = choose(kind, machine, ranks, region, in_pieces=True)
    free = choose(kind, machine, ranks, region, in_pieces=True, units=32)
    assert free.predicted_us <= fixed.predicted_us
    assert free.schedule is not None
    if ratio >= 1.0 and ranks <= 4:
        assert free.schedule.family in TAPERS
        assert free.predicted_us < 0.999 * fixed.predicted_us


def test_what_is_hidden_anyway_is_not_cut() -> None:
    machine = simple_machine(post_us=20.0)
    choice = choose(Kind.ALL_GATHER, machine, 4, Region(lambda m: 2000 / m, 1e6), in_pieces=True, units=32)
    assert choice.schedule is not None
    assert choice.schedule.describe() == "ring"


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.ALL_TO_ALL])
def test_where_slices_arrive_pieces_shrink_and_where_they_leave_they_grow(kind: Kind) -> None:
    machine = simple_machine(post_us=5.0)
    region = Region(lambda m: 500 / m, 1e6, add_us=lambda m: 0.0)
    out = {Kind.ALL_GATHER: Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL: Kind.ALL_TO_ALL_OUT}[kind]
    for way, last_first in ((kind, False), (out, True)):
        schedule = choose(way, machine, 2, region, in_pieces=True, units=32).schedule
        assert schedule is not None
        sizes = [action.count for action in schedule.program(0) if isinstance(action, Compute) and action.count < 32]
        assert len(sizes) > 3
        shrinking = (sizes[::-1] if last_first else sizes)[1:]  # the first is what is left of the block
        assert shrinking == sorted(shrinking, reverse=True)
        assert schedule.describe() == f"tapered ({'+'.join(map(str, sizes))})/32"


def test_own_slices_in_one_piece_are_predicted_as_one_piece() -> None:
    """A kernel launched once for them, and not m times."""
    machine = simple_machine()
    region = Region(lambda m: 100 / m + 10, 10.0)
    apart, together = (
        choose(Kind.ALL_GATHER, machine, 2, region, families=("ring",), slices_per_rank=(4,), in_pieces=in_pieces)
        for in_pieces in (False, True)
    )
    assert apart.best is not None
    assert together.best is not None
    assert apart.best.predicted_us - together.best.predicted_us == pytest.approx(30.0)


def test_links_that_differ_and_huge_groups_are_left_to_the_other_families() -> None:
    region = Region(lambda m: 10.0 / m, 8e3, add_us=lambda m: 0.0)
    ranks = 3
    slow = tuple(tuple(0.25 if 1 in (a, b) else 1.0 for b in range(ranks)) for a in range(ranks))
    skewed = simple_machine(network=Matrix(((0.0,) * ranks,) * ranks, slow))
    for machine, n in ((skewed, ranks), (simple_machine(), 130)):
        choice = choose(Kind.ALL_GATHER, machine, n, region, in_pieces=True, units=4)
        assert not {candidate.schedule.family for candidate in choice.candidates} & set(TAPERS)


def test_forced_pieces_are_found_on_any_machine() -> None:
    ranks = 3
    slow = tuple(tuple(0.25 if 1 in (a, b) else 1.0 for b in range(ranks)) for a in range(ranks))
    skewed: Machine = simple_machine(network=Matrix(((0.0,) * ranks,) * ranks, slow))
    region = Region(lambda m: 10.0 / m, 8e3, add_us=lambda m: 0.0)
    for kind in OWN_ALONE:
        choice = choose(kind, skewed, ranks, region, families=("tapered",), in_pieces=True, units=8)
        assert choice.schedule is not None
        verify(choice.schedule)


def test_the_cost_of_pieces_is_that_of_slices_one_by_one_where_it_is_not_known() -> None:
    cost = RegionCost(10.0, 100.0, 2.0)
    assert (cost.compute_of(3), cost.add_of(3)) == (30.0, 6.0)
    known = RegionCost(10.0, 100.0, 2.0, (10.0, 16.0), (2.0, 3.0))
    assert (known.compute_of(2), known.compute_of(3), known.add_of(2)) == (16.0, 30.0, 3.0)
    assert (known.least().compute_us, known.least().add_us) == (8.0, 1.5)
    assert cost.least() == cost


def test_a_message_takes_as_long_as_its_slices() -> None:
    machine = simple_machine(bandwidth_GBps=1.0, latency_us=3.0)
    schedule = in_pieces(Kind.ALL_GATHER, "tapered", 2, 4, ((3, 1),))
    spans = simulate(schedule, machine, RegionCost(1.0, 1e4), spans=True).spans
    sends = [span for span in spans if span.label.startswith("send")]
    assert {span.label for span in sends} == {
        "send 0.0-2 -> 1", "send 0.3 -> 1", "send 1.0-2 -> 0", "send 1.3 -> 0"
    }  # fmt: skip
    assert sorted(span.end_us for span in sends) == pytest.approx([33.0, 33.0, 43.0, 43.0])
    assert build(Kind.ALL_GATHER, "ring", 2, 4).describe() == "ring x4"
