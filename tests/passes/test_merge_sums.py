"""Collectives whose results are added are one collective."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fo_compiler.options import Options
from fo_compiler.runtime import ops
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import assert_equivalent, rewrite_for_rank, run_ranks
from tests.graphs import all_reduce, capture, reduce_scatter
from tests.passes.helpers import on_each_rank, tensors

SHAPES = ((2, 6, 4), (4, 5), (4, 5), (4, 5))


@pytest.mark.parametrize(
    "collective", [all_reduce, lambda x: reduce_scatter(x, 0, 2), lambda x: reduce_scatter(x, 1, 2)]
)
@pytest.mark.parametrize(
    "order", [lambda a, b, c: (a + b) + c, lambda a, b, c: c + (a + b), lambda a, b, c: a + (b + c)]
)
def test_gradients_of_three_matmuls_travel_once(collective, order) -> None:
    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.tanh(order(*(collective(x @ w) for w in weights)))

    inputs = on_each_rank(2, *SHAPES)
    gm = capture(function, inputs[0])
    records = assert_equivalent(gm, inputs).records
    assert len(records) == 3
    assert {record.region for record in records} == {("mm", "mm_1", "mm_2")}, "one region for all"
    assert all("whose results are added" in record.reason for record in records)
    graph = rewrite_for_rank(gm, Options(rewrite="always", slices_per_rank=1), LocalWorld(2).transport(0))[0].graph
    transfers = len(graph.find_nodes(op="call_function", target=ops.exchange))
    assert transfers == (2 if collective is all_reduce else 1)


def test_a_result_that_somebody_else_reads_is_not_merged() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        first = all_reduce(x @ a)
        return torch.tanh(first + all_reduce(x @ b)), first

    inputs = on_each_rank(2, *SHAPES)
    first, second = assert_equivalent(capture(function, inputs[0]), inputs).records
    assert first.region == ("mm",)
    assert second.region == ("mm_1",)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a, b, c: all_reduce(x @ a, "0", "sum") + all_reduce(x @ b, "0", "avg"),
        lambda x, a, b, c: all_reduce(x @ a, "0") + all_reduce(x @ b, "1"),
        lambda x, a, b, c: torch.add(all_reduce(x @ a), all_reduce(x @ b), alpha=2),
        lambda x, a, b, c: (s := all_reduce(x @ a)) + s,
    ],
)
def test_only_equal_sums_are_merged(function) -> None:
    inputs = on_each_rank(2, *SHAPES)
    groups = {"0": [[0, 1]], "1": [[0, 1]]}
    records = assert_equivalent(capture(function, inputs[0]), inputs, groups=groups).records
    assert not [record for record in records if "whose results are added" in record.reason]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_sums_that_cancel_lose_nothing(dtype: torch.dtype) -> None:
    """The partial sums of the two ranks are large and cancel: the result is as exact as that of two collectives."""

    def function(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return all_reduce(x @ a) + all_reduce(x @ b)

    first = tensors(*SHAPES, dtype=dtype)
    second = [-100 * first[0] + tensors(SHAPES[0], seed=1)[0].to(dtype), *first[1:]]
    inputs = [[100 * first[0], *first[1:]], second]
    products = [[t[0].matmul(w).double() for w in t[1:3]] for t in inputs]  # each rounded, as a matmul rounds
    exact = sum(p for rank in products for p in rank)
    plain = sum(sum(rank[i] for rank in products).to(dtype) for i in (0, 1)).double()
    gm = capture(function, first)
    world = LocalWorld(2)
    graphs = [rewrite_for_rank(gm, Options(rewrite="always"), world.transport(rank))[0] for rank in range(2)]
    for result in run_ranks(graphs.__getitem__, inputs, world):
        assert (result.double() - exact).norm() <= 1.01 * (plain - exact).norm()


def test_what_is_not_rewritten_is_not_merged() -> None:
    gm = capture(lambda x, a, b, c: all_reduce(x @ a) + all_reduce(x @ b), tensors(*SHAPES))
    before = str(gm.graph)
    graph, published = rewrite_for_rank(gm, Options(margin=0.9), LocalWorld(2).transport(0))
    assert not any(record.rewritten for record in published.records)
    graph.graph.erase_node(graph.graph.find_nodes(op="call_function", target=ops.announce)[0])
    assert str(graph.graph) == before
