"""Random strided tensors, and how far a result in float32 sums may be from float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from fo_compiler.codegen.tiles import Tile

Draw = Callable[[st.SearchStrategy[Any]], Any]
TILE = Tile(16, 16, 16, 4, 2, group_m=2)
TILES = st.sampled_from([TILE, Tile(16, 32, 16, 4, 2, group_m=1), Tile(32, 16, 32, 4, 2, group_m=3)])
OPERANDS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
FLOATS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
SIZES = st.integers(1, 36)


def values(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 2 - 1).to(dtype)


def strided(draw: Draw, *shape: int, dtype: torch.dtype, fill: bool = True) -> torch.Tensor:
    """A view of a larger tensor: dims in any order, steps of 1 or 2, an offset. What is around it holds NaN or 0."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    offsets = [draw(st.integers(0, 2)) for _ in shape]
    base = torch.zeros([offsets[d] + steps[d] * shape[d] for d in order], dtype=dtype)
    view = base.permute([order.index(d) for d in range(len(shape))])
    view = view[tuple(slice(o, o + s * n, s) for o, s, n in zip(offsets, steps, shape, strict=True))]
    assert view.shape == shape
    if fill:
        view.copy_(values(draw(st.integers(0, 99)), *shape, dtype=dtype))
    return view


def rounding(dtype: torch.dtype) -> float:
    """Relative: half a unit in the last place; a whole one for bfloat16, which the interpreter cuts off."""
    return torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 else 2)


def assert_close_to_exact(
    result: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int, slope: float = 1.0
) -> None:
    """Within what `terms` float32 additions of addends of `magnitude` and one rounding to the result's dtype may lose.

    `slope`: of the function applied to the sum.
    """
    sums = (terms + 8) * 2.0**-24 * magnitude.double()
    smallest = torch.finfo(result.dtype).tiny
    allowed = slope * sums + rounding(result.dtype) * (exact.abs() + slope * sums) + smallest
    wrong = ~((result.double() - exact).abs() <= allowed)  # NaN is wrong
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}: {result[wrong][:4]} for {exact[wrong][:4]}"
