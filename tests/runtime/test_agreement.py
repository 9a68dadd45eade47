"""Ranks compare their decisions before a graph first runs: in one process, each rank a thread."""

from __future__ import annotations

import pytest

from fo_compiler.errors import AgreementError
from fo_compiler.options import Options
from fo_compiler.runtime.agreement import Agreements
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import LocalInterpreter, rewrite_for_rank
from tests.graphs import all_gather, capture
from tests.passes.helpers import on_each_rank

RING = Options(rewrite="always", schedule="ring", slices_per_rank=1)


def run(options: list[Options], timeout_s: float = 20.0) -> tuple[list[object], LocalWorld]:
    """all-gather -> matmul on each rank with its own options; the outcome of each."""
    ranks = len(options)
    inputs = on_each_rank(ranks, (4, 6), (6, 5))
    world = LocalWorld(ranks, timeout_s=timeout_s)
    gm = capture(lambda x, w: all_gather(x, 0, ranks) @ w, inputs[0])
    rewritten = [rewrite_for_rank(gm, options[rank], world.transport(rank))[0] for rank in range(ranks)]

    def program(rank: int) -> object:
        try:
            for _ in range(2):
                LocalInterpreter(rewritten[rank]).run(*inputs[rank])
        except AgreementError as error:
            return error
        return None

    return world.run(program), world


def test_ranks_that_agree_run_and_compare_once() -> None:
    outcomes, world = run([RING, RING, RING])
    assert outcomes == [None] * 3
    (board,) = world.boards.values()
    assert board.values["1/count"] == "3"
    assert "2/count" not in board.values, "the second step does not compare again"


def test_a_rank_with_another_schedule_is_named_on_every_rank_with_what_differs() -> None:
    outcomes, _ = run([RING, Options(rewrite="always", schedule="direct", slices_per_rank=2), RING])
    assert len({str(outcome) for outcome in outcomes} - {"None"}) in (1, 2)
    for outcome in outcomes:
        assert isinstance(outcome, AgreementError)
        for part in ("all_gather_into_tensor", "ring", "direct x2", "rank"):
            assert part in str(outcome)


def test_a_rank_that_leaves_the_region_alone_is_named() -> None:
    outcomes, _ = run([RING, Options(rewrite="never")])
    for outcome in outcomes:
        assert isinstance(outcome, AgreementError)
        assert "left alone" in str(outcome)


def test_a_rank_that_does_not_come_is_named_after_the_time_limit() -> None:
    world = LocalWorld(2, timeout_s=0.2)
    with pytest.raises(AgreementError, match=r"ranks \[1\] of the group did not come"):
        world.transport(0).agree("0", [["forward all_gather", "tensor x", "schedule ring", "matmuls mm"]])


def test_reasons_may_differ_as_long_as_decisions_do_not() -> None:
    outcomes, _ = run([RING, Options(rewrite="always", schedule="ring", slices_per_rank=1, machine="ethernet-10g")])
    assert outcomes == [None, None]


def test_off_compares_nothing() -> None:
    options = Options(rewrite="always", schedule="ring", slices_per_rank=1, agreement="off")
    outcomes, world = run([options, options])
    assert outcomes == [None, None]
    assert not world.boards


def test_graphs_are_numbered_by_group() -> None:
    agreements = Agreements()
    assert [agreements.next_number(name) for name in ("a", "b", "a")] == [1, 1, 2]
    assert agreements.is_new("k")
    assert not agreements.is_new("k")
