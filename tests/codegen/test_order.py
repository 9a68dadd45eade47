"""The order of a whole-region kernel, read off schedules."""

from __future__ import annotations

import pytest

from fo_compiler.codegen.order import GatherGroup, gather_order, scatter_order
from fo_compiler.errors import KernelError
from fo_compiler.schedule import FAMILIES, Kind, build


@pytest.mark.parametrize("family", sorted(FAMILIES[Kind.ALL_GATHER]))
@pytest.mark.parametrize(("ranks", "m"), [(1, 1), (2, 1), (4, 2), (5, 1)])
def test_a_gather_starts_with_the_own_slices_and_takes_each_slice_once(family: str, ranks: int, m: int) -> None:
    schedule = build(Kind.ALL_GATHER, family, ranks, m)
    for rank in range(ranks):
        order = gather_order(schedule, rank)
        own = [GatherGroup(rank * m + part, part) for part in range(m)]
        assert order[:m] == own
        assert all(group.own_part is None for group in order[m:])
        assert sorted(group.slice for group in order) == list(range(ranks * m))


def test_a_ring_gather_goes_downwards_from_the_own_slice() -> None:
    order = gather_order(build(Kind.ALL_GATHER, "ring", 4, 1), 1)
    assert [group.slice for group in order] == [1, 0, 3, 2]


def test_an_all_to_all_numbers_slices_by_source() -> None:
    order = gather_order(build(Kind.ALL_TO_ALL, "direct", 3, 1), 2)
    assert order == [GatherGroup(2, 0), GatherGroup(1, None), GatherGroup(0, None)]


@pytest.mark.parametrize("family", sorted(FAMILIES[Kind.REDUCE_SCATTER]))
@pytest.mark.parametrize(("ranks", "m"), [(2, 1), (4, 2), (5, 1)])
def test_a_scatter_ends_with_the_own_slices_and_adds_each_arrival_once(family: str, ranks: int, m: int) -> None:
    schedule = build(Kind.REDUCE_SCATTER, family, ranks, m)
    for rank in range(ranks):
        order = scatter_order(schedule, rank)
        assert sorted(group.slice for group in order) == list(range(ranks * m))
        assert sorted(group.slice for group in order[-m:]) == list(range(rank * m, (rank + 1) * m))
        assert [group.peer is None for group in order] == [False] * (len(order) - m) + [True] * m
        steps = [step for group in order for step in group.adds]
        assert len(set(steps)) == len(steps) == (ranks - 1) * m


def test_a_direct_scatter_adds_all_arrivals_to_the_own_slice_and_a_ring_one_to_each() -> None:
    direct = scatter_order(build(Kind.REDUCE_SCATTER, "direct", 4, 1), 0)
    assert [len(group.adds) for group in direct] == [0, 0, 0, 3]
    ring = scatter_order(build(Kind.REDUCE_SCATTER, "ring", 4, 1), 0)
    assert [len(group.adds) for group in ring] == [0, 1, 1, 1]


def test_orders_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(KernelError, match="slices that arrive, got reduce_scatter"):
        gather_order(build(Kind.REDUCE_SCATTER, "ring", 2, 1), 0)
    with pytest.raises(KernelError, match="results that leave, got all_reduce"):
        scatter_order(build(Kind.ALL_REDUCE, "ring", 2, 1), 0)
