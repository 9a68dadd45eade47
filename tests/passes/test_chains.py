"""Chains: an all-gather, all that lies between, and a reduce-scatter as one region."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fo_compiler.dump import graph_text
from fo_compiler.options import Options
from fo_compiler.passes.regions import Region, plan_chain
from fo_compiler.passes.separability import NotSeparable
from fo_compiler.passes.sites import Site, is_collective
from fo_compiler.records import Record
from fo_compiler.runtime import ops
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.schedule.machine import simple_machine
from fo_compiler.schedule.matmul import Roofline
from fo_compiler.testing import assert_equivalent, rewrite_for_rank
from tests.graphs import all_gather, capture, reduce_scatter
from tests.passes.helpers import aten, check_golden, on_each_rank, rewritten, sites, tensors


def projection(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(all_gather(x, 0, 2) @ w, 0, 2)


def mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU with sequence parallel: x [B, S / R, D]."""
    h = all_gather(F.layer_norm(x, (x.shape[-1],), norm), 1, 3)
    return x + reduce_scatter((F.silu(h @ gate) * (h @ up)) @ down, 1, 3)


MLP = ((2, 4, 5), (5,), (5, 6), (5, 6), (6, 5))


def test_golden_chain() -> None:
    gm = rewritten(capture(projection, tensors((4, 3), (3, 5))), 2, rank=1, slices_per_rank=2)
    check_golden("chain_ring.txt", graph_text(gm.graph))


@pytest.mark.parametrize("schedule", ["ring", "direct"])
@pytest.mark.parametrize("m", [1, 2])
def test_a_chain_computes_the_same(schedule: str, m: int) -> None:
    options = Options(rewrite="always", schedule=schedule, slices_per_rank=m)
    inputs = on_each_rank(3, *MLP)
    records = assert_equivalent(capture(mlp, inputs[0]), inputs, options).records
    assert {record.schedule for record in records} == {f"chain {schedule}" + (f" x{m}" if m > 1 else "")}
    assert {record.region for record in records} == {("mm", "mm_1", "mm_2")}


def test_a_matmul_that_both_collectives_need_is_computed_once_a_slice() -> None:
    gm = rewritten(capture(projection, tensors((4, 3), (3, 5))), 2, slices_per_rank=2)
    targets = Counter(node.target for node in gm.graph.nodes)
    assert targets[aten.mm.default] == 4
    assert targets[ops.exchange] == 4, "two slices arrive and two sums leave"
    assert not [node for node in gm.graph.nodes if is_collective(node)]
    slices = [node.meta["fo"].slice for node in gm.graph.nodes if node.target is aten.mm.default]
    assert slices == [0, 2, 3, 1], "the head of the own slice comes first, its tail last"


