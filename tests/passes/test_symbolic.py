"""Graphs with symbolic sizes: one rewrite, right for every length, without a guard."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fo_compiler.testing import assert_equivalent
from tests.graphs import all_gather, all_reduce, all_to_all, capture, reduce_scatter
from tests.passes.helpers import on_each_rank, tensors

N = 3
Sizes = tuple[int, int]  # batch, sequence
SIZES: tuple[Sizes, ...] = ((2, 6), (3, 4), (5, 3), (4, 11))


def gather(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    whole = all_gather(x, 1, N)
    return F.relu(whole @ w), whole.transpose(1, 2)


def scatter(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (reduce_scatter(torch.sigmoid(x.repeat(1, N, 1)) @ w, 1, N),)


def reduced(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (all_reduce(x @ w),)


def exchanged(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (all_to_all(x.repeat(N, 1, 1), N) @ w,)


def weight_gradient(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gathered dim is contracted; the other operand comes from outside, and is sliced there."""
    whole = all_gather(x, 1, N)
    return whole.flatten(0, 1).t() @ torch.cumsum(x.repeat(1, N, 1), 1).flatten(0, 1), whole @ w


def at(sizes: Sizes) -> list[list[Tensor]]:
    return on_each_rank(N, (*sizes, 4), (4, 6))


def captured(function: Callable[..., tuple[Tensor, ...]], dims: Sequence[int]) -> fx.GraphModule:
    return capture(function, tensors((*SIZES[0], 4), (4, 6)), {0: dims})


def guards(gm: fx.GraphModule) -> int:
    size = next(
        s for node in gm.graph.nodes for s in getattr(node.meta["val"], "shape", ()) if isinstance(s, torch.SymInt)
    )
    return len(size.node.shape_env.guards)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=["batch", "sequence", "both"])
@pytest.mark.parametrize("function", [gather, scatter, reduced, exchanged, weight_gradient], ids=lambda f: f.__name__)
def test_one_graph_serves_all_sizes_without_a_guard(
    function: Callable[..., tuple[Tensor, ...]], dims: Sequence[int]
) -> None:
    gm = captured(function, dims)
    before = guards(gm)
    for batch, sequence in SIZES:
        sizes = (batch if 0 in dims else SIZES[0][0], sequence if 1 in dims else SIZES[0][1])
        records = assert_equivalent(gm, at(sizes))
        assert all(record.rewritten for record in records.records), records
    assert guards(gm) == before
