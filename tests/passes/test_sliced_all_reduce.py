"""An all-reduce slice by slice, by the library: where it is done, what it looks like, and that it computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fo_compiler.codegen.absent_gpu import CUDA, move_graph
from fo_compiler.dump import graph_text
from fo_compiler.options import Options
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.passes.races import find_races
from fo_compiler.passes.sites import is_collective
from fo_compiler.passes.streams import plan_of
from fo_compiler.records import Record
from fo_compiler.runtime.agreement import decisions
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.schedule.machine import CollectiveTime, Machine
from fo_compiler.schedule.matmul import Roofline
from fo_compiler.schedule.network import Uniform
from fo_compiler.testing import assert_equivalent, rewrite_for_rank, run_ranks
from tests.graphs import all_gather, all_reduce, capture, reduce_scatter
from tests.passes.helpers import check_golden, on_each_rank, rewritten, tensors

FORCED = Options(rewrite="always", schedule="library")


def reduced(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(all_reduce(x @ w))


def machine_file(directory: Path, pairs_GBps: float = 20.0, latency_us: float = 20.0) -> str:
    """Eight ranks: an all-reduce of [4096, 4096] by the library takes about half as long as a matmul of that size."""
    machine = Machine(
        "slow links",
        "a test",
        Uniform(10.0, pairs_GBps),
        Roofline({"bf16": 100.0}, 2000.0, units=64),
        post_us=5.0,
        collectives=(CollectiveTime("all_reduce", 8, latency_us, 6.0),),
    )
    path = directory / "machine.json"
    machine.save(path)
    return str(path)


def decided(function, options: Options, rows: int, ranks: int = 8) -> Record:
    """The record of a graph of any size: nothing is allocated."""
    with FakeTensorMode():
        gm = capture(function, [torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, 4096), (4096, 4096))])
    (record,) = rewrite_for_rank(gm, options, LocalWorld(ranks).transport(0))[1].records
    return record


def test_golden_sliced_all_reduce() -> None:
    gm = rewritten(capture(reduced, tensors((8, 4), (4, 6))), 2, rank=1, schedule="library", slices_per_rank=2)
    check_golden("all_reduce_library.txt", graph_text(gm.graph))


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.sampled_from([2, 3, 4]),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from(["sum", "avg"]),
    st.booleans(),
)
def test_values_are_those_of_the_plain_all_reduce(
    ranks: int, rows: int, columns: int, m: int | None, op: str, batched: bool
) -> None:
    """Any number of rows and columns: what does not divide by the ranks in any dim is left alone."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x @ w)
        return all_reduce(h * 2 @ w.t(), op=op), h

    shape = (2, rows, 5) if batched else (rows, 5)
    inputs = on_each_rank(ranks, shape, (5, columns))
    options = Options(rewrite="always", schedule="library", slices_per_rank=m)
    (record,) = assert_equivalent(capture(function, inputs[0]), inputs, options).records
    assert record.rewritten == ((record.schedule or "").startswith("library")), record


def test_a_matmul_cut_along_its_columns_and_one_in_a_sum_are_slices_too() -> None:
    inputs = on_each_rank(2, (3, 5), (5, 8), (3, 8))
    gm = capture(lambda x, w, y: all_reduce(x @ w + y), inputs[0])
    (record,) = assert_equivalent(gm, inputs, FORCED).records
    assert record.rewritten
    assert "along dim 1" in record.tensor, "3 rows do not divide by 2 ranks"


def test_other_collectives_take_another_schedule() -> None:
    inputs = on_each_rank(2, (4, 5), (5, 8))
    (record,) = assert_equivalent(capture(lambda x, w: reduce_scatter(x @ w, 0, 2), inputs[0]), inputs, FORCED).records
    assert record.rewritten
    assert "library" not in (record.schedule or "")


def test_it_is_chosen_where_it_is_predicted_to_pay_and_says_so(tmp_path: Path) -> None:
    record = decided(reduced, Options(machine=machine_file(tmp_path)), rows=4096)
    assert record.rewritten
    assert (record.schedule or "").startswith("library x")
    assert "library's all-reduce of each slice" in record.reason
    tiny = decided(reduced, Options(machine=machine_file(tmp_path)), rows=8)
    assert not tiny.rewritten


