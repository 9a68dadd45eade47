"""sum_partials under Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fo_compiler.codegen.kernels import sum_partials, sum_partials_reference
from fo_compiler.errors import KernelError

from .helpers import FLOATS, assert_close_to_exact, examples, strided, values


@examples(15)
@given(st.data())
def test_any_number_of_partials_of_any_strides_is_rounded_once(data: st.DataObject) -> None:
    draw = data.draw
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dtype, count = draw(FLOATS), draw(st.integers(1, 6))
    if draw(st.booleans()):
        parts = [values(i, *shape, dtype=dtype) for i in range(count)]
        out = torch.empty(shape, dtype=draw(FLOATS))
    else:
        parts = [strided(draw, *shape, dtype=dtype) for _ in range(count)]
        out = strided(draw, *shape, dtype=draw(FLOATS), fill=False)
    residual = strided(draw, *shape, dtype=draw(FLOATS)) if draw(st.booleans()) else None
    sum_partials(parts, out, residual=residual)
    exact = sum_partials_reference(parts, residual)
    magnitude = sum_partials_reference([p.abs() for p in parts], None if residual is None else residual.abs())
    assert_close_to_exact(out, exact, magnitude, count + 1)


def test_rows_longer_than_a_block_are_whole() -> None:
    parts = [values(i, 2, 2500, dtype=torch.bfloat16) for i in range(3)]
    out = torch.empty(2, 5000, dtype=torch.bfloat16)[:, ::2]
    sum_partials(parts, out)
    exact = sum_partials_reference(parts)
    assert_close_to_exact(out, exact, sum_partials_reference([p.abs() for p in parts]), 3)


def test_one_rounding_keeps_what_rounding_each_hop_loses() -> None:
    parts = [torch.tensor([256.0]).bfloat16(), *[torch.tensor([0.5]).bfloat16()] * 4]  # 256 + 0.5 rounds to 256
    out = torch.empty(1, dtype=torch.bfloat16)
    assert sum_partials(parts, out).item() == 258.0
    hops = parts[0]
    for part in parts[1:]:
        hops = hops + part
    assert hops.item() == 256.0


def test_float64_is_added_in_float64() -> None:
    parts = [torch.tensor([1.0], dtype=torch.float64), torch.tensor([2.0**-40], dtype=torch.float64)]
    assert sum_partials(parts, torch.empty(1, dtype=torch.float64)).item() == 1.0 + 2.0**-40


def test_partials_of_other_shapes_are_refused() -> None:
    with pytest.raises(KernelError, match="parts: expected tensors of one dtype with the shape of out"):
        sum_partials([torch.zeros(3), torch.zeros(4)], torch.zeros(3))
    with pytest.raises(KernelError, match="floats of 16 bit or more"):
        sum_partials([torch.zeros(3, dtype=torch.int32)], torch.zeros(3))


def test_nothing_to_add_writes_nothing() -> None:
    assert sum_partials([torch.zeros(0, 3)], torch.zeros(0, 3)).shape == (0, 3)