def test_what_else_reads_the_gathered_tensor_or_the_body_gets_it_whole() -> None:
    def function(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        h = all_gather(x, 0, 2)
        a = torch.tanh(h @ w)
        return reduce_scatter(a, 0, 2), h.t() @ grad, a, torch.cumsum(h, 0)

    inputs = on_each_rank(2, (4, 3), (3, 4), (8, 2))
    gather, scatter = assert_equivalent(capture(function, inputs[0]), inputs, Options("always", "ring")).records
    assert gather.schedule == scatter.schedule == "chain ring"
    assert gather.region == ("mm", "mm_1"), "the weight gradient is summed over the slices beside the chain"


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_scatters_whose_results_are_added_end_one_chain(op: str) -> None:
    def backward(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        h = torch.tanh(all_gather(grad, 1, 2))
        return reduce_scatter(h @ gate, 1, 2, op=op) + reduce_scatter(h @ up, 1, 2, op=op)

    inputs = on_each_rank(2, (2, 4, 3), (3, 4), (3, 4))
    records = assert_equivalent(capture(backward, inputs[0]), inputs, Options("always", "ring")).records
    assert len(records) == 3
    assert {record.schedule for record in records} == {"chain ring"}
    assert {record.region for record in records} == {("mm", "mm_1")}
    assert all("whose results are added" in record.reason for record in records)


def test_sums_of_16_bits_are_direct_whatever_the_type_of_what_arrives() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return reduce_scatter((all_gather(x, 0, 2) @ w).to(torch.bfloat16), 0, 2)

    gather, scatter = assert_equivalent(
        capture(function, tensors((4, 3), (3, 5))), on_each_rank(2, (4, 3), (3, 5)), rtol=2**-7, atol=2**-7
    ).records
    assert gather.schedule is not None
    assert gather.schedule.startswith("chain direct")
    assert gather.schedule == scatter.schedule


def chain_of(function, *shapes: tuple[int, ...]) -> Region:
    gather, scatter = sites(capture(function, tensors(*shapes)), 2)
    assert isinstance(gather, Site)
    assert isinstance(scatter, Site)
    return plan_chain(gather, scatter, 1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: reduce_scatter(torch.softmax(all_gather(x, 0, 2), 0) @ w, 0, 2), "needs this dim whole"),
        (lambda x, w: reduce_scatter(all_gather(x, 0, 2) @ w, 1, 2), "along different dims"),
        (lambda x, w: reduce_scatter(torch.tanh(all_gather(x, 0, 2)), 0, 2), "no matmul between"),
        (lambda x, w: reduce_scatter((h := all_gather(x, 0, 2)) @ w + h.sum(0), 0, 2), "over this dim|no way|reads"),
    ],
)
def test_what_is_no_chain_says_why(function, reason: str) -> None:
    with pytest.raises(NotSeparable, match=reason):
        chain_of(function, (4, 4), (4, 4))


def test_collectives_of_two_groups_are_no_chain() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return reduce_scatter(all_gather(x, 0, 2, "rows") @ w, 0, 2, "columns")

    groups = {"rows": [[0, 1], [2, 3]], "columns": [[0, 2], [1, 3]]}
    inputs = on_each_rank(4, (4, 3), (3, 5))
    records = assert_equivalent(capture(function, inputs[0]), inputs, groups=groups).records
    assert [record.rewritten for record in records] == [True, False]


def decided(tmp_path: Path, bandwidth_GBps: float, margin: float = 0.05) -> list[Record]:
    """all-gather -> [4096, 64] -> [64, 256] -> [256, 4096] -> reduce-scatter, 8 ranks of one teraflop each."""
    matmul = Roofline({"fp32": 1.0, "bf16": 1.0}, memory_GBps=1e6, units=1)
    simple_machine(bandwidth_GBps=bandwidth_GBps, matmul=matmul).save(tmp_path / "machine.json")

    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return reduce_scatter(torch.relu(torch.relu(all_gather(x, 0, 8) @ a) @ b) @ c, 0, 8)

    shapes = ((1024, 4096), (4096, 64), (64, 256), (256, 4096))
    options = Options(machine=str(tmp_path / "machine.json"), depth=1, margin=margin)
    with FakeTensorMode():
        gm = capture(function, [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes])
    return list(rewrite_for_rank(gm, options, LocalWorld(8).transport(0))[1].records)


def test_a_chain_is_chosen_where_the_first_matmul_alone_is_too_small_to_hide_the_gather(tmp_path: Path) -> None:
    gather, scatter = decided(tmp_path, bandwidth_GBps=5.0)
    assert gather.schedule == scatter.schedule == "chain direct x2", "16-bit sums are direct, so that they round once"
    assert gather.region == ("mm", "mm_1", "mm_2")
    assert "hides 100%" in gather.reason


def test_two_regions_are_chosen_where_each_end_hides_its_own(tmp_path: Path) -> None:
    gather, scatter = decided(tmp_path, bandwidth_GBps=25.0)
    assert gather.region == ("mm",)
    assert scatter.region == ("mm_2",)


def test_a_chain_that_does_not_pay_is_not_made(tmp_path: Path) -> None:
    assert not any(record.rewritten for record in decided(tmp_path, bandwidth_GBps=5.0, margin=0.9))
