"""The library's collective on slices: sizes that hide all but the last, and times that add up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.schedule.machine import simple_machine
from fo_compiler.schedule.sliced_collective import Slices, choose_slices, overlapped_us, series, sliced_us

times = st.lists(st.tuples(st.floats(0.1, 100.0), st.floats(0.1, 100.0)), min_size=1, max_size=8)


@given(times)
def test_without_contention_each_collective_follows_its_slice_and_the_one_before(
    pairs: list[tuple[float, float]],
) -> None:
    computed = done = 0.0
    for compute, collective in pairs:
        computed += compute
        done = max(done, computed) + collective
    assert overlapped_us(*zip(*pairs, strict=True), 1.0, 1.0) == pytest.approx(done)


@given(times, st.floats(1.0, 4.0), st.floats(1.0, 4.0))
def test_contention_makes_it_slower_by_no_more_than_its_factors(
    pairs: list[tuple[float, float]], slow_compute: float, slow_collective: float
) -> None:
    compute, collectives = zip(*pairs, strict=True)
    free = overlapped_us(compute, collectives, 1.0, 1.0)
    got = overlapped_us(compute, collectives, slow_compute, slow_collective)
    assert free * (1 - 1e-9) <= got <= free * max(slow_compute, slow_collective) * (1 + 1e-9)


@settings(deadline=None)
@given(st.integers(1, 64), st.floats(0.125, 8.0))
def test_slices_share_all_units_in_few_forms(units: int, ratio: float) -> None:
    found = list(series(units, ratio))
    assert bool(found) == (units > 1)
    for slices in found:
        assert sum(slices.shares) == pytest.approx(1.0)
        assert all(end > start for start, end in slices.bounds)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("ends", [(), (4,), (3, 3, 8), (0, 8), (8, 9)])
def test_slices_that_do_not_fill_the_whole_are_refused(ends: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="grow up to 8"):
        Slices(8, ends)


@pytest.mark.parametrize(
    ("ratio", "most"),
    [(0.2, 1.01), (0.5, 1.02), (0.9, 1.06), (1.0, 1.07), (1.5, 1.07), (3.0, 1.06)],
)
def test_next_to_nothing_is_exposed_where_posts_are_free(ratio: float, most: float) -> None:
    """Compute 100, communication `ratio` times as much: no order of anything takes less than the larger of both."""
    got = choose_slices(simple_machine(), 64, lambda share: 100 * share, lambda share: 100 * ratio * share)
    assert got is not None
    assert max(100, 100 * ratio) <= got.predicted_us <= most * max(100, 100 * ratio)


def test_smaller_slices_come_last_where_communication_is_short_and_first_where_it_is_long() -> None:
    short, long = (
        choose_slices(simple_machine(), 64, lambda share: 100.0 * share, lambda share, r=ratio: 100 * r * share)
        for ratio in (0.3, 3.0)
    )
    assert short is not None
    assert long is not None
    assert list(short.slices.shares) == sorted(short.slices.shares, reverse=True)
    assert list(long.slices.shares) == sorted(long.slices.shares)
    assert Slices(8, (4, 7, 8)).describe() == "library x3 (4:3:1)"


@pytest.mark.parametrize("ratio", [0.2, 0.4, 0.8, 1.2, 2.0])
def test_slices_do_well_where_collectives_are_slower_than_the_machine_says(ratio: float) -> None:
    """A fifth slower: what is exposed of them is little more than with slices for the true time."""
    got, true = (
        choose_slices(simple_machine(), 64, lambda share: 100.0 * share, lambda share, r=r: 100 * r * share)
        for r in (ratio, 1.2 * ratio)
    )
    assert got is not None
    assert true is not None
    us = sliced_us(simple_machine(), got.slices, lambda share: 100.0 * share, lambda share: 120 * ratio * share)
    assert us <= 1.03 * true.predicted_us


def test_what_a_slice_costs_limits_their_number() -> None:
    def count(latency_us: float, post_us: float) -> int:
        machine = simple_machine(post_us=post_us)
        got = choose_slices(machine, 64, lambda share: 100 * share, lambda share: latency_us + 100 * share)
        assert got is not None
        return len(got.slices.ends)

    assert count(20.0, 0.0) < count(1.0, 0.0)
    assert count(1.0, 5.0) < count(1.0, 0.0)
    assert choose_slices(simple_machine(), 1, lambda share: 1.0, lambda share: 1.0) is None
    forced = choose_slices(simple_machine(), 6, lambda share: 1.0, lambda share: 1.0, equal=True)
    assert forced is not None
    assert forced.slices.describe() == "library x6 (1:1:1:1:1:1)"


def test_the_slowest_rank_counts() -> None:
    machine = simple_machine(compute_scale=(1.0, 2.0))
    slices = Slices(2, (1, 2))
    assert sliced_us(machine, slices, lambda share: 10 * share, lambda share: 1.0) == pytest.approx(21.0)
