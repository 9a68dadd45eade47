"""The benchmarks: what they parse and compute, and one short unshaped run of each kind."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import __main__ as everything
from benchmarks import network, never_slower, outcome, overlap, report, timeline, training
from benchmarks.network import Shaping, parse_rate
from benchmarks.regions import KINDS, Case
from benchmarks.results import save
from benchmarks.world import World
from fo_compiler.calibration import LinkFit
from fo_compiler.records import Record
from fo_compiler.schedule import Kind
from fo_compiler.schedule.choose import Region as RegionNumbers
from fo_compiler.schedule.choose import choose
from fo_compiler.schedule.machine import simple_machine
from fo_compiler.schedule.network import TwoLevel, Uniform

KEYS = {"serial_ms", "inductor_ms", "sliced_ms", "overlap_ms", "compute_ms", "comm_ms", "bound_ms", "hidden"}
CASE = Case("all_gather", 4, slice_mb=2, slice_ms=25)
STEP = "region ag0 of the forward graph (all_gather), step 0, group '0': rank 0 sends to 1, receives from 3, 8 bytes"


@pytest.mark.parametrize(("text", "bits"), [("1gbit", 1e9), ("2.5gbit", 2.5e9), ("500mbit", 5e8), ("64kbit", 64e3)])
def test_rates_are_read_as_tc_writes_them(text: str, bits: float) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "1", "fast", "1gbps", "-1gbit", "0mbit"])
def test_a_wrong_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="500mbit" if text != "fast" else "fast"):
        parse_rate(text)


def test_a_slow_rank_has_part_of_the_rate() -> None:
    shaping = Shaping("1gbit", slow_rank=2, slow_factor=0.25)
    assert [shaping.bits_per_second(rank) for rank in range(4)] == [1e9, 1e9, 0.25e9, 1e9]


def test_every_rank_has_an_address_of_its_own() -> None:
    assert len({network.address(rank) for rank in range(16)}) == 16


def test_a_case_moves_the_bytes_it_says() -> None:
    assert CASE.slice_bytes == 2 * 2**20
    m, k, _ = CASE.shape
    assert m * k * 4 == 4 * CASE.slice_bytes


def test_the_bound_is_compute_where_the_link_is_fast_and_the_link_where_it_is_slow() -> None:
    fast = outcome.bound_of(CASE, 100e3, Uniform(0.0, 100.0))
    assert fast.us == pytest.approx(100e3)
    slow = outcome.bound_of(CASE, 100e3, Uniform(0.0, 0.01))
    assert slow.us == pytest.approx(3 * CASE.slice_bytes / 10 + 100e3 / 128)  # the last of 32 slices a rank is computed


def test_the_bound_of_limited_links_is_of_their_rate_and_gives_a_burst_for_free() -> None:
    shaping = network.Shaping("100mbit")
    links = shaping.links(4)
    sent_us = 3 * CASE.slice_bytes / (network.PAYLOAD * 12.5)
    least = outcome.bound_of(CASE, 1e3, links, shaping.burst_us).us
    assert least == pytest.approx(sent_us + 1e3 / 128 - 128 * 1024 / 12.5)
    assert outcome.bound_of(CASE, 1e6, links, shaping.burst_us).us == 1e6, "compute gets no burst"


@pytest.mark.parametrize(
    "shaping",
    [network.Shaping("100mbit", slow_rank=1), network.Shaping("100mbit", nodes=2)],
    ids=["slow link", "nodes"],
)
def test_the_bound_knows_the_slow_links(shaping: network.Shaping) -> None:
    exchange = replace(CASE, kind="all_to_all")
    alike = outcome.bound_of(exchange, 1e3, network.Shaping("100mbit").links(4)).us
    assert outcome.bound_of(exchange, 1e3, shaping.links(4)).us > 1.9 * alike


def test_a_turn_lasts_as_long_as_its_slowest_rank() -> None:
    assert outcome.slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 3.0]}]) == {"a": [2.0, 5.0]}


def test_the_summary_has_the_promised_keys_and_the_hidden_share() -> None:
    names = ["serial", "inductor", "sliced_2", "sliced_4", "sliced_8", "overlap", "compute", "collective", "transfers"]
    values = [160.0, 160.0, 130.0, 126.0, 128.0, 103.0, 100.0, 60.0, 57.0]
    row = outcome.summary(
        {name: [value] * 3 for name, value in zip(names, values, strict=True)}, CASE, Uniform(0.0, 1.0)
    )
    assert set(row) >= KEYS
    assert row["hidden"] == pytest.approx(1 - 3 / 57, abs=1e-3)
    assert (row["sliced_ms"], row["sliced_in"], row["comm_ms"]) == (126.0, 4, 57.0)


ROW: dict[str, Any] = {
    "kind": "all_gather", "ranks": 4, "hidden": 0.99, "of_bound": 1.01, "schedule": None, "predicted_ms": None,
    "spread": 0.01, "links_slow": 0.0, "slice_mb": 2.0, **dict.fromkeys(outcome.COLUMNS, 1.0),
}  # fmt: skip


def test_the_table_has_a_column_for_the_bound() -> None:
    head, _, body = outcome.table([ROW]).splitlines()
    assert "bound" in head
    assert "left alone" in body


def test_a_case_that_failed_says_so_in_the_table_and_the_others_stay() -> None:
    failed = {
        "kind": "chain",
        "ranks": 8,
        "slice_mb": 2.0,
        "failed": "failed: rank 3: the process was ended by SIGKILL",
    }
    head, _, body = outcome.table([failed]).splitlines()
    assert "SIGKILL" in body
    assert body.count("|") == head.count("|")


def test_what_does_not_fit_the_time_is_listed_as_not_measured() -> None:
    setup = overlap.Setup(None, "unshaped", 3, 1.0)
    rows = list(overlap.run([CASE, replace(CASE, kind="chain")], setup, {}, end=0.0))
    assert [row["kind"] for row in rows] == ["all_gather", "chain"]
    assert all("no time left" in row["failed"] for row in rows)


def test_links_between_two_nodes_are_a_network_of_two_levels() -> None:
    fit = {"latency_us": 10.0, "median_error": 0.0, "worst_error": 0.0}
    crossing = {(1, 2), (3, 0)}
    links = {
        (a, (a + 1) % 4): LinkFit(bandwidth_GBps=0.05 if (a, (a + 1) % 4) in crossing else 0.1, **fit) for a in range(4)
    }
    collectives = {Kind.ALL_TO_ALL: LinkFit(bandwidth_GBps=0.01, **fit)}
    world = SimpleNamespace(run=lambda *_, **__: [(links, collectives, 300.0)])
    measured = overlap.links_measured(world, CASE, Shaping("1gbit", nodes=2))  # type: ignore[arg-type]
    found = measured.network
    assert [(c.kind, c.ranks, c.bandwidth_GBps) for c in measured.collectives] == [("all_to_all", 4, 0.01)]
    assert measured.post_us == 300.0
    assert isinstance(found, TwoLevel)
    assert (found.ranks_per_node, found.inside.bandwidth_GBps, found.adapter_GBps) == (2, 0.1, 0.05)


@pytest.mark.parametrize("rewrite", [True, False])
def test_the_prediction_is_read_from_the_reason_as_the_scheduler_writes_it(rewrite: bool) -> None:
    machine = simple_machine(bandwidth_GBps=0.1 if rewrite else 1e6)
    choice = choose(Kind.ALL_GATHER, machine, 4, RegionNumbers(lambda m: 25e3 / m, 2e6))
    assert choice.rewrite is rewrite
    assert choice.schedule is not None
    schedule = choice.schedule.describe() if rewrite else None
    record = Record("forward", "all_gather", 4, rewrite, schedule, (), choice.reason)
    assert outcome.predicted_ms(record) == pytest.approx(choice.predicted_us / 1e3, rel=1e-3)


def test_a_chain_that_is_one_region_is_predicted_once_and_two_regions_add_up() -> None:
    def made(name: str, reason: str) -> Record:
        return Record("forward", name, 4, True, "chain ring", ("mm", "mm_1"), reason)

    one = "predicted 30% faster on machine m: plain 30 ms, chain ring 20 ms, bound 20 ms"
    told = outcome.told([made("all_gather", one), made("reduce_scatter", one)])
    assert (told["predicted_ms"], told["rewritten"], told["schedule"]) == (20.0, 2, "chain ring")
    other = "predicted 20% faster on machine m: plain 30 ms, chain ring 25 ms, bound 20 ms"
    assert outcome.told([made("all_gather", one), made("reduce_scatter", other)])["predicted_ms"] == 45.0


def test_a_chain_sends_twice_what_a_gather_does_and_its_bound_knows_it() -> None:
    links = Uniform(0.0, 0.01)
    chain = outcome.bound_of(replace(CASE, kind="chain"), 0.0, links).us
    assert chain >= 1.9 * outcome.bound_of(CASE, 0.0, links).us


def test_a_record_without_a_prediction_has_none() -> None:
    assert outcome.predicted_ms(Record("forward", "all_gather", 4, False, None, (), "no matmul reads it")) is None


def sliced_on_a_rank(kind: str) -> float:
    """Largest difference between the region and what is sliced by hand, both eager, real matmuls."""
    from benchmarks.regions import Region, example_input
    from benchmarks.ways import sliced

    case = Case(kind, 2, slice_mb=0.05, slice_ms=0.0, compute="matmul")
    region, x = Region(case), example_input(case)
    whole = torch.ops._c10d_functional.wait_tensor(region(x))
    worst = 0.0
    for chunks in (2, 4):
        pieces = [piece.view(-1, 512 // chunks, piece.shape[1]) for piece in sliced(region, x, chunks)]
        worst = max(worst, (torch.stack(pieces, 1).view(whole.shape) - whole).abs().max().item())
    return worst


@pytest.mark.slow
def test_what_is_sliced_by_hand_computes_the_region() -> None:
    with World(2, None) as world:
        worst = {kind: max(world.run(sliced_on_a_rank, kind, timeout_s=60)) for kind in KINDS}
    assert all(difference < 1e-3 for difference in worst.values()), worst


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_reported_with_its_signal() -> None:
    with World(1, None) as world, pytest.raises(RuntimeError, match=r"rank 0: .*SIGKILL"):
        world.run(die, timeout_s=60)


def test_shapes_are_different_and_reproducible() -> None:
    chosen = never_slower.shapes(100)
    assert len(set(chosen)) == 100
    assert chosen == never_slower.shapes(100)
    assert {kind for kind, *_ in chosen} == set(never_slower.KINDS)


def ran(auto: float, always: float, rewritten: bool) -> list[dict[str, object]]:
    times = {"inductor": [10.0] * 3, "again": [10.0] * 3, "auto": [auto] * 3, "always": [always] * 3}
    return [{"times": times, "rewritten": rewritten, "schedule": "ring", "reason": ""}] * 2


@pytest.mark.parametrize(
    ("auto", "always", "rewritten", "wrong"),
    [
        (10.0, 12.0, False, ""),
        (10.0, 8.0, False, "left alone, and would be faster"),
        (8.0, 8.0, True, ""),
        (12.0, 12.0, True, "rewritten, and slower"),
    ],
)
def test_a_decision_is_wrong_if_the_other_one_is_faster(
    auto: float, always: float, rewritten: bool, wrong: str
) -> None:
    row = never_slower.judge(("all_gather", 1, 1, 1), ran(auto, always, rewritten))
    assert row["wrong"] == wrong
    assert row["speedup"] == pytest.approx(10 / auto, abs=1e-4)


def test_a_ratio_has_an_interval_that_holds_its_median() -> None:
    rng = random.Random(0)
    held = 0
    for _ in range(300):
        above, below = ([10 * math.exp(rng.gauss(0, 0.3)) for _ in range(40)] for _ in range(2))
        middle, low, high = never_slower.ratio(above, below)
        assert low <= middle <= high
        held += low <= 1 <= high
    assert 0.93 < held / 300 < 0.99
    assert never_slower.ratio([2.0] * 9, [1.0] * 9) == (2.0, 2.0, 2.0)


def test_the_conclusion_counts_what_was_wrong() -> None:
    rows = [never_slower.judge(("all_gather", 1, 1, 1), ran(auto, 10.0, True)) for auto in [8.0] * 19 + [12.0]]
    found = never_slower.conclusion(rows)
    assert (found["regions"], found["rewritten"], found["wrong_rewritten"]) == (20, 20, 1)
    assert (found["slower"], found["slower_and_rewritten"], found["Inductor_slower_than_itself"]) == (1, 1, 0)
    assert found["worst"] < found["percentile_5"] == statistics.median(row["speedup"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all_gather", pytest.param("chain", marks=pytest.mark.nightly)])
def test_an_unshaped_run_prints_the_promised_figures(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "why_unshaped", lambda: "a test")
    monkeypatch.setattr("benchmarks.world.why_unshaped", lambda: "a test")
    options = ["--kind", kind, "--ranks", "2", "--slice-mb", "0.25", "--slice-ms", "5", "--repeats", "2", "--json"]
    assert overlap.main(options) == 0
    row = json.loads(capsys.readouterr().out)
    assert set(row) >= KEYS
    assert "unshaped" in row["links"]
    # Two slices of 5 ms: the stand-in sleeps at least that long. How much longer is the machine's business.
    assert row["compute_ms"] >= 10
    assert row["overlap_ms"] >= 10
    assert row["predicted_ms"] >= 10


def test_a_case_is_measured_again_where_its_spread_was_large_and_the_quieter_run_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spreads = {"all_gather": 0.01, "reduce_scatter": 0.2}
    asked: list[str] = []

    def run(cases: list[Case], setup: overlap.Setup, *_: object) -> Iterator[dict[str, Any]]:
        for case in cases:
            asked.append(case.kind)
            yield ROW | overlap._named(case, setup) | {"spread": spreads[case.kind], "overlap_ms": len(asked)}

    monkeypatch.setattr(overlap, "run", run)
    monkeypatch.setattr("benchmarks.world.why_unshaped", lambda: "a test")
    path = tmp_path / "rows.json"
    words = ["--sweep", "--ranks", "2", "--ratio", "1", *(f"--kind={kind}" for kind in spreads), "--out", str(path)]
    for redo, spread in ((), 0.2), (("--redo", "0.03"), 0.1), (("--redo", "0.03"), 0.3):
        spreads["reduce_scatter"] = spread
        assert overlap.main([*words, *redo]) == 0
    assert asked == ["all_gather", "reduce_scatter", "reduce_scatter", "reduce_scatter"]
    assert [(row["overlap_ms"], row["spread"]) for row in json.loads(path.read_text())] == [(1, 0.01), (3, 0.1)]


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        (None, {"failed": "no"}, "new"),
        ({"failed": "no"}, {"failed": "again"}, "new"),
        ({"spread": 0.5, "links_slow": 0.0}, {"failed": "no"}, "old"),
        ({"spread": 0.5, "links_slow": 0.0}, {"spread": 0.4, "links_slow": 0.0}, "new"),
        ({"spread": 0.5, "links_slow": 0.0}, {"spread": 0.5, "links_slow": 0.0}, "old"),
        ({"spread": 0.1, "links_slow": 0.0}, {"spread": 0.01, "links_slow": 0.2}, "old"),
    ],
)
def test_of_two_runs_the_quieter_one_stays(old: dict[str, Any] | None, new: dict[str, Any], kept: str) -> None:
    assert overlap.quieter(old, new) is (new if kept == "new" else old)


def test_exposed_time_is_that_of_communication_in_a_phase_and_counted_once() -> None:
    events = [
        ("phase forward", 0.0, 100.0),
        ("phase backward", 100.0, 200.0),
        ("aten::mm", 0.0, 50.0),
        ("fo_compiler wait region ag0 ...", 50.0, 60.0),
        ("_c10d_functional::wait_tensor", 52.0, 58.0),  # inside of it
        ("_c10d_functional::all_reduce", 120.0, 125.0),
        ("_c10d_functional::wait_tensor", 130.0, 150.0),
        ("fo_compiler wait region ag0 ...", 250.0, 260.0),  # neither forward nor backward
    ]
    assert training.exposed_us(events) == {"forward": 10.0, "backward": 25.0}


def trained(step_ms: float, forward_ms: float, loss: float) -> dict[str, object]:
    exposed = {"forward": forward_ms, "backward": 20.0}
    return {
        "step_ms": [step_ms] * 3,
        "sent_bytes": [250_000, 250_000, 300_000],
        "exposed_ms": exposed,
        "exposed_share": 0.6,
        "losses": [loss],
        "first_step_s": 1.0,
        "peak_mb": 5.0,
    }


def test_what_is_hidden_in_training_is_against_plain_inductor_and_a_failed_way_stays_visible() -> None:
    ways = {
        "inductor": trained(100.0, 40.0, 2.0),
        "scheduled": {"failed": "TypeError: no"},
        "flashoverlap": trained(70.0, 10.0, 2.0),
    }
    records = [("forward", True, "all_gather"), ("backward", False, "reduce_scatter")]
    row = {"ranks": 2, **training.conclude([{"ways": ways, "records": records}] * 2)}
    assert row["ways"]["flashoverlap"]["hidden"] == {"forward": 0.75, "backward": 0.0}
    assert (row["compute_ms"], row["links_ms"], row["bound_ms"]) == (40.0, 0.0, 40.0)
    assert row["collectives"]["forward"] == {"rewritten": 1, "collectives": 1}
    text = training.table([row])
    assert "TypeError: no" in text
    assert "1 of 1, 0 of 1" in text


def test_the_bound_of_a_step_is_the_slowest_link_where_that_takes_longer_than_the_compute() -> None:
    ranks = [{"ways": {"inductor": trained(100.0, 40.0, 2.0)}, "records": []}] * 2
    row = training.conclude(ranks, lambda rank: 1e6 * 2 ** -(rank + 4))  # 250,000 bytes over links of 1/16, 1/32 Mbit/s
    assert row["links_ms"] == row["bound_ms"] == 64_000.0


PROFILED = [
    ("fo_bench::timed_matmul", 1000.0, 26000.0),
    (
        f"fo_compiler post {STEP}",
        500.0,
        900.0,
    ),
    (
        f"fo_compiler wait {STEP}",
        26100.0,
        26200.0,
    ),
]


def test_a_transfer_in_the_picture_lasts_from_its_post_to_the_end_of_its_wait() -> None:
    found = timeline.spans(PROFILED)
    assert [(s["lane"], s["start_ms"], s["end_ms"]) for s in found] == [
        ("compute", 0.5, 25.5),
        ("transfers", 0.0, 25.7),
        ("waits", 25.6, 25.7),
    ]


@pytest.mark.slow
def test_the_picture_is_small_the_same_every_time_and_knows_no_date(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = {"ranks": 4, "links": "a test", "before": timeline.spans(PROFILED), "after": timeline.spans(PROFILED)}
    for name in ("one", "two"):
        timeline.draw(data, tmp_path / f"{name}.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert len(text) < 40_000
    assert "dc:date" not in text
    assert "plain Inductor" in text


def test_the_prediction_table_has_the_median_and_the_worst_error_of_each_kind() -> None:
    row = {"kind": "chain", "compute": "standin", "overlap_ms": 100.0}
    rows = [{**row, "predicted_ms": ms} for ms in (90.0, 101.0, 102.0)] + [{"kind": "chain", "failed": "failed"}]
    assert "| chain | 3 | 2.0% | -10.0% | +1.0% |" in report.prediction(rows)


def test_a_table_without_results_stays_as_it_is(tmp_path: Path) -> None:
    page = "<!-- training -->\nold\n<!-- end -->\n<!-- never_slower -->\nold\n<!-- end -->\n"
    row = never_slower.judge(("all_gather", 1, 1, 1), ran(12.0, 12.0, True))
    save(tmp_path / "never_slower.json", {"conclusion": never_slower.conclusion([row]), "regions": [row]})
    filled = report.fill(page, tmp_path)
    assert "<!-- training -->\nold" in filled
    assert "rewritten, and slower" in filled.partition("never_slower")[2]
    assert filled.count("old") == 1


def test_the_whole_set_has_a_place_in_the_page_for_each_table() -> None:
    page, readme = (page.read_text() for page in report.PAGES)
    for name in {*report.TABLES, "prediction"}:
        assert f"<!-- {name} -->" in page, name
    assert "<!-- overlap_short -->" in readme


def test_the_table_of_the_readme_is_ordered_and_has_no_failed_rows() -> None:
    times = {f"{way}_ms": 10.0 for way in ("inductor", "sliced", "overlap", "bound")}
    row = {"kind": "all_gather", "hidden": 0.98, "of_bound": 1.01, **times}
    rows = [{**row, "ranks": 2, "ratio": 0.5}, {**row, "ranks": 4, "ratio": 1.0}, {**row, "ranks": 4, "ratio": 0.2}]
    _, _, *lines = report.overlap_short([*rows, {"ranks": 4, "kind": "chain", "failed": "failed"}]).splitlines()
    assert [line.split(" | ")[1:3] for line in lines] == [["4", "0.2"], ["4", "1.0"], ["2", "0.5"]]
    assert lines[0].startswith("| all-gather |")


def test_a_part_that_fails_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(arguments: list[str]) -> int:
        raise RuntimeError("no network")

    ran_parts = []
    monkeypatch.setattr(
        everything, "PARTS", {"one": (broken, ""), "two": (lambda words: ran_parts.append(words) or 0, "--x 1")}
    )
    assert everything.main(["--results", str(tmp_path)]) == 1
    assert ran_parts == [["--x", "1", "--out", str(tmp_path / "two.json")]]
    assert "FAILED: one" in capsys.readouterr().out
