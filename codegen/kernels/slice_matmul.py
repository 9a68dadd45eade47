"""A slice of a matmul, written into its place of the joined output.

    out = epilogue(scale * (a @ b) + start + bias)

    a      [rows, k] or [outer, inner, k]    one slice: what arrived, or a view of the whole
    b      [k, n]                            the weight, whole
    out    [rows, n] or [outer, inner, n]    a view of the joined output, any strides
    bias   [n]
    start  as out                            what is added to: the sum so far, where slices of k arrive (gathered-K)
    scale  []  float32                       of the operands, for fp8

All but `out` and `start` are read only; `start` may be `out` itself. Sums are float32, rounded once to the dtype of `out`.
Sizes need not be multiples of a tile.

Sources: docs/architecture.md section 4 (slices of a joined output); tile order as in Triton's tutorial on matrix multiplication.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped]

from ...errors import KernelError
from ..launch import Launch, device_of, operand_kind
from ..tiles import Tile, default_tile
from .language import jit
from .operands import as_blocks, check_epilogue, check_operands, product_arguments, scalar, vector
from .product import activate, place, product, row_offset


@jit
def matmul_into_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    start_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    depth: tl.tensor,
    inner: tl.tensor,
    a_outer: tl.tensor,
    a_row: tl.tensor,
    a_k: tl.tensor,
    b_k: tl.tensor,
    b_n: tl.tensor,
    out_outer: tl.tensor,
    out_row: tl.tensor,
    out_n: tl.tensor,
    start_outer: tl.tensor,
    start_row: tl.tensor,
    start_n: tl.tensor,
    SPLIT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    PRECISION: tl.constexpr,
    PLAIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
) -> None:
    tile_m, tile_n = place(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N), GROUP_M)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and columns beyond the end wrap round: what is computed for them is never stored, and loads need no mask.
    a = a_ptr + row_offset(row % rows, inner, a_outer, a_row, SPLIT)
    b = b_ptr + (col % cols).to(tl.int64) * b_n
    acc = product(a, b, depth, a_k, b_k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, PLAIN)
    mask = (row[:, None] < rows) & (col[None, :] < cols)
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
    if start_ptr is not None:
        start = start_ptr + row_offset(row, inner, start_outer, start_row, SPLIT)
        acc += tl.load(start[:, None] + col[None, :].to(tl.int64) * start_n, mask=mask, other=0.0).to(tl.float32)
    out = out_ptr + row_offset(row, inner, out_outer, out_row, SPLIT)
    value = activate(acc, EPILOGUE).to(out_ptr.dtype.element_ty)
    tl.store(out[:, None] + col[None, :].to(tl.int64) * out_n, value, mask=mask)


def matmul_into_launch(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    epilogue: str = "none",
    allow_tf32: bool = False,
    tile: Tile | None = None,
) -> Launch | None:
    """The launch of `matmul_into`; None where the output is empty."""
    check_operands(a, b, out)
    check_epilogue(epilogue)
    if start is not None and start.shape != out.shape:
        raise KernelError.wrong("start", f"the shape of out, {tuple(out.shape)}", tuple(start.shape))
    kind = operand_kind(a.dtype, allow_tf32)
    cols, rows = b.shape[1], prod(a.shape[:-1])
    if out.numel() == 0:
        return None
    device = device_of(a)
    if tile is None:
        heavy = bias is not None or start is not None or epilogue != "none"
        tile = default_tile(device.target, kind, rows, cols, heavy=heavy, multiprocessors=device.multiprocessors)
    # Tensors that can be read as one block of rows are; the others agree on the size of a block.
    blocks = as_blocks(a, out, *(() if start is None else (start,)))
    inner, (a_strides, out_strides, *rest) = blocks
    start_strides = rest[0] if rest else (0, 0, 0)
    arguments: dict[str, Any] = {
        "a_ptr": a,
        "b_ptr": b,
        "out_ptr": out,
        "bias_ptr": vector(bias, cols, "bias"),
        "start_ptr": start,
        "scale_ptr": scalar(scale, "scale"),
        **product_arguments(b, a_strides, out_strides, rows, inner, kind, tile),
        **dict(zip(("start_outer", "start_row", "start_n"), start_strides, strict=True)),
        "EPILOGUE": epilogue,
    }
    name = f"matmul_into[{kind}{',split' if inner != rows else ''}]"
    return Launch(name, matmul_into_kernel, (tile.count(rows, cols),), arguments, tile.warps, tile.stages)


def matmul_into(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    epilogue: str = "none",
    allow_tf32: bool = False,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Write `epilogue(scale * (a @ b) + start + bias)` into `out`, and return it. Shapes: see the module.

    Raises KernelError for shapes that do not fit, other dtypes than bf16, fp16, fp32 and fp8 e4m3, or an unknown epilogue.
    """
    launch = matmul_into_launch(
        a, b, out, bias=bias, start=start, scale=scale, epilogue=epilogue, allow_tf32=allow_tf32, tile=tile
    )
    if launch is not None:
        launch.run()
    return out


def matmul_into_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    epilogue: str = "none",
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The same in plain torch, computed in `dtype`."""
    value = a.to(dtype) @ b.to(dtype)
    if scale is not None:
        value = value * scale.to(dtype)
    for addend in (bias, start):
        if addend is not None:
            value = value + addend.to(dtype)
    return apply_epilogue(value, epilogue)


def apply_epilogue(value: torch.Tensor, epilogue: str) -> torch.Tensor:
    """One of `EPILOGUES` in plain torch."""
    functional = torch.nn.functional
    match epilogue:
        case "relu":
            return functional.relu(value)
        case "gelu":
            return functional.gelu(value)
        case "gelu_tanh":
            return functional.gelu(value, approximate="tanh")
        case "silu":
            return functional.silu(value)
    return value
