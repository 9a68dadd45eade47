"""Peers that die, hang, raise or are cut off: every other rank ends with an error that says where, in bounded time.

A rank that still runs when `run_fleet`'s time is over, far behind the time-out of the group, has no error to show.
Two of them run by default; all of them in `make nightly`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import partial

import pytest

from benchmarks.network import Network, Shaping, address, why_unshaped
from tests.distributed import fault_checks as checks
from tests.distributed.fleet import Outcome, run_fleet

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]


def names_the_place(outcome: Outcome) -> None:
    assert outcome.error.startswith(("TransferError", "AgreementError")), outcome
    parts = ["group", "rank"]
    parts += ["region", "step", "sends to", "receives from"] if outcome.error.startswith("Transfer") else ["Ranks [1]"]
    for part in parts:
        assert part in outcome.error


def survivors(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for rank, outcome in enumerate(outcomes) if rank != 1]


nightly = pytest.mark.nightly


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=nightly), 3])
@pytest.mark.parametrize(
    "where",
    [
        "in a transfer",
        pytest.param("between forward and backward", marks=nightly),
        pytest.param("before the first step", marks=nightly),
    ],
)
def test_a_peer_that_is_killed_ends_all_others_with_an_error_that_says_where(where: str, ranks: int) -> None:
    outcomes = run_fleet(ranks, partial(checks.train, where=where, action="die"))
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in survivors(outcomes):
        names_the_place(outcome)
        assert ("TransferError" in outcome.error) == (where != "before the first step")


@nightly
@pytest.mark.parametrize("where", ["in a transfer", "between forward and backward", "before the first step"])
def test_a_peer_that_never_comes_ends_the_wait_of_all_others(where: str) -> None:
    outcomes = run_fleet(3, partial(checks.train, where=where, action="sleep"), outlives=[1])
    for outcome in survivors(outcomes):
        names_the_place(outcome)


@nightly
@pytest.mark.parametrize("where", ["in a transfer", "between forward and backward"])
def test_a_rank_that_raises_in_the_middle_ends_all_others(where: str) -> None:
    outcomes = run_fleet(3, partial(checks.train, where=where, action="divide"))
    assert outcomes[1].error == "ZeroDivisionError: in the middle of a step"
    for outcome in survivors(outcomes):
        names_the_place(outcome)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=nightly)])
def test_a_step_that_fails_on_all_ranks_may_be_skipped(ranks: int) -> None:
    outcomes = run_fleet(ranks, checks.a_step_fails_on_all_ranks)
    assert [outcome.result for outcome in outcomes] == ["right values"] * ranks, outcomes


@nightly
@pytest.mark.parametrize("to", ["one rank", "all ranks"])
def test_an_interrupt_ends_every_rank(to: str) -> None:
    """SIGINT at a time when the ranks are anywhere in a step."""

    def interrupt(rank: int, line: str, pids: Sequence[int]) -> None:
        if rank == 1 and line == "step 3":
            for pid in pids if to == "all ranks" else pids[1:2]:
                os.kill(pid, signal.SIGINT)

    outcomes = run_fleet(3, partial(checks.train, where="", action="", pause_s=0.2), meanwhile=interrupt)
    interrupted = [outcome for outcome in outcomes if outcome.error.startswith("KeyboardInterrupt")]
    assert outcomes[1] in interrupted
    for outcome in outcomes:
        if outcome not in interrupted:
            names_the_place(outcome)


needs_network = pytest.mark.skipif(why_unshaped() is not None, reason=f"links cannot be shaped: {why_unshaped()}")


@nightly
@needs_network
def test_a_link_that_is_cut_ends_every_rank_with_an_error_that_says_where() -> None:
    with Network(2, Shaping("100mbit")) as network:

        def cut(rank: int, line: str, pids: Sequence[int]) -> None:
            if rank == 1 and line == "step 3":
                network.disconnect(1)

        outcomes = run_fleet(
            2,
            partial(checks.train, where="", action="", pause_s=0.3),
            meanwhile=cut,
            enter=[partial(checks.join_namespace, name) for name in network.names],
            host=address(0),
        )
    for outcome in outcomes:
        assert outcome.error.startswith("TransferError"), outcome
        assert "region" in outcome.error


@nightly
@needs_network
def test_a_link_that_becomes_ten_times_slower_changes_no_value() -> None:
    with Network(2, Shaping("50mbit")) as network:
        slowed: list[float] = []

        def slow(rank: int, line: str, pids: Sequence[int]) -> None:
            if rank == 1 and line == "step 3":
                network.shape(Shaping("5mbit"))
                slowed.append(time.monotonic())

        outcomes = run_fleet(
            2,
            partial(checks.train, where="", action="", rows=2048),  # 98 kB a message
            meanwhile=slow,
            enter=[partial(checks.join_namespace, name) for name in network.names],
            host=address(0),
        )
    assert slowed
    assert [outcome.result for outcome in outcomes] == ["right values"] * 2, outcomes
    took = [float(line.removeprefix("took ")) for line in outcomes[0].told if line.startswith("took")]
    assert max(took[4:]) > 2 * min(took[1:3]), took
