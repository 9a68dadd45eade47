"""`fo-compiler plan` as a user runs it."""

from __future__ import annotations

import itertools
import json
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from fo_compiler.cli import main
from fo_compiler.schedule import Kind
from fo_compiler.schedule.presets import PRESETS

TABLE_1 = ["--kind", "all_gather", "--ranks", "4", "--compute-ms", "19.625", "--transfer-ms", "14.6"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["plan", *arguments]) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 else captured.err


def test_the_figures_of_table_1(capsys: pytest.CaptureFixture[str]) -> None:
    figures = json.loads(plan(capsys, *TABLE_1, "--json"))
    assert figures == {
        "schedule": "ring",
        "slices_per_rank": 1,
        "predicted_ms": pytest.approx(78.5),
        "serial_ms": pytest.approx(122.3),
        "sliced_ms": pytest.approx(83.975),
        "bound_ms": pytest.approx(78.5),
        "hidden_fraction": pytest.approx(1.0),
    }


def test_the_text_shows_timeline_times_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, *TABLE_1)
    assert "schedule ring" in text
    assert "<- chosen" in text
    assert "why: predicted 35.8% faster" in text
    assert "optimal: it meets the lower bound of 78.5 ms" in text
    for rank in range(4):
        assert f"rank {rank} of 4" in text
    assert "closed form: Max(N*m*t_c, " in text
    assert "with N = 4, m = 1, t_b = 14600, t_c = 19625: 78.5000 ms" in text
    assert "(N m - 1) t_c, overheads aside: holds" in text
    assert plan(capsys, *TABLE_1, "--rank", "2").count(" of 4: ") == 1


@pytest.mark.parametrize("kind", [str(kind) for kind in Kind])
@pytest.mark.parametrize("machine", ["h100-nvlink", "h100-nvlink-infiniband"])
def test_every_kind_by_shape_in_under_a_second(kind: str, machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--m", "8192", "--k", "4096", "--n", "1024", "--dtype", "bf16", "--machine", machine]
    start = time.process_time()
    figures = json.loads(plan(capsys, "--kind", kind, "--ranks", "8", *shape, "--json"))
    assert time.process_time() - start < 1.0
    assert 0 < figures["predicted_ms"] <= figures["serial_ms"]


def test_the_formula_with_contention_is_that_of_the_chosen_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--m", "8192", "--k", "4096", "--n", "8192", "--machine", "h100-nvlink", "--slices-per-rank", "1"]
    arguments = ["--kind", "reduce_scatter", "--ranks", "8", *shape]
    figures = json.loads(plan(capsys, *arguments, "--json"))
    formula = next(line for line in plan(capsys, *arguments).splitlines() if " with N = 8" in line)
    assert formula.endswith(f": {figures['predicted_ms']:.4f} ms")


def test_a_machine_file_does_as_well_as_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PRESETS["a100-nvlink"].save(tmp_path / "mine.json")
    shape = ["--kind", "all_gather", "--ranks", "8", "--m", "8192", "--k", "4096", "--n", "1024", "--json"]
    by_file = plan(capsys, *shape, "--machine", str(tmp_path / "mine.json"))
    assert by_file == plan(capsys, *shape, "--machine", "a100-nvlink")


def test_leaving_alone_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--kind", "all_gather", "--ranks", "4", "--compute-ms", "100", "--transfer-ms", "1"]
    figures = json.loads(plan(capsys, *arguments, "--json"))
    assert figures["schedule"] == "plain"
    assert figures["predicted_ms"] == figures["serial_ms"]
    text = plan(capsys, *arguments)
    assert "less than the margin" in text
    assert next(line for line in text.splitlines() if "<- chosen" in line).strip().startswith("plain")


def test_the_trace_has_a_process_a_rank_and_a_thread_a_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(capsys, *TABLE_1, "--trace", str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = [(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert sorted(names) == [(rank, stream) for rank in range(4) for stream in ("compute", "recv", "send")]
    assert {event["pid"] for event in events} == set(range(4))
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(78.5e3)
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans)), "Perfetto needs nesting"


def test_the_svg_is_a_picture_of_every_span(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(capsys, *TABLE_1, "--svg", str(tmp_path / "plan.svg"))
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    rectangles = [element for element in root.iter() if element.tag.endswith("rect")]
    assert len(rectangles) == 4 * (4 + 3 + 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compute-ms", "1"], "both --compute-ms and --transfer-ms"),
        ([], "expected either --m, --k, --n and --machine, or --compute-ms"),
        (["--m", "64", "--k", "64", "--n", "64"], "also needs --machine"),
        (
            ["--m", "63", "--k", "64", "--n", "64", "--machine", "h100-nvlink"],
            "'--m': expected a multiple of the 4 ranks",
        ),
        (["--m", "64", "--k", "64", "--n", "64", "--machine", "h100-nvlnk"], "Did you mean 'h100-nvlink'"),
        (["--compute-ms", "1", "--transfer-ms", "1", "--schedule", "spiral"], "no schedule family 'spiral'"),
        (["--compute-ms", "1", "--transfer-ms", "1", "--rank", "7"], "a rank from 0 to 3, got 7"),
        (["--compute-ms", "1", "--transfer-ms", "1", "--rank", "7", "--json"], "a rank from 0 to 3, got 7"),
        (
            ["--compute-ms", "1", "--transfer-ms", "1", "--svg", "no/such/directory.svg"],
            "no/such/directory.svg: No such file",
        ),
        (
            ["--m", "64", "--k", "64", "--n", "64", "--machine", "h100-nvlink", "--dtype", "fp12"],
            "'--dtype': expected one of fp64",
        ),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in plan(capsys, "--kind", "all_gather", "--ranks", "4", *arguments, status=2)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *(("--ranks", value, "a whole number of at least 1") for value in ("0", "-1", "x", "1.5")),
        *(("--margin", value, "a number of at least 0 and below 1") for value in ("1", "nan", "x")),
        *(("--compute-ms", value, "a finite number of at least 0") for value in ("-1", "inf", "x")),
    ],
)
def test_a_wrong_number_is_a_usage_error(
    name: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--kind", "all_gather", "--ranks", "4", name, value])
    assert stopped.value.code == 2
    assert f"{name}: expected {expected}, got {value!r}" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "plan" in capsys.readouterr().out
