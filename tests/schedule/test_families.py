"""What the families build: the structure that the paper promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fo_compiler.schedule import FAMILIES, Compute, Kind, Schedule, Wait, build, verify
from fo_compiler.schedule.ir import posts
from fo_compiler.schedule.transform import OWN_ALONE, own_together

UNIFORM = [(kind, family) for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) for family in ("ring", "direct")]


def compute_order(schedule: Schedule, rank: int) -> list[int]:
    return [action.slice for action in schedule.program(rank) if isinstance(action, Compute)]


@pytest.mark.parametrize(("kind", "family"), UNIFORM)
def test_every_rank_sends_each_foreign_slice_once(kind: Kind, family: str) -> None:
    schedule = build(kind, family, 5, 3)
    for rank in range(5):
        sent = [post for post in posts(schedule.program(rank)) if post.send]
        assert len(sent) == (5 - 1) * 3


def test_a_ring_only_talks_to_its_neighbours() -> None:
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        for rank in range(6):
            for post in posts(build(kind, "ring", 6, 2).program(rank)):
                assert post.send
                assert post.send.peer == (rank + 1) % 6
                assert post.recv
                assert post.recv.peer == (rank - 1) % 6


def test_the_own_slice_is_first_in_a_gather_and_last_in_a_scatter() -> None:
    for family in ("ring", "direct"):
        assert compute_order(build(Kind.ALL_GATHER, family, 4, 2), 2)[:2] == [4, 5]
        assert compute_order(build(Kind.REDUCE_SCATTER, family, 4, 2), 2)[-2:] == [4, 5]


@pytest.mark.parametrize(("kind", "family"), UNIFORM)
def test_at_most_one_step_of_transfers_is_in_flight(kind: Kind, family: str) -> None:
    m = 3
    in_flight = 0
    for action in build(kind, family, 6, m).program(1):
        if isinstance(action, Wait):
            in_flight -= 1
        elif action in posts([action]):
            in_flight += 1
        assert in_flight <= m


def test_each_result_leaves_behind_its_compute_and_before_the_next() -> None:
    program = build(Kind.ALL_GATHER_OUT, "direct", 4, 3).program(2)
    computed: list[int] = []
    for action in program:
        if isinstance(action, Compute):
            computed.append(action.slice)
        elif action in posts([action]):
            assert action.send
            assert action.send.slice == computed[-1]
    assert computed == [6, 7, 8]
    assert len(posts(program)) == 3 * 3


def test_a_ring_of_results_passes_each_on_one_hop_a_compute() -> None:
    schedule = build(Kind.ALL_GATHER_OUT, "ring", 4, 4)
    for rank in range(4):
        computed, hops = 0, []
        for action in schedule.program(rank):
            computed += isinstance(action, Compute)
            for post in posts([action]):
                assert post.send
                assert post.recv
                assert (post.send.peer, post.recv.peer) == ((rank + 1) % 4, (rank - 1) % 4)
                hops.append((computed, (rank - post.send.slice // 4) % 4, post.send.slice % 4))
        assert all(hop + part == turn - 1 for turn, hop, part in hops if turn < 4)
        assert {(hop, part) for _, hop, part in hops} == {(hop, part) for hop in range(3) for part in range(4)}


def test_the_program_of_a_rank_is_that_of_rank_0_shifted() -> None:
    schedule = build(Kind.ALL_GATHER, "ring", 4)
    assert compute_order(schedule, 0) == [0, 3, 2, 1]
    assert compute_order(schedule, 3) == [3, 2, 1, 0]


def test_an_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no schedule family 'spiral' for all_gather: expected one of .*ring"):
        build(Kind.ALL_GATHER, "spiral", 4)


@pytest.mark.parametrize(("ranks", "m"), [(0, 1), (4, 0), (-1, 1)])
def test_counts_below_one_are_refused(ranks: int, m: int) -> None:
    with pytest.raises(ValueError, match="ranks >= 1"):
        build(Kind.ALL_GATHER, "ring", ranks, m)


def test_one_rank_needs_no_transfer() -> None:
    for kind, families in FAMILIES.items():
        for family in families:
            assert posts(build(kind, family, 1, 2).program(0)) == []


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_own_slices_side_by_side_change_nothing_but_their_place(kind: Kind, ranks: int) -> None:
    """What `own_together` makes is a schedule, too; it moves own slices alone, and only where nothing waits for one."""
    for family in FAMILIES[kind]:
        for m in (1, 2, 3):
            schedule = build(kind, family, ranks, m)
            moved = own_together(schedule)
            if m == 1 or kind not in OWN_ALONE:
                assert moved == schedule
                continue
            verify(moved)
            verify(replace(moved, relative=None, programs=tuple(map(moved.program, range(ranks)))))
            by_rank = replace(schedule, relative=None, programs=tuple(map(schedule.program, range(ranks))))
            assert own_together(by_rank).programs == tuple(map(moved.program, range(ranks)))
            for rank in range(ranks):
                first = (rank * ranks + rank if kind.is_all_to_all else rank) * m
                own = {Compute(slice_) for slice_ in range(first, first + m)}
                together = moved.program(rank)
                assert [action for action in together if action != Compute(first, count=m)] == [
                    action for action in schedule.program(rank) if action not in own
                ]
                assert len(together) == len(schedule.program(rank)) - m + 1