@pytest.mark.parametrize(("margin", "schedule"), [(0.0, "direct"), (0.05, "library"), (None, "library")])
def test_transfers_between_pairs_have_to_be_better_by_what_a_prediction_is_off_by(
    margin: float | None, schedule: str, tmp_path: Path
) -> None:
    """Here they are, by 4 % of the plain time."""
    options = Options(machine=machine_file(tmp_path, 150.0, latency_us=150.0), margin=margin)
    assert (decided(reduced, options, rows=4096).schedule or "").startswith(schedule)


def test_a_matmul_behind_it_makes_the_halves_the_better_choice(tmp_path: Path) -> None:
    record = decided(
        lambda x, w: torch.relu(all_reduce(x @ w)) @ w, Options(machine=machine_file(tmp_path, 150.0)), rows=4096
    )
    assert " + " in (record.schedule or "")


def test_another_schedule_that_is_asked_for_is_used(tmp_path: Path) -> None:
    record = decided(reduced, Options(machine=machine_file(tmp_path), rewrite="always", schedule="ring"), rows=4096)
    assert (record.schedule or "").startswith("ring")


def test_ranks_that_would_sum_other_slices_do_not_agree() -> None:
    """What is compared holds the sizes of the slices: with others the library would wait, or sum other rows."""
    texts = set()
    for m in (1, 2):
        inputs = tensors((8, 4), (4, 6))
        options = Options(rewrite="always", schedule="library", slices_per_rank=m)
        _, published = rewrite_for_rank(capture(reduced, inputs), options, LocalWorld(2).transport(0))
        texts.add(str(decisions(published.records)))
    assert len(texts) == 2
    assert any("library x4 (1:1:1:1)" in text for text in texts)


@pytest.mark.parametrize("slice_matmul", ["auto", "library", "triton"])
def test_beside_regions_with_streams_it_stays_on_the_callers_stream(slice_matmul: str) -> None:
    """On CUDA a gather's transfers have streams of ours, the library's all-reduce one of its own."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = all_gather(x, 0, 2) @ w
        return all_reduce(h.relu() @ v)

    gm = capture(function, tensors((4, 6), (6, 8), (8, 6)))
    move_graph(gm, CUDA)
    options = Options(
        rewrite="always", machine="h100-nvlink", schedule="library", compute_streams=2, slice_matmul=slice_matmul
    )
    published = overlap(gm.graph, options, LocalWorld(2).transport(0), pin=False)
    gathered, summed = (record.schedule or "" for record in published.records)
    assert not gathered.startswith("library")
    assert summed.startswith("library")
    sums = [node for node in gm.graph.nodes if is_collective(node)]
    assert len(sums) == int(summed.partition("x")[2].partition(" ")[0])
    order = [node.name for node in gm.graph.nodes]
    assert all(order.index(node.args[0].name) < order.index(node.name) for node in sums)
    assert find_races(plan_of(gm.graph)) == []


def test_one_graph_serves_every_length_that_has_rows_for_its_slices() -> None:
    """Symbolic rows: slices of sixteen rows or more in the first call."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        torch._check(x.shape[0] % 2 == 0)
        return reduced(x, w)

    gm = capture(function, tensors((94, 4), (4, 7)), {0: (0,)})
    _, published = rewrite_for_rank(gm, FORCED, LocalWorld(2).transport(0))
    assert published.records[0].rewritten
    for rows in (94, 8, 200):
        inputs = on_each_rank(2, (rows, 4), (4, 7))
        world = LocalWorld(2)
        graphs = [rewrite_for_rank(gm, FORCED, world.transport(rank))[0] for rank in range(2)]
        want = inputs[0][0] @ inputs[0][1] + inputs[1][0] @ inputs[1][1]
        for got in run_ranks(lambda rank, graphs=graphs: graphs[rank], inputs, world):
            (value,) = got if isinstance(got, (tuple, list)) else (got,)
            torch.testing.assert_close(value, torch.relu(want))
