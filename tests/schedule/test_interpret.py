"""Running all programs on tensors equals the plain collective followed (or preceded) by the body."""

from __future__ import annotations

import pytest
import torch

from fo_compiler.schedule import Kind, build
from fo_compiler.schedule.interpret import (
    interpret_all_gather,
    interpret_all_gather_out,
    interpret_all_reduce,
    interpret_all_to_all,
    interpret_reduce_scatter,
)

SIZES = [(ranks, m) for ranks in range(2, 17) for m in range(1, 5)]
CASES = [(family, ranks, m) for family in ("ring", "direct") for ranks, m in SIZES]
CASES += [(family, ranks, m) for family in ("bidirectional", "two_level") for ranks, m in SIZES if m <= 2]
ROWS, K, COLUMNS = 2, 3, 2


def node_size(ranks: int) -> int:
    """The largest proper divisor: nodes of half of the ranks, or of one where the number is prime."""
    return max(k for k in range(1, ranks) if ranks % k == 0)


@pytest.mark.parametrize(("family", "ranks", "m"), CASES)
def test_all_gather_then_matmul_equals_the_plain_collective(family: str, ranks: int, m: int) -> None:
    generator = torch.Generator().manual_seed(ranks * 10 + m)
    shards = torch.randn(ranks, m, ROWS, K, dtype=torch.float64, generator=generator)
    weights = torch.randn(ranks, K, COLUMNS, dtype=torch.float64, generator=generator)
    results = interpret_all_gather(
        build(Kind.ALL_GATHER, family, ranks, m, node_size(ranks)),
        list(shards),
        lambda rank, slice_: slice_ @ weights[rank],
    )
    gathered = shards.reshape(-1, K)
    for rank in range(ranks):
        torch.testing.assert_close(torch.cat(results[rank]), gathered @ weights[rank], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("family", "ranks", "m"), CASES)
def test_matmul_then_reduce_scatter_equals_the_plain_collective(family: str, ranks: int, m: int) -> None:
    generator = torch.Generator().manual_seed(ranks * 10 + m)
    inputs = torch.randn(ranks, ranks * m, ROWS, K, dtype=torch.float64, generator=generator)
    weights = torch.randn(ranks, K, COLUMNS, dtype=torch.float64, generator=generator)
    results = interpret_reduce_scatter(
        build(Kind.REDUCE_SCATTER, family, ranks, m, node_size(ranks)),
        lambda rank, slice_: inputs[rank, slice_] @ weights[rank],
    )
    reduced = sum(inputs[rank].reshape(-1, K) @ weights[rank] for rank in range(ranks))
    assert isinstance(reduced, torch.Tensor)
    for rank, shard in enumerate(reduced.chunk(ranks)):
        torch.testing.assert_close(torch.cat(results[rank]), shard, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["ring", "direct", "bidirectional", "two_level"])
@pytest.mark.parametrize(("ranks", "m"), [(ranks, m) for ranks, m in SIZES if ranks * m <= 24])
def test_matmul_then_all_gather_equals_the_plain_collective(family: str, ranks: int, m: int) -> None:
    made = torch.randn(ranks * m, ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(ranks * 10 + m))
    results = interpret_all_gather_out(
        build(Kind.ALL_GATHER_OUT, family, ranks, m, node_size(ranks)), lambda slice_: made[slice_]
    )
    for result in results:
        torch.testing.assert_close(torch.stack(result), made, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["ring", "direct", "bidirectional", "two_level"])
@pytest.mark.parametrize(("ranks", "m"), [(ranks, m) for ranks, m in SIZES if ranks * m <= 24])
def test_matmul_then_all_reduce_equals_the_plain_collective(family: str, ranks: int, m: int) -> None:
    generator = torch.Generator().manual_seed(ranks * 10 + m)
    partial = torch.randn(ranks, ranks * m, ROWS, dtype=torch.float64, generator=generator)
    results = interpret_all_reduce(
        build(Kind.ALL_REDUCE, family, ranks, m, node_size(ranks)), lambda rank, slice_: partial[rank, slice_]
    )
    for result in results:
        torch.testing.assert_close(torch.stack(result), partial.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_OUT])
@pytest.mark.parametrize("family", ["direct", "two_level", "ring", "bidirectional"])
@pytest.mark.parametrize(("ranks", "m"), [(ranks, m) for ranks, m in SIZES if m <= 2 and ranks <= 10])
def test_all_to_all_and_matmul_equal_the_plain_collective(kind: Kind, family: str, ranks: int, m: int) -> None:
    generator = torch.Generator().manual_seed(ranks * 10 + m)
    blocks = torch.randn(ranks, ranks, m, ROWS, dtype=torch.float64, generator=generator)
    scale = torch.arange(1, ranks + 1, dtype=torch.float64)
    schedule = build(kind, family, ranks, m, node_size(ranks))
    results = interpret_all_to_all(schedule, [list(block) for block in blocks], lambda rank, block: block * scale[rank])
    # Before the exchange the source's body runs, after it the destination's.
    by = scale.view(1, -1) if kind.arrives_first else scale.view(-1, 1)
    exchanged = (blocks * by.view(*by.shape, 1, 1)).transpose(0, 1)
    for rank, result in enumerate(results):
        torch.testing.assert_close(torch.stack(result), exchanged[rank].reshape(-1, ROWS), rtol=0, atol=0)
