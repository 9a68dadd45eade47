"""matmul_into under Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fo_compiler.codegen.kernels import matmul_into, matmul_into_reference
from fo_compiler.codegen.kernels.operands import EPILOGUES
from fo_compiler.errors import KernelError

from .helpers import FLOATS, OPERANDS, SHORT, SIZES, TILE, TILES, assert_close_to_exact, examples, strided, values


@examples(20)
@given(st.data())
def test_any_shape_stride_and_dtype_agrees_with_float64(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(OPERANDS)
    leading = (draw(SIZES),) if draw(st.booleans()) else (draw(st.integers(1, 3)), draw(st.integers(1, 20)))
    depth, cols = draw(SIZES), draw(SIZES)
    a, b = strided(draw, *leading, depth, dtype=dtype), strided(draw, depth, cols, dtype=dtype)
    out = strided(draw, *leading, cols, dtype=draw(FLOATS), fill=False)
    bias = values(1, cols, dtype=draw(FLOATS)) if draw(st.booleans()) else None
    start = strided(draw, *leading, cols, dtype=torch.float32) if draw(st.booleans()) else None
    scale = torch.tensor(0.75) if draw(st.booleans()) else None
    epilogue = draw(st.sampled_from(EPILOGUES))
    matmul_into(a, b, out, bias=bias, start=start, scale=scale, epilogue=epilogue, tile=draw(TILES))
    exact = matmul_into_reference(a, b, bias=bias, start=start, scale=scale, epilogue=epilogue)
    addends = {"bias": None if bias is None else bias.abs(), "start": None if start is None else start.abs()}
    magnitude = matmul_into_reference(a.abs(), b.abs(), **addends)
    assert_close_to_exact(out, exact, magnitude, depth, slope=1.2)  # the steepest epilogue, gelu, has a slope of 1.13


@examples(5)
@given(
    outer=st.integers(1, 3), inner=st.integers(1, 9), slices=st.integers(1, 3), depth=SHORT, cols=SHORT, dtype=FLOATS
)
def test_slices_of_a_flattened_batch_land_in_their_rows_of_the_joined_output(
    outer: int, inner: int, slices: int, depth: int, cols: int, dtype: torch.dtype
) -> None:
    a, b = values(0, outer, slices * inner, depth, dtype=dtype), values(1, depth, cols, dtype=dtype)
    joined = torch.full((outer, slices * inner, cols), torch.nan, dtype=dtype)
    for s in range(slices):
        rows = slice(s * inner, (s + 1) * inner)
        matmul_into(a[:, rows], b, joined[:, rows], tile=TILE)
        assert torch.isnan(joined[:, (s + 1) * inner :]).all()
    assert_close_to_exact(joined, matmul_into_reference(a, b), matmul_into_reference(a.abs(), b.abs()), depth)


@examples(5)
@given(rows=SHORT, cols=SHORT, widths=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_slices_of_k_accumulate_in_float32_and_are_rounded_once(rows: int, cols: int, widths: list[int]) -> None:
    parts = [
        (values(i, rows, k, dtype=torch.bfloat16), values(9 + i, k, cols, dtype=torch.bfloat16))
        for i, k in enumerate(widths)
    ]
    total, out = torch.zeros(rows, cols), torch.empty(rows, cols, dtype=torch.bfloat16)
    for i, (a, b) in enumerate(parts):
        last = i == len(parts) - 1
        matmul_into(a, b, out if last else total, start=total if i else None, tile=TILE)
    exact = sum(matmul_into_reference(a, b) for a, b in parts)
    magnitude = sum(matmul_into_reference(a.abs(), b.abs()) for a, b in parts)
    assert isinstance(exact, torch.Tensor)
    assert isinstance(magnitude, torch.Tensor)
    assert_close_to_exact(out, exact, magnitude, sum(widths) + len(widths))


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 4, 0), (3, 0, 5)])
def test_empty_sizes_are_what_torch_makes_of_them(shape: tuple[int, int, int]) -> None:
    rows, depth, cols = shape
    out = torch.full((rows, cols), 7.0)
    matmul_into(torch.ones(rows, depth), torch.ones(depth, cols), out, tile=TILE)
    torch.testing.assert_close(out, torch.ones(rows, depth) @ torch.ones(depth, cols))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(3, 5)}, r"a \[rows, k\].*got \(3, 5\) and \(4, 6\)"),
        ({"out": torch.zeros(6, 3)}, r"out: expected shape \(3, 6\), got \(6, 3\)"),
        ({"b": torch.zeros(4, 6).half()}, "one dtype"),
        ({"a": torch.zeros(3, 4).double(), "b": torch.zeros(4, 6).double()}, "dtype: expected bfloat16.*float64"),
        ({"bias": torch.zeros(3)}, r"bias: expected shape \(6,\)"),
        ({"start": torch.zeros(6)}, r"start: expected the shape of out"),
        ({"scale": torch.zeros(2)}, "scale: expected one float32"),
        ({"epilogue": "tanh"}, "epilogue: expected one of none, relu, gelu, gelu_tanh, silu, got tanh"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    arguments = {"a": torch.zeros(3, 4), "b": torch.zeros(4, 6), "out": torch.zeros(3, 6), **change}
    with pytest.raises(KernelError, match=message):
        matmul_into(**arguments)  # type: ignore[arg-type]


def test_columns_may_lie_further_from_each_other_than_int32_counts() -> None:
    """A block of 16 columns spans 2^31 elements; what lies between is never touched, so it takes no memory."""
    rows, depth = 3, 20
    a = torch.empty_strided((rows, depth), (1, 1 << 27), dtype=torch.float8_e4m3fn)
    a.copy_(values(0, rows, depth, dtype=a.dtype))
    b = values(1, depth, 4, dtype=a.dtype)
    out = matmul_into(a, b, torch.empty(rows, 4), tile=TILE)
    torch.testing.assert_close(out.double(), matmul_into_reference(a, b), rtol=1e-5, atol=1e-5)
