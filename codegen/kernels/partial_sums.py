"""The sum of N partial results, rounded once.

    out = round(parts[0] + parts[1] + ... + parts[N - 1] + residual)

    parts     N tensors [..., n] of one shape and dtype, any strides of rows: what arrived in a reduce-scatter, and the own part
    residual  as parts, of any float dtype: the tensor that the model adds next
    out       as parts, of any float dtype

Added in this order in float32 (float64 for float64), so that the result is bitwise the same on every run. A reduce-scatter
in a 16-bit type rounds after each hop, and once more at the residual add; this rounds once.

Source: docs/architecture.md section 4 (sums).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl  # type: ignore[import-untyped]

from ...errors import KernelError
from ..launch import Launch
from .language import jit
from .operands import Strides, as_blocks
from .product import row_offset

BLOCK, WARPS = 1024, 8


@jit
def sum_partials_kernel(
    parts: tl.tensor,
    residual_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cols: tl.tensor,
    inner: tl.tensor,
    part_outer: tl.tensor,
    part_row: tl.tensor,
    part_n: tl.tensor,
    residual_outer: tl.tensor,
    residual_row: tl.tensor,
    residual_n: tl.tensor,
    out_outer: tl.tensor,
    out_row: tl.tensor,
    out_n: tl.tensor,
    COUNT: tl.constexpr,
    SPLIT: tl.constexpr,
    DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    blocks = tl.cdiv(cols, BLOCK)
    row = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = col < cols
    acc = tl.zeros((BLOCK,), dtype=tl.float64 if DOUBLE else tl.float32)
    for i in tl.static_range(COUNT):
        part = parts[i] + row_offset(row, inner, part_outer[i], part_row[i], SPLIT) + col * part_n[i]
        acc += tl.load(part, mask=mask, other=0.0).to(acc.dtype)
    if residual_ptr is not None:
        residual = residual_ptr + row_offset(row, inner, residual_outer, residual_row, SPLIT) + col * residual_n
        acc += tl.load(residual, mask=mask, other=0.0).to(acc.dtype)
    out = out_ptr + row_offset(row, inner, out_outer, out_row, SPLIT) + col * out_n
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def sum_partials_launch(
    parts: Sequence[torch.Tensor], out: torch.Tensor, residual: torch.Tensor | None = None
) -> Launch | None:
    """The launch of `sum_partials`; None where there is nothing to add."""
    others = (out,) if residual is None else (out, residual)
    if not parts or any(t.shape != out.shape for t in (*parts, *others)) or len({p.dtype for p in parts}) > 1:
        raise KernelError.wrong("parts", "tensors of one dtype with the shape of out", _list((*parts, *others)))
    if any(not t.is_floating_point() or t.element_size() < 2 for t in (*parts, *others)):
        raise KernelError.wrong("parts", "floats of 16 bit or more", _list((*parts, *others)))
    if out.numel() == 0:
        return None
    inner, split, strides = _rows((*parts, *others))
    part_strides, out_strides, residual_strides = strides[: len(parts)], strides[len(parts)], strides[-1]
    cols = out.numel() if split is None else out.shape[-1]
    rows = out.numel() // cols
    arguments = {
        "parts": tuple(parts),
        "residual_ptr": residual,
        "out_ptr": out,
        "cols": cols,
        "inner": inner,
        **{f"part_{name}": tuple(s[i] for s in part_strides) for i, name in enumerate(("outer", "row", "n"))},
        **{f"residual_{name}": residual_strides[i] for i, name in enumerate(("outer", "row", "n"))},
        **{f"out_{name}": out_strides[i] for i, name in enumerate(("outer", "row", "n"))},
        "COUNT": len(parts),
        "SPLIT": bool(split),
        "DOUBLE": parts[0].dtype == torch.float64,
        "BLOCK": BLOCK,
    }
    name = f"sum_partials[{len(parts)}]"
    return Launch(name, sum_partials_kernel, (rows * -(-cols // BLOCK),), arguments, WARPS, stages=1)


def sum_partials(
    parts: Sequence[torch.Tensor], out: torch.Tensor, *, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Write the sum of `parts` and `residual` into `out`, and return it.

    Raises KernelError for shapes or dtypes that do not fit, or rows that do not lie evenly.
    """
    launch = sum_partials_launch(parts, out, residual)
    if launch is not None:
        launch.run()
    return out


def sum_partials_reference(
    parts: Sequence[torch.Tensor], residual: torch.Tensor | None = None, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """The same in plain torch, in `dtype`."""
    addends = [*parts] if residual is None else [*parts, residual]
    value = addends[0].to(dtype)
    for addend in addends[1:]:
        value = value + addend.to(dtype)
    return value


def _rows(tensors: Sequence[torch.Tensor]) -> tuple[int, bool | None, list[Strides]]:
    """Rows in a block, whether there are several blocks (None: all is one long row), and each tensor's strides."""
    if all(t.is_contiguous() for t in tensors):
        return 1, None, [(0, 0, 1) for _ in tensors]
    if tensors[0].dim() == 1:
        tensors = [t[None] for t in tensors]
    try:
        blocks = [t if t.dim() <= 3 else t.view(-1, *t.shape[-2:]) for t in tensors]
    except RuntimeError as error:
        raise KernelError.wrong("parts", "leading dims that lie evenly", _list(tensors)) from error
    inner, strides = as_blocks(*blocks)
    return inner, inner != blocks[0][..., 0].numel(), strides


def _list(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}" for t in tensors)
