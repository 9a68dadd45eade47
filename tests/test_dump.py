from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import fx

from fo_compiler import OptionError, Options
from fo_compiler.dump import graph_text
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.runtime.local import LocalWorld
from tests.graphs import all_gather, all_reduce, capture, reduce_scatter

RANKS = 2


def dumped(directory: Path, gather: bool = True) -> tuple[fx.GraphModule, Path]:
    """A graph with one region, rewritten as rank 0, and where its dump lies."""
    if gather:
        gm = capture(lambda x, w: torch.relu(all_gather(x, 0, RANKS) @ w), [torch.ones(4, 8), torch.ones(8, 6)])
    else:
        gm = capture(lambda x, w: reduce_scatter(x @ w, 0, RANKS), [torch.ones(4, 8), torch.ones(8, 6)])
    before = set(directory.glob("rank0/*"))
    overlap(gm.graph, Options(rewrite="always", dump_dir=str(directory)), LocalWorld(RANKS).transport(0))
    (written,) = set(directory.glob("rank0/*")) - before
    return gm, written


def test_each_graph_gets_its_own_directory_with_all_files(tmp_path: Path) -> None:
    _, first = dumped(tmp_path)
    _, second = dumped(tmp_path, gather=False)
    assert (first.name, second.name) == ("000_inference", "001_inference")
    for directory, tag in ((first, "ag0"), (second, "rs0")):
        assert {path.name for path in directory.iterdir()} == {
            "before.txt",
            "after.txt",
            "records.txt",
            "records.json",
            f"{tag}.dot",
            f"{tag}_timeline.txt",
            f"{tag}_predicted.json",
        }


def test_a_chain_and_an_all_reduce_in_halves_are_dumped_too(tmp_path: Path) -> None:
    chain = capture(
        lambda x, w: reduce_scatter(all_gather(x, 0, RANKS) @ w, 0, RANKS), [torch.ones(4, 8), torch.ones(8, 6)]
    )
    halves = capture(lambda x, w, v: torch.relu(all_reduce(x @ w)) @ v, [torch.ones(4, 8), *[torch.ones(8, 8)] * 2])
    for gm, tags in ((chain, {"chain0"}), (halves, {"rs0", "ag1"})):
        options = Options(rewrite="always", slices_per_rank=2, dump_dir=str(tmp_path))
        overlap(gm.graph, options, LocalWorld(RANKS).transport(0))
        written = sorted(tmp_path.glob("rank0/*"))[-1]
        assert {path.stem for path in written.glob("*.dot")} == tags
    timeline = next(tmp_path.glob("rank0/*/chain0_timeline.txt")).read_text()
    assert "send sum " in timeline
    assert "slices gathered and their sums scattered" in timeline


def test_the_graph_before_shows_the_collective_and_the_graph_after_the_transfers(tmp_path: Path) -> None:
    _, directory = dumped(tmp_path)
    before, after = ((directory / name).read_text() for name in ("before.txt", "after.txt"))
    assert "_c10d_functional.all_gather_into_tensor" in before
    assert "fo_compiler.exchange" not in before
    assert "_c10d_functional.all_gather_into_tensor" not in after
    assert "fo_compiler.exchange" in after
    (matmul,) = [line for line in after.splitlines() if line.startswith("ag0_s1_mm")]
    assert "float32[4, 6]" in matmul
    assert "# ag0 step 1 slice 1 on compute" in matmul
    (exchange,) = [line for line in after.splitlines() if line.startswith("ag0_s0_exchange")]
    assert exchange.endswith("on comm")


def test_records_are_written_as_text_and_as_data(tmp_path: Path) -> None:
    _, directory = dumped(tmp_path)
    assert "1 of 1 collectives rewritten" in (directory / "records.txt").read_text()
    (row,) = json.loads((directory / "records.json").read_text())
    assert row["rewritten"] is True
    assert row["region"] == ["mm"]


def test_the_drawing_has_every_node_of_the_region_and_its_inputs(tmp_path: Path) -> None:
    gm, directory = dumped(tmp_path)
    dot = (directory / "ag0.dot").read_text()
    nodes = [node for node in gm.graph.nodes if node.meta.get("fo") is not None]
    drawn = [node for node in nodes if f'"{node.name}" [fillcolor=' in dot]
    assert len(drawn) >= 5
    assert drawn == nodes
    assert dot.startswith("digraph")
    assert dot.count("{") == dot.count("}")
    assert "->" in dot


def test_the_timeline_shows_the_steps_of_this_rank(tmp_path: Path) -> None:
    _, directory = dumped(tmp_path)
    assert (directory / "ag0_timeline.txt").read_text().strip()


def test_nothing_is_written_without_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gm = capture(lambda x, w: all_gather(x, 0, RANKS) @ w, [torch.ones(4, 8), torch.ones(8, 6)])
    overlap(gm.graph, Options(rewrite="always"), LocalWorld(RANKS).transport(0))
    assert list(tmp_path.iterdir()) == []


def test_a_graph_without_collectives_leaves_no_dump(tmp_path: Path) -> None:
    gm = capture(lambda x: x + 1, [torch.ones(4)])
    overlap(gm.graph, Options(dump_dir=str(tmp_path)), LocalWorld(RANKS).transport(0))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_an_option_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OptionError, match="dump_dir") as caught:
        dumped(blocked / "below")
    assert str(blocked) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission_is_an_option_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OptionError, match="dump_dir"):
        dumped(tmp_path)


def test_a_dump_that_fails_at_the_end_is_logged_and_does_not_stop_the_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with caplog.at_level("WARNING", logger="fo_compiler"):
        _, directory = dumped(tmp_path)
    assert list(directory.iterdir()) == []
    assert "No space left" in caplog.text


def test_the_text_of_a_graph_has_a_line_a_node_with_type_and_call() -> None:
    gm = capture(lambda x: torch.cat([x, x + 1.5], dim=1), [torch.ones(2, 3, dtype=torch.bfloat16)])
    lines = graph_text(gm.graph).splitlines()
    assert len(lines) == len(gm.graph.nodes)
    assert lines[0].split() == ["x_1", "bfloat16[2,", "3]", "placeholder"]
    assert "aten.add.Tensor(x_1, 1.5)" in lines[1]
    assert "bfloat16[2, 6]" in lines[2]
    assert lines[-1].startswith("output")


def test_a_very_long_argument_is_cut_short_in_the_text_of_a_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.reshape.default, (x, list(range(1000)))))
    line = graph_text(graph).splitlines()[1]
    assert len(line) < 250
    assert "..." in line
