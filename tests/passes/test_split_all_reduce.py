"""An all-reduce in two halves: where it is done, what it leaves as it was, and that it computes the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fo_compiler.dump import graph_text
from fo_compiler.options import Options
from fo_compiler.passes.sites import is_collective
from fo_compiler.records import Record
from fo_compiler.runtime import ops
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import assert_equivalent, rewrite_for_rank, run_ranks
from tests.graphs import all_reduce, capture
from tests.passes.helpers import check_golden, on_each_rank, rewritten, tensors


def residual(x: Tensor, w: Tensor, stream: Tensor, norm: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The end of one layer and the beginning of the next: x [B, S, K], stream [B, S, D]."""
    y = stream + all_reduce(x @ w)
    return y, F.layer_norm(y, (y.shape[-1],), norm) @ v


def shapes_of(batch: int, seq: int) -> tuple[tuple[int, ...], ...]:
    return (batch, seq, 4), (4, 5), (batch, seq, 5), (5,), (5, 7)


def decided(function, shapes, options: Options, ranks: int = 8, dtype: torch.dtype = torch.bfloat16) -> list[Record]:
    """The records of a graph of any size: nothing is allocated."""
    with FakeTensorMode():
        gm = capture(function, [torch.empty(shape, dtype=dtype) for shape in shapes])
    return list(rewrite_for_rank(gm, options, LocalWorld(ranks).transport(0))[1].records)


def test_golden_split_all_reduce() -> None:
    gm = rewritten(capture(residual, tensors(*shapes_of(1, 4))), 2, rank=1)
    check_golden("split_all_reduce_ring.txt", graph_text(gm.graph))


