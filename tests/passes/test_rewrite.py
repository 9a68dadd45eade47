"""Rewritten graphs: what stands in them, and that they compute the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fo_compiler.dump import graph_text
from fo_compiler.options import Options
from fo_compiler.passes.sites import is_collective
from fo_compiler.runtime import ops
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import assert_equivalent, rewrite_for_rank, run_ranks
from fo_compiler.torch_adapter import fake_process_group
from tests.graphs import all_gather, all_reduce, all_to_all, c10d, capture, reduce_scatter
from tests.passes.helpers import aten, check_golden, on_each_rank, rewritten, tensors


def column_parallel(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    h = all_gather(x, 1, 3)
    return F.silu(h @ gate) * (h @ up)


def row_parallel(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(x @ w, 0, 3)


def test_golden_all_gather() -> None:
    gm = rewritten(capture(column_parallel, tensors((1, 2, 4), (4, 6), (4, 6))), 3, rank=1)
    check_golden("all_gather_ring.txt", graph_text(gm.graph))


def test_golden_reduce_scatter() -> None:
    gm = rewritten(capture(row_parallel, tensors((6, 4), (4, 5))), 3, rank=1, schedule="direct")
    check_golden("reduce_scatter_direct.txt", graph_text(gm.graph))


@pytest.mark.parametrize("family", ["ring", "direct"])
@pytest.mark.parametrize("m", [1, 2])
def test_a_rewrite_has_one_transfer_a_foreign_slice_and_no_collective(family: str, m: int) -> None:
    gm = rewritten(capture(row_parallel, tensors((12, 4), (4, 5))), 3, schedule=family, slices_per_rank=m)
    targets = Counter(node.target for node in gm.graph.nodes)
    assert targets[ops.exchange] == targets[ops.wait] == 2 * m
    assert targets[aten.mm.default] == 2 * m + 1, "the own slices in one piece"
    assert not [node for node in gm.graph.nodes if is_collective(node)]


def test_each_transfer_is_posted_before_the_matmul_that_hides_it() -> None:
    gm = rewritten(capture(lambda x, w: all_gather(x, 0, 4) @ w, tensors((2, 4), (4, 6))), 4)
    kinds = {ops.exchange: "post", ops.wait: "wait", aten.mm.default: "mm"}
    order = [kinds[node.target] for node in gm.graph.nodes if node.target in kinds]
    assert order == ["post", "mm", "wait"] * 3 + ["mm"]


def test_the_own_slice_comes_first_in_a_gather_and_last_in_a_scatter() -> None:
    for function, shapes, at in (
        (lambda x, w: all_gather(x, 0, 4) @ w, ((2, 4), (4, 6)), 0),
        (lambda x, w: reduce_scatter(x @ w, 0, 4), ((8, 4), (4, 6)), -1),
    ):
        gm = rewritten(capture(function, tensors(*shapes)), 4, rank=2)
        slices = [node.meta["fo"].slice for node in gm.graph.nodes if node.target is aten.mm.default]
        assert slices[at] == 2


def test_every_new_node_says_where_it_belongs() -> None:
    gm = rewritten(capture(row_parallel, tensors((6, 4), (4, 5))), 3)
    for node in gm.graph.nodes:
        if node.name.startswith("rs0"):
            place = node.meta["fo"]
            assert place.region == "rs0"
            assert str(place.stream) == ("comm" if node.target is ops.exchange else "compute")


@pytest.mark.parametrize("family", ["ring", "direct"])
def test_the_bias_before_a_reduce_scatter_is_summed_over_the_ranks(family: str) -> None:
    inputs = on_each_rank(3, (5,), (6, 4), (4, 5))
    gm = capture(lambda b, x, w: reduce_scatter(torch.addmm(b, x, w), 0, 3), inputs[0])
    assert_equivalent(gm, inputs, Options(rewrite="always", schedule=family))


def test_a_16_bit_sum_over_direct_transfers_rounds_once() -> None:
    torch.manual_seed(0)
    ranks = 8
    inputs = [[x.to(torch.bfloat16) for x in row] for row in on_each_rank(ranks, (8, 64), (64, 64))]
    gm = capture(lambda x, w: reduce_scatter(x @ w, 0, ranks), inputs[0])
    # The plain reference of the in-process world sums in float64 and rounds once: so must ours, or nearly.
    assert_equivalent(gm, inputs, Options(rewrite="always"), rtol=2**-8, atol=0.0)


def test_a_graph_input_that_is_not_contiguous_gives_the_same() -> None:
    inputs = [[x.t(), w.t()] for x, w in on_each_rank(2, (6, 4), (5, 6))]
    gm = capture(lambda x, w: all_gather(x, 0, 2) @ w, inputs[0])
    assert_equivalent(gm, inputs)


def test_strides_of_a_permuted_output_are_kept() -> None:
    inputs = on_each_rank(2, (2, 4, 6), (2, 6, 3))
    gm = capture(lambda x, w: torch.bmm(all_gather(x, 1, 2), w).transpose(0, 1), inputs[0])
    assert_equivalent(gm, inputs)


def test_two_regions_one_feeding_the_other() -> None:
    inputs = on_each_rank(2, (4, 6), (6, 8), (8, 6))
    gm = capture(lambda x, w, v: reduce_scatter(F.relu(all_gather(x, 0, 2) @ w) @ v, 0, 2), inputs[0])
    records = assert_equivalent(gm, inputs, Options(rewrite="always", slices_per_rank=2)).records
    assert [record.rewritten for record in records] == [True, True]


def test_a_matmul_between_a_gather_and_a_scatter_along_another_dim_belongs_to_one_of_them() -> None:
    inputs = on_each_rank(2, (4, 6), (6, 8))
    gm = capture(lambda x, w: reduce_scatter(all_gather(x, 0, 2) @ w, 1, 2), inputs[0])
    gather, scatter = assert_equivalent(gm, inputs).records
    assert gather.rewritten
    assert not scatter.rewritten
    assert "already runs slice by slice in another region" in scatter.reason


def test_regions_of_two_groups_of_a_mesh() -> None:
    groups = {"rows": [[0, 1], [2, 3]], "columns": [[0, 2], [1, 3]]}

    def f(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
        h = F.relu(all_gather(x, 0, 2, "rows") @ w)
        h = F.relu(all_gather(h, 1, 2, "columns") @ v)
        return reduce_scatter(h @ u, 0, 2, "rows")

    inputs = on_each_rank(4, (4, 6), (6, 8), (16, 6), (6, 5))
    records = assert_equivalent(capture(f, inputs[0]), inputs, groups=groups).records
    assert sum(record.rewritten for record in records) == 3


@pytest.mark.parametrize("family", ["ring", "bidirectional", "direct"])
@pytest.mark.parametrize("m", [1, 2])
def test_a_matmul_before_an_all_reduce_is_cut_and_every_rank_gets_every_sum(family: str, m: int) -> None:
    inputs = on_each_rank(3, (2, 6, 4), (4, 5))
    gm = capture(lambda x, w: F.relu(all_reduce(x @ w)), inputs[0])
    options = Options(rewrite="always", schedule=family, slices_per_rank=m)
    (record,) = assert_equivalent(gm, inputs, options).records
    assert record.rewritten
    assert "along dim 1" in record.tensor, "rows are cut, so that the weight is used whole"


def test_an_all_reduce_of_one_row_is_cut_along_columns() -> None:
    inputs = on_each_rank(2, (1, 4), (4, 6))
    (record,) = assert_equivalent(capture(lambda x, w: all_reduce(x @ w, op="avg"), inputs[0]), inputs).records
    assert record.rewritten
    assert "along dim 1" in record.tensor


def test_all_ranks_hold_the_same_bits_after_an_all_reduce() -> None:
    inputs = [[x.to(torch.bfloat16) for x in row] for row in on_each_rank(4, (8, 16), (16, 4))]
    gm = capture(lambda x, w: all_reduce(x @ w), inputs[0])
    world = LocalWorld(4)
    graphs = [rewrite_for_rank(gm, Options(rewrite="always"), world.transport(rank))[0] for rank in range(4)]
    first, *others = run_ranks(lambda rank: graphs[rank], inputs, world)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("m", [1, 2])
def test_an_all_to_all_before_a_matmul_is_cut_by_where_it_comes_from(m: int) -> None:
    inputs = on_each_rank(3, (12, 4), (4, 5))
    gm = capture(lambda x, w: all_to_all(x, 3) @ w, inputs[0])
    (record,) = assert_equivalent(gm, inputs, Options(rewrite="always", slices_per_rank=m)).records
    assert record.schedule == ("direct" if m == 1 else "direct x2")


@pytest.mark.parametrize("m", [1, 2])
def test_a_matmul_before_an_all_to_all_is_cut_by_where_it_goes(m: int) -> None:
    inputs = on_each_rank(3, (12, 4), (4, 5))
    gm = capture(lambda x, w: torch.tanh(all_to_all(x @ w, 3)), inputs[0])
    (record,) = assert_equivalent(gm, inputs, Options(rewrite="always", slices_per_rank=m)).records
    assert record.region == ("mm",)


def test_ulysses_around_attention() -> None:
    """q, k, v projections -> all-to-all (sequence to heads) -> attention -> all-to-all back -> output projection."""
    ranks, batch, seq, heads, width = 2, 2, 3, 4, 2

    def to_heads(x: Tensor) -> Tensor:  # [B, S / R, H, E] -> [B, S, H / R, E]
        blocks = x.reshape(batch, seq, ranks, heads // ranks, width).permute(2, 0, 1, 3, 4)
        blocks = all_to_all(blocks, ranks)
        return blocks.permute(1, 0, 2, 3, 4).reshape(batch, seq * ranks, heads // ranks, width)

    def to_sequence(x: Tensor) -> Tensor:  # [B, S, H / R, E] -> [B, S / R, H, E]
        blocks = x.reshape(batch, ranks, seq, heads // ranks, width).permute(1, 0, 2, 3, 4)
        blocks = all_to_all(blocks, ranks)
        return blocks.permute(1, 2, 0, 3, 4).reshape(batch, seq, heads, width)

    def ulysses(x: Tensor, *weights: Tensor) -> Tensor:
        q, k, v = (to_heads((x @ w).reshape(batch, seq, heads, width)).transpose(1, 2) for w in weights[:3])
        attended = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return to_sequence(attended.transpose(1, 2)).reshape(batch, seq, heads * width) @ weights[3]

    square = (heads * width, heads * width)
    inputs = on_each_rank(ranks, (batch, seq, heads * width), square, square, square, square)
    records = assert_equivalent(capture(ulysses, inputs[0]), inputs, rtol=1e-10, atol=1e-10).records
    assert [record.rewritten for record in records] == [True] * 4, records


def test_uneven_splits_are_left_alone_with_the_reason() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_to_all_single(x, [1, 3], [1, 3], "0")) @ w

    gm = capture(f, tensors((4, 6), (6, 5)))
    (record,) = rewrite_for_rank(gm, Options(rewrite="always"), LocalWorld(2).transport(0))[1].records
    assert "splits are not equal" in record.reason


@pytest.fixture
def fake_group() -> Iterator[None]:
    """A process group named "0" of two ranks that talk to nobody: the op's fake kernel asks for its size."""
    with fake_process_group(0, 2):
        yield


@pytest.mark.parametrize(("gather_dim", "shard_dim"), [(0, 1), (1, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("m", [1, 2])
def test_the_all_to_all_of_dtensor_between_any_two_dims(
    fake_group: None, gather_dim: int, shard_dim: int, m: int
) -> None:
    import torch.distributed.tensor  # registers the op

    def exchanged(x: Tensor) -> Tensor:
        return torch.ops._dtensor.shard_dim_alltoall(x, gather_dim, shard_dim, "0")

    width = {0: 4, 1: 4, 2: 4}
    width[gather_dim] *= 2
    width[shard_dim] //= 2
    inputs = on_each_rank(2, (4, 4, 4), (4, 4), (width[2], 3))
    for function in (lambda x, w, v: exchanged(x) @ v, lambda x, w, v: torch.tanh(exchanged(x @ w))):
        options = Options(rewrite="always", slices_per_rank=m)
        (record,) = assert_equivalent(capture(function, inputs[0]), inputs, options).records
        assert record.rewritten, record
