"""Ranks compare their decisions before a graph first runs: in one process, each rank a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fo_compiler.errors import AgreementError, DecisionsDifferError, TransferError
from fo_compiler.options import Options
from fo_compiler.runtime import ops
from fo_compiler.runtime.agreement import Meeting, bounded, compare, decisions, groups_of
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.runtime.transport import Transport, current_transport
from fo_compiler.testing import LocalInterpreter, rewrite_for_rank
from tests.graphs import all_gather, all_reduce, capture
from tests.passes.helpers import on_each_rank, tensors

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
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, AgreementError)
        for part in (f"rank {rank} of group '0'", "Ranks [0, 2] agree", "  rank 1: inference all_gather_into_tensor"):
            assert part in str(outcome)
        assert "schedule direct x2 (not schedule ring)" in str(outcome)


def test_a_rank_that_leaves_the_region_alone_is_named() -> None:
    outcomes, _ = run([RING, Options(rewrite="never")])
    for outcome in outcomes:
        assert isinstance(outcome, AgreementError)
        assert "left alone" in str(outcome)


def test_a_rank_that_does_not_come_is_named_after_the_time_limit() -> None:
    world = LocalWorld(2, timeout_s=0.2)
    with pytest.raises(AgreementError, match=r"Ranks \[1\] of the group did not come"):
        agree(world.transport(0), "0", rows())


def test_reasons_may_differ_as_long_as_decisions_do_not() -> None:
    outcomes, _ = run([RING, Options(rewrite="always", schedule="ring", slices_per_rank=1, machine="ethernet-10g")])
    assert outcomes == [None, None]


def test_what_one_rank_computes_besides_and_with_other_groups_is_no_difference() -> None:
    """Both give the nodes that the ranks have in common other names."""
    groups = {"0": [[0, 1, 2]], "few": [[0, 1]]}

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(x @ w)

    def logging(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.t().contiguous().t()).sum() + all_reduce(x @ w)

    def with_few(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(all_reduce(x, "few") @ w)

    for options, functions in ((RING, (plain, logging)), (Options(rewrite="never"), (with_few, logging, plain))):
        texts = set()
        for rank, function in enumerate(functions):
            gm = capture(function, tensors((6, 4), (4, 6)))
            published = rewrite_for_rank(gm, options, LocalWorld(3, groups).transport(rank))[1]
            texts.add(str(decisions(groups_of(published)["0"])))
        assert len(texts) == 1, texts


def test_off_compares_nothing() -> None:
    options = Options(rewrite="always", schedule="ring", slices_per_rank=1, agreement="off")
    outcomes, world = run([options, options])
    assert outcomes == [None, None]
    assert not world.boards


def rows(schedule: str = "ring", size: int = 8) -> list[list[str]]:
    return [["forward all_gather (x)", f"tensor float32[{size}, 6]", f"schedule {schedule}", "matmuls mm"]]


def together(world: LocalWorld, programs: list[Callable[[Transport], None]]) -> list[str]:
    """What each rank's program raises."""

    def program(rank: int) -> str:
        try:
            programs[rank](current_transport())
        except (AgreementError, TransferError) as error:
            return f"{type(error).__name__}: {error}"
        return "done"

    return world.run(program)


def agree(transport: Transport, group: str, *graphs: list[list[str]]) -> None:
    for graph in graphs:
        transport.agreements.agree(transport, group, graph)


def test_graphs_are_numbered_by_group_and_each_is_compared_once() -> None:
    world = LocalWorld(2, {"a": [[0, 1]], "b": [[0, 1]]}, timeout_s=20)

    def program(transport: Transport) -> None:
        agree(transport, "a", rows(), rows("direct"), rows())
        agree(transport, "b", rows())

    assert together(world, [program, program]) == ["done", "done"]
    counts = [sorted(key for key in board.values if key.endswith("count")) for board in world.boards.values()]
    assert counts == [["1/count", "2/count"], ["1/count"]]


def test_a_graph_that_was_refused_is_refused_again_without_a_word_to_the_others() -> None:
    world = LocalWorld(2, timeout_s=20)

    def program(mine: list[list[str]]) -> Callable[[Transport], None]:
        def twice(transport: Transport) -> None:
            with pytest.raises(DecisionsDifferError):
                agree(transport, "0", mine)
            agree(transport, "0", mine)

        return twice

    for outcome in together(world, [program(rows()), program(rows("direct"))]):
        assert outcome.startswith("DecisionsDifferError")
    (board,) = world.boards.values()
    assert "2/count" not in board.values


def test_a_rank_that_waits_for_a_graph_learns_which_one_the_others_have_and_what_differs() -> None:
    world = LocalWorld(2, timeout_s=0.3)
    first, second = together(
        world,
        [
            lambda transport: agree(transport, "0", rows()),
            lambda transport: agree(transport, "0", rows(), rows(size=16)),
        ],
    )
    assert first == "done"
    for part in ("rank 1", "group '0'", "graph 2", "Ranks [0]", "float32[16, 6] (not tensor float32[8, 6])", "0.3 s"):
        assert part in second


def test_a_transfer_that_fails_says_who_waits_to_run_which_other_graph() -> None:
    world = LocalWorld(2, timeout_s=0.3)

    def old_graph(transport: Transport) -> None:
        agree(transport, "0", rows())
        sent = torch.ones(2)
        ops.wait(ops.exchange(sent, 1, 1, "0", "region ag0, step 0"), sent)

    first, second = together(world, [old_graph, lambda transport: agree(transport, "0", rows(), rows(size=16))])
    for part in (
        "TransferError",
        "region ag0",
        "Ranks [1] wait to run graph 2",
        "float32[16, 6] (not tensor float32[8",
    ):
        assert part in first
    assert second.startswith("AgreementError")


def test_a_rank_that_has_failed_ends_the_wait_of_those_that_wait_for_it() -> None:
    world = LocalWorld(2, timeout_s=60)

    def fails(transport: Transport) -> None:
        agree(transport, "0", rows())
        transport.agreements.report_failure(transport, "0", "transfer failed: region ag3, step 1")

    _, second = together(world, [fails, lambda transport: agree(transport, "0", rows(), rows("direct"))])
    assert second.startswith("AgreementError")
    assert "rank 0 failed: transfer failed: region ag3, step 1" in second


def test_a_store_that_is_gone_is_an_error_of_ours_and_one_that_hangs_is_not_waited_for() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Broken pipe")

    with pytest.raises(AgreementError, match=r"group 'g'.*Broken pipe"):
        compare(Meeting("g", Gone(), 0, 2, 1.0), 1, rows(), [])
    assert bounded(lambda: Gone().check([]), 1.0) is None
    assert bounded(lambda: str(threading.Event().wait(30)), 0.05) is None
