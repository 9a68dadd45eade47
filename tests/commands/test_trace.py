"""`fo-compiler trace`: a rewritten graph is dumped, run under the profiler, and both timelines come out in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fo_compiler import Options
from fo_compiler.cli import main
from fo_compiler.commands.trace import Measured, Predicted, duration_ms, find_measured, find_predicted, merge
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.runtime.profile import parse_range, transfer_range
from fo_compiler.runtime.transport import use_transport
from tests.graphs import all_gather, capture

RANKS = 2
RUNS = 3
LABEL = (
    "region ag0 of the forward graph (all_gather_into_tensor_1), step 2, group 'tp': rank 0 sends to 1, receives from 3"
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, threads here: a region compiled with dumps, then run three times, rank 0 under a profiler."""
    directory = tmp_path_factory.mktemp("run")
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    world = LocalWorld(RANKS)
    graphs = []
    for rank in range(RANKS):
        gm = capture(lambda x, w: torch.relu(all_gather(x, 0, RANKS) @ w), [x, w])
        dump_dir = str(directory) if rank == 0 else None
        overlap(
            gm.graph, Options(rewrite="always", schedule="ring", dump_dir=dump_dir), world.transport(rank), pin=False
        )
        gm.recompile()
        graphs.append(gm)

    def steps(rank: int) -> None:
        with use_transport(world.transport(rank)):
            if rank:
                for _ in range(RUNS):
                    graphs[rank](x, w)
                return
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                for _ in range(RUNS):
                    graphs[rank](x, w)
            profiler.export_chrome_trace(str(directory / "rank0_profile.json"))

    world.run(steps)
    return directory


def merged(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of a merged trace by the name of their process."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    return {name: [e for e in events if e["pid"] == pid and e["ph"] == "X"] for pid, name in names.items()}


def test_predicted_and_measured_timelines_are_in_one_trace(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_dir / "merged.json"
    assert main(["trace", str(run_dir), "--out", str(out)]) == 0
    assert (
        f"ag0 (all_gather ring): predicted {duration_ms(find_predicted(run_dir)[0].events):.3f} ms, {RUNS} measured runs"
        in (capsys.readouterr().out)
    )
    processes = merged(out)
    assert [name for name in processes if "predicted" in name] == [
        f"000_inference ag0 predicted, rank {rank} (all_gather ring)" for rank in range(RANKS)
    ]
    measured = {name: spans for name, spans in processes.items() if "measured" in name}
    assert list(measured) == [f"000_inference ag0 measured, rank 0, run {run}" for run in range(RUNS)]
    for spans in measured.values():
        assert min(span["ts"] for span in spans) == 0
        assert [(s["args"]["what"], s["args"]["step"]) for s in spans if "what" in s["args"]] == [
            ("post", "0"),
            ("wait", "0"),
        ]
        assert any(span["name"] == "aten::mm" for span in spans)  # what ran under the transfer


def test_a_second_trace_does_not_take_the_first_one_for_a_profile(run_dir: Path) -> None:
    for _ in range(2):
        assert main(["trace", str(run_dir)]) == 0
        assert sum("measured" in name for name in merged(run_dir / "timelines.json")) == RUNS


def test_a_range_says_region_step_group_peers_and_bytes(run_dir: Path) -> None:
    first = find_measured(run_dir / "rank0_profile.json")[0]
    about = [found for event in first.events if (found := parse_range(event["name"]))]
    assert [(a["what"], a["region"], a["step"], a["bytes"]) for a in about] == [
        ("post", "ag0", "0", str(4 * 8 * 4)),
        ("wait", "ag0", "0", str(4 * 8 * 4)),
    ]
    assert {a["peers"] for a in about} == {"rank 0 sends to 1, receives from 1"}
    assert all(a["collective"].startswith("all_gather") for a in about)


def test_a_range_is_read_back_as_it_was_written() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, transfer_range("wait", LABEL, torch.ones(10)):
        pass
    (name,) = [event.name for event in profiler.events() if event.name.startswith("fo_compiler")]
    assert parse_range(name) == {
        "what": "wait", "region": "ag0", "graph": "forward", "collective": "all_gather_into_tensor_1", "step": "2", "group": "tp",
        "peers": "rank 0 sends to 1, receives from 3", "bytes": "40",
    }  # fmt: skip


def test_there_is_no_range_where_no_profiler_records() -> None:
    assert transfer_range("post", LABEL, torch.ones(1)) is transfer_range("wait", LABEL, torch.ones(1))


def test_a_directory_without_dumps_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert f"FO_DUMP_DIR={tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", '{"traceEvents": [', "{}", "[]"])
def test_a_timeline_that_is_none_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank0" / "000_forward" / "ag0_predicted.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert main(["trace", str(tmp_path)]) == 2
    assert f"{path}: expected a timeline of a dump" in capsys.readouterr().err


def test_a_region_that_is_not_there_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run_dir), "--region", "rs7"]) == 2
    assert "none that fits" in capsys.readouterr().err


def test_a_region_of_the_backward_graph_does_not_show_runs_of_the_forward_graph() -> None:
    predicted = [
        Predicted(f"{number:03}_{graph}", "ag0", "ring", []) for number, graph in enumerate(("forward", "backward"))
    ]
    measured = [Measured(0, graph, "ag0", 0.0, 1.0, []) for graph in ("forward", "backward", "backward")]
    assert merge(predicted, measured)[1] == [1, 2]
