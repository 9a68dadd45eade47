"""A matmul whose result is gathered: each slice leaves for all ranks while the next is computed."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fo_compiler.dump import graph_text
from fo_compiler.options import Options
from fo_compiler.passes.decide import Decision, decide
from fo_compiler.passes.separability import NotSeparable
from fo_compiler.passes.sites import Site, is_collective
from fo_compiler.runtime import ops
from fo_compiler.schedule import Kind
from fo_compiler.schedule.machine import Machine, simple_machine
from fo_compiler.schedule.matmul import MatmulPoint, Measured
from fo_compiler.schedule.network import Uniform
from fo_compiler.testing import assert_equivalent
from tests.graphs import all_gather, all_reduce, c10d, capture
from tests.passes.helpers import aten, check_golden, on_each_rank, rewritten, sites, tensors


def logits(x: Tensor, w: Tensor) -> Tensor:
    """x [B, S, K], w [K, V / R]: the logits [B, S, V] on every rank."""
    return all_gather(x @ w, 2, 3)


def decided(function, shapes, options: Options, ranks: int = 8) -> Decision:
    """The decision on a graph of any size: nothing is allocated."""
    with FakeTensorMode():
        gm = capture(function, [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes])
    (site,) = sites(gm, ranks)
    assert isinstance(site, Site)
    return decide(site, options)


def test_golden_gathered_results() -> None:
    gm = rewritten(capture(logits, tensors((1, 4, 4), (4, 6))), 3, rank=1, schedule="direct", slices_per_rank=2)
    check_golden("all_gather_out_direct.txt", graph_text(gm.graph))


def test_a_slice_leaves_for_each_peer_before_the_next_is_computed_and_is_awaited_at_the_end() -> None:
    gm = rewritten(capture(logits, tensors((1, 3, 4), (4, 6))), 3, schedule="direct", slices_per_rank=3)
    kinds = {ops.exchange: "post", ops.wait: "wait", aten.mm.default: "mm"}
    order = [kinds[node.target] for node in gm.graph.nodes if node.target in kinds]
    assert order == ["mm", "post", "post"] * 3 + ["wait"] * 6
    assert not [node for node in gm.graph.nodes if is_collective(node)]


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["direct", "ring", "bidirectional"])
def test_any_dim_may_be_gathered_and_any_other_be_cut(dim: int, schedule: str) -> None:
    def function(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x @ w) + bias
        return all_gather(y, dim, 3), y  # the shard is kept, too

    for rows, columns in ((4, 5), (3, 4), (2, 2)):  # of which one dim or both divide
        inputs = on_each_rank(3, (1, rows, 4), (4, columns), (columns,))
        options = Options(rewrite="always", schedule=schedule)
        (record,) = assert_equivalent(capture(function, inputs[0]), inputs, options).records
        assert record.rewritten
        assert record.schedule is not None
        assert record.schedule.startswith(f"{schedule} x")
        assert record.region == ("mm",)


def test_blocks_of_single_ranks_and_a_second_join_are_still_there() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        blocks = torch.chunk(c10d.wait_tensor(c10d.all_gather_into_tensor(x @ w, 3, "0")), 3)
        return torch.cat(blocks, 1), torch.cat(blocks, 0) * 2, blocks[1] + 1

    inputs = on_each_rank(3, (4, 4), (4, 6))
    gm = capture(function, inputs[0])
    assert any(node.target in (aten.split.Tensor, operator.getitem) for node in gm.graph.nodes)
    (record,) = assert_equivalent(gm, inputs).records
    assert record.rewritten


def machine_file(folder: Path, machine: Machine) -> str:
    machine.save(folder / "machine.json")
    return str(folder / "machine.json")


def test_large_logits_are_gathered_under_their_matmul_and_small_ones_are_left_alone() -> None:
    options = Options(machine="h100-pcie5")
    for rows, rewrites in ((8192, True), (16, False)):
        decision = decided(lambda x, w: all_gather(x @ w, 1, 8), ((rows, 8192), (8192, 16000)), options)
        assert (decision.schedule is not None) is rewrites, decision.reason
        assert decision.region.site.kind is Kind.ALL_GATHER_OUT
        assert decision.choice is not None
        assert decision.choice.hidden_fraction < 1, "the transfers of the last slice are exposed"


@pytest.mark.parametrize(("before", "behind", "kind"), [(65536, 64, Kind.ALL_GATHER_OUT), (64, 8192, Kind.ALL_GATHER)])
def test_of_two_matmuls_on_either_side_the_one_that_hides_more_is_taken(before: int, behind: int, kind: Kind) -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return all_gather(x @ w, 0, 8) @ v

    shapes = (2048, before), (before, 4096), (4096, behind)
    decision = decided(function, shapes, Options(machine="h100-pcie5"))
    assert decision.region.site.kind is kind, decision.reason
    assert len(decision.region.matmuls) == 1


def test_the_copies_that_put_slices_together_are_counted(tmp_path: Path) -> None:
    """Slices that are gathered along dim 0 lie in place without us; cut along another dim they are copied twice."""
    shapes = (64, 64), (64, 64)
    times = []
    for GBps in (1e9, 1e-3):
        machine = simple_machine(
            network=Uniform(1.0, 1.0), matmul=Measured((MatmulPoint(64, 64, 64, "bf16", 100.0),), GBps)
        )
        decision = decided(
            lambda x, w: all_gather(x @ w, 0, 2),
            shapes,
            Options(rewrite="always", machine=machine_file(tmp_path, machine)),
            2,
        )
        assert decision.choice is not None
        assert decision.choice.best is not None
        times.append(decision.choice.best.predicted_us - decision.choice.plain_us)
    copied_us = 2 * 2 * 64 * 64 * 2 / (1e-3 * 1e3)
    assert times[1] - times[0] >= copied_us * (1 - 1e-6)


def test_one_slice_a_rank_hides_nothing_and_the_reason_says_so() -> None:
    inputs = on_each_rank(3, (1, 4, 4), (4, 6))
    options = Options(rewrite="always", slices_per_rank=1)
    (record,) = assert_equivalent(capture(logits, inputs[0]), inputs, options).records
    assert not record.rewritten
    assert "nothing is computed while results travel" in record.reason


@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        (
            lambda x, w: all_gather(x @ w, 0, 2),
            ((1, 5), (5, 1)),
            "no matmul reads the gathered tensor, and the one that makes it is not cut: dim 0 of .* does not divide",
        ),
        (
            lambda x, w: torch.cumsum(all_gather(x @ w, 0, 2), 0) @ w,
            ((1, 1), (1, 1)),
            "cumsum .* needs this dim whole",
        ),
        (
            lambda x, w: (all_gather(x * 2, 0, 2), x @ w),
            ((4, 4), (4, 4)),
            "no matmul reads the gathered tensor or makes it",
        ),
        (
            lambda x, w: all_gather(all_reduce(x @ w) + 1, 0, 2),
            ((4, 4), (4, 4)),
            "no matmul reads the gathered tensor or makes it",
        ),
    ],
)
def test_a_gather_without_a_matmul_that_can_be_cut_says_why(function, shapes, reason: str) -> None:
    with pytest.raises(NotSeparable, match=reason):
        decide(_gather_of(capture(function, tensors(*shapes))), Options(rewrite="always"))


def _gather_of(gm: fx.GraphModule) -> Site:
    (site,) = [site for site in sites(gm, 2) if isinstance(site, Site) and site.kind is Kind.ALL_GATHER]
    return site


def test_the_matmul_of_gathered_logits_is_left_to_them_by_the_sum_before_it() -> None:
    """With fewer sums split, more collectives are rewritten."""

    def last_layer(x: Tensor, down: Tensor, head: Tensor) -> Tensor:
        return all_gather(all_reduce(x @ down) @ head, 1, 2)

    inputs = on_each_rank(2, (4, 4), (4, 6), (6, 8))
    total, gathered = assert_equivalent(capture(last_layer, inputs[0]), inputs).records
    assert total.rewritten
    assert gathered.rewritten
    assert (total.region, gathered.region) == (("mm",), ("mm_1",))