@pytest.mark.parametrize("schedule", ["ring", "bidirectional", "direct"])
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_both_halves_are_hidden_and_the_residual_stream_is_the_same(schedule: str, m: int, op: str) -> None:
    def function(x: Tensor, w: Tensor, stream: Tensor, norm: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = stream + all_reduce(x @ w, op=op)
        return y, F.layer_norm(y, (y.shape[-1],), norm) @ v

    inputs = on_each_rank(3, *shapes_of(2, 6))  # no operand is equal on all ranks
    options = Options(rewrite="always", schedule=schedule, slices_per_rank=m)
    (record,) = assert_equivalent(capture(function, inputs[0]), inputs, options).records
    half = schedule if m == 1 else f"{schedule} x{m}"
    assert record.schedule == f"{half} + {half}"
    assert record.region == ("mm", "mm_1")
    assert "along dim 1" in record.tensor, "a batch of 2 does not divide by 3 ranks"


def test_all_ranks_hold_the_same_bits_of_a_split_all_reduce() -> None:
    inputs = [[x.to(torch.bfloat16) for x in row] for row in on_each_rank(4, (8, 16), (16, 4))]
    shared = tensors((4, 4), dtype=torch.bfloat16, seed=9)
    gm = capture(lambda x, w, v: (y := all_reduce(x @ w), y @ v), [*inputs[0], *shared])
    world = LocalWorld(4)
    graphs = [rewrite_for_rank(gm, Options(rewrite="always"), world.transport(rank))[0] for rank in range(4)]
    assert not [node for node in graphs[0].graph.nodes if is_collective(node)]
    first, *others = run_ranks(lambda rank: graphs[rank], [[*row, *shared] for row in inputs], world)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    """Megatron's MLP, twice: the residual stream x [S, D] passes a norm, two matmuls and an all-reduce in each layer."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + all_reduce(F.silu(F.layer_norm(x, (x.shape[-1],)) @ up) @ down)
    return x


def test_between_two_layers_each_half_hides_under_matmuls_of_its_own() -> None:
    inputs = on_each_rank(2, (4, 6), (6, 8), (8, 6), (6, 8), (8, 6))
    options = Options(rewrite="always", depth=1)
    first, last = assert_equivalent(capture(layers, inputs[0]), inputs, options).records
    assert first.region == ("mm_1", "mm_2"), "down projection, and the next layer's up projection"
    assert last.region == ("mm_3",), "no matmul comes after the last one: its all-reduce stays in one region"
    assert "+" not in (last.schedule or "")


def test_a_matmul_that_two_all_reduces_want_is_left_to_the_second() -> None:
    inputs = on_each_rank(2, (4, 6), (6, 8), (8, 6))
    gm = capture(lambda x, w, v: all_reduce(torch.relu(all_reduce(x @ w)) @ v), inputs[0])
    first, second = assert_equivalent(gm, inputs).records
    assert first.region == ("mm",)
    assert second.region == ("mm_1",)


@pytest.mark.parametrize("rows", [64, 8192])
def test_the_split_is_used_exactly_where_it_is_predicted_to_pay(rows: int) -> None:
    shapes = ((rows, 4096), (4096, 4096), (rows, 4096), (4096,), (4096, 4096))
    (record,) = decided(residual, shapes, Options(machine="h100-nvlink"))
    assert record.rewritten == (rows == 8192)
    assert ("+" in (record.schedule or "")) == (rows == 8192)


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (4, 0, 2)])
@pytest.mark.parametrize("made", [True, False])
def test_a_sum_of_nothing_is_left_alone(shape: tuple[int, ...], made: bool) -> None:
    """Whether a matmul makes it or not: a split along an empty dim has no blocks."""

    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return all_reduce(x @ w if made else x) @ v

    inputs = on_each_rank(2, shape, (shape[-1], shape[-1]), (shape[-1], 3))
    (record,) = assert_equivalent(capture(function, inputs[0]), inputs).records
    assert not record.rewritten
    assert record.reason


def looked_up(tokens: Tensor, table: Tensor, norm: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a table of which each rank has a part, summed: no matmul makes what travels."""
    y = all_reduce(F.embedding((tokens * 100).long() % table.shape[0], table))
    return y, F.layer_norm(y, (y.shape[-1],), norm) @ v


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ring", "bidirectional", "direct"])
@pytest.mark.parametrize("m", [1, 2])
def test_the_gather_half_alone_is_hidden_where_no_matmul_makes_what_is_summed(schedule: str, m: int) -> None:
    inputs = on_each_rank(3, (2, 6), (8, 5), (5,), (5, 7))
    gm = capture(looked_up, inputs[0])
    options = Options(rewrite="always", schedule=schedule, slices_per_rank=m)
    (record,) = assert_equivalent(gm, inputs, options).records
    assert record.schedule == (schedule if m == 1 else f"{schedule} x{m}")
    assert record.region == ("mm",)
    assert "a plain reduce-scatter" in record.reason
    graph, _ = rewrite_for_rank(gm, options, LocalWorld(3).transport(0))
    (collective,) = (node for node in graph.graph.nodes if is_collective(node))
    assert collective.target is torch.ops._c10d_functional.reduce_scatter_tensor.default


@pytest.mark.parametrize("rows", [64, 8192])
def test_the_gather_half_alone_is_hidden_exactly_where_it_is_predicted_to_pay(rows: int) -> None:
    shapes = ((rows,), (4096, 4096), (4096,), (4096, 4096))
    (record,) = decided(looked_up, shapes, Options(machine="h100-nvlink"))
    assert record.rewritten == (rows == 8192)


def test_what_no_matmul_makes_or_reads_is_left_alone() -> None:
    inputs = on_each_rank(2, (4,), (8, 6))
    gm = capture(lambda i, t: all_reduce(F.embedding((i * 100).long() % 8, t)), inputs[0])
    (record,) = assert_equivalent(gm, inputs).records
    assert not record.rewritten


def test_what_is_not_rewritten_is_left_as_it_was() -> None:
    gm = capture(residual, tensors(*shapes_of(2, 6)))
    before = str(gm.graph)
    graph, published = rewrite_for_rank(gm, Options(margin=0.9), LocalWorld(3).transport(0))
    assert not published.records[0].rewritten
    graph.graph.erase_node(graph.graph.find_nodes(op="call_function", target=ops.announce)[0])
    assert str(graph.graph) == before


def test_all_ranks_split_alike() -> None:
    gm = capture(residual, tensors(*shapes_of(2, 6)))
    keys = {rewrite_for_rank(gm, Options(rewrite="always"), LocalWorld(3).transport(r))[1].key for r in range(3)}
    assert len(keys) == 1


def test_no_tensor_that_was_not_an_output_becomes_one() -> None:
    """What backward saves are outputs of the forward graph: the split adds none, and makes none larger."""
    gm = capture(residual, tensors(*shapes_of(2, 6)))
    graph, _ = rewrite_for_rank(gm, Options(rewrite="always"), LocalWorld(3).transport(0))
    sizes = [[node.meta["val"].shape for node in g.graph.output_node().all_input_nodes] for g in (gm, graph)]
    assert sizes[0] == sizes[1]
