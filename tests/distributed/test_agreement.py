"""Ranks that decided differently end in an error that names them, on every rank, within the group's time-out."""

from __future__ import annotations

import pytest

from . import agreement_checks as checks
from .harness import World

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture
def two(tmp_path):
    world = World(2, str(tmp_path))
    yield world
    world.close()


def test_another_option_on_one_rank_is_an_error_on_both(two: World) -> None:
    for outcome in two.run(checks.other_option_on_rank_1, "error"):
        assert outcome.startswith("DecisionsDifferError")
        for part in ("all_gather_into_tensor", "ring", "direct x2", "rank 1" if "rank 1" in outcome else "rank 0"):
            assert part in outcome


def test_another_option_on_one_rank_makes_both_plain_where_asked(two: World) -> None:
    assert two.run(checks.other_option_on_rank_1, "plain") == ["ok (8, 5)"] * 2


def test_another_length_on_one_rank_ends_both_within_the_time_out(two: World) -> None:
    first, second = two.run(checks.other_length_on_rank_1_at_step_3, timeout_s=100)
    assert first.startswith("step 3: TransferError")
    for part in ("region ag0", "step 0", "group", "sends to 1", "Ranks [1] wait to run graph 2"):
        assert part in first
    assert second.startswith("step 3: AgreementError")
    assert "Ranks [0] of the group did not come" in second
    for outcome in (first, second):
        assert "tensor float32[16, 6] along dim 0 (not tensor float32[8, 6] along dim 0)" in outcome


def test_a_warm_cache_on_one_rank_waits_for_nobody_and_runs_the_same(tmp_path) -> None:
    for directory, warm in ((f"{tmp_path}/{{rank}}", [False, False]), (f"{tmp_path}/fresh{{rank}}", None)):
        if warm is None:  # rank 1 finds its cache of the first round, rank 0 has none
            (tmp_path / "1").rename(tmp_path / "fresh1")
            warm = [False, True]
        world = World(2, str(tmp_path))
        try:
            outcomes = world.run(checks.compile_with_own_cache, directory)
        finally:
            world.close()
        assert [outcome for outcome, _, _ in outcomes] == ["ok (8, 5)"] * 2
        assert [hits > 0 for _, hits, _ in outcomes] == warm
        assert [records for _, _, records in outcomes] == [1, 1]
