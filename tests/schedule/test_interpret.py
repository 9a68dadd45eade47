"""Running all programs on tensors equals the plain collective followed (or preceded) by the body."""

from __future__ import annotations

import pytest
import torch

from fo_compiler.schedule import Kind, build
from fo_compiler.schedule.interpret import interpret_all_gather, interpret_reduce_scatter

SIZES = [(ranks, m) for ranks in range(2, 17) for m in range(1, 5)]
ROWS, K, COLUMNS = 2, 3, 2


@pytest.mark.parametrize("family", ["ring", "direct"])
@pytest.mark.parametrize("ranks,m", SIZES)
def test_all_gather_then_matmul_equals_the_plain_collective(family: str, ranks: int, m: int) -> None:
    generator = torch.Generator().manual_seed(ranks * 10 + m)
    shards = torch.randn(ranks, m, ROWS, K, dtype=torch.float64, generator=generator)
    weights = torch.randn(ranks, K, COLUMNS, dtype=torch.float64, generator=generator)
    results = interpret_all_gather(
        build(Kind.ALL_GATHER, family, ranks, m), list(shards), lambda rank, slice_: slice_ @ weights[rank]
    )
    gathered = shards.reshape(-1, K)
    for rank in range(ranks):
        torch.testing.assert_close(torch.cat(results[rank]), gathered @ weights[rank], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["ring", "direct"])
@pytest.mark.parametrize("ranks,m", SIZES)
def test_matmul_then_reduce_scatter_equals_the_plain_collective(family: str, ranks: int, m: int) -> None:
    generator = torch.Generator().manual_seed(ranks * 10 + m)
    inputs = torch.randn(ranks, ranks * m, ROWS, K, dtype=torch.float64, generator=generator)
    weights = torch.randn(ranks, K, COLUMNS, dtype=torch.float64, generator=generator)
    results = interpret_reduce_scatter(
        build(Kind.REDUCE_SCATTER, family, ranks, m),
        lambda rank, slice_: inputs[rank, slice_] @ weights[rank],
    )
    reduced = sum(inputs[rank].reshape(-1, K) @ weights[rank] for rank in range(ranks))
    assert isinstance(reduced, torch.Tensor)
    for rank, shard in enumerate(reduced.chunk(ranks)):
        torch.testing.assert_close(torch.cat(results[rank]), shard, rtol=1e-12, atol=1e-12)
