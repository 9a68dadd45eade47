"""Buffers: what a schedule holds at one time."""

from __future__ import annotations

import pytest

from fo_compiler.schedule import Kind, build
from fo_compiler.schedule.memory import buffer_slices


def test_a_ring_gather_holds_the_slice_in_hand_and_the_one_that_arrives() -> None:
    assert buffer_slices(build(Kind.ALL_GATHER, "ring", 8)) == 2
    assert buffer_slices(build(Kind.ALL_GATHER, "ring", 8, 4)) == 2 * 4


def test_a_ring_scatter_holds_the_sum_that_leaves_the_one_that_arrives_and_the_one_being_computed() -> None:
    assert buffer_slices(build(Kind.REDUCE_SCATTER, "ring", 8)) == 3


def test_gathered_results_are_held_until_they_are_put_together() -> None:
    for family in ("ring", "direct"):
        assert buffer_slices(build(Kind.ALL_GATHER_OUT, family, 8, 2)) == 7 * 2


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER])
def test_a_large_group_holds_less_than_the_plain_collective(kind: Kind) -> None:
    for family in ("ring", "direct"):
        assert buffer_slices(build(kind, family, 8)) < 8 - 1, "the gathered input, or the whole partial result"


def test_one_rank_holds_nothing() -> None:
    assert buffer_slices(build(Kind.ALL_GATHER, "ring", 1)) == 0
