"""Sums in 16 bits: no further from float64 than the best that a plain collective can do, and the same from run to run.

The plain result here adds the ranks' 16-bit partial products in float64 and rounds once; a plain ring rounds at each hop and is
worse. Ours adds them in float32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fo_compiler.options import Options
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import rewrite_for_rank, run_ranks
from tests.graphs import all_reduce, capture, reduce_scatter

ROWS, K, COLUMNS = 4, 8, 32


def usual(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def cancelling(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensor:
    """Large values whose signs alternate from rank to rank: little is left of their sum."""
    common = torch.randn(shape, generator=torch.Generator().manual_seed(7)) * 100
    return (-1) ** rank * common + torch.randn(shape, generator=generator)


def mixed(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensor:
    """Sizes from 0.0001 to 10: products of them stay within float16."""
    return torch.randn(shape, generator=generator) * 10 ** (5 * torch.rand(shape, generator=generator) - 4)


def error(results: list[Tensor], exact: list[Tensor]) -> float:
    return torch.cat([r.double() - e for r, e in zip(results, exact, strict=True)]).square().mean().sqrt().item()


@pytest.mark.slow
@pytest.mark.parametrize("values", [usual, cancelling, mixed])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "ranks", [n if n in (2, 3) else pytest.param(n, marks=pytest.mark.nightly) for n in range(2, 17)]
)
def test_sums_of_16_bit_products_are_no_less_exact(
    ranks: int, dtype: torch.dtype, values: Callable[..., Tensor]
) -> None:
    generator = torch.Generator().manual_seed(ranks)
    inputs = [
        [values(shape, rank, generator).to(dtype) for shape in ((ROWS * ranks, K), (K, COLUMNS))]
        for rank in range(ranks)
    ]
    products = torch.stack([x.double() @ w.double() for x, w in inputs])
    for kind, function in (
        ("reduce_scatter", lambda x, w: reduce_scatter(x @ w, 0, ranks)),
        ("all_reduce", lambda x, w: all_reduce(x @ w)),
    ):
        whole = products.sum(0)
        exact = list(whole.chunk(ranks)) if kind == "reduce_scatter" else [whole] * ranks
        gm = capture(function, inputs[0])
        plain = run_ranks(lambda _, gm=gm: gm, inputs, LocalWorld(ranks))
        world = LocalWorld(ranks)
        graphs = [rewrite_for_rank(gm, Options(rewrite="always"), world.transport(rank)) for rank in range(ranks)]
        assert graphs[0][1].records[0].rewritten
        modules = [module for module, _ in graphs]
        first, second = run_ranks(modules.__getitem__, inputs, world), run_ranks(modules.__getitem__, inputs, world)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "bitwise equal from run to run"
        assert first[0].dtype == dtype
        assert error(first, exact) <= 1.005 * error(plain, exact), kind
        if kind == "all_reduce":
            assert all(torch.equal(first[0], other) for other in first), "every rank has the same sum"
