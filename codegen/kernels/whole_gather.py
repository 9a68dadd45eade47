"""All-gather and matmul in one persistent kernel: no launch a slice, no wave loss between slices.

    out[s] = epilogue(scale * (slice_s @ b) + bias)        slice_s = own[part] for an own slice, else gathered[s]

    own       [m, rows, k] or [m, outer, inner, k]    this rank's slices, where they are
    gathered  [S, rows, k] or [S, outer, inner, k]    where the others arrive; the own ones in it are not read
    b         [k, n]
    out       [S, rows, n] or [S, outer, inner, n]    a view of the joined output, any strides
    order     int32 [S, 2]    slice and own part (-1: it arrives), in the order of the schedule's program: `order_table`
    flags     int32 [S]       raised to the epoch by the transport when a slice has arrived (`flags.py`)
    epoch     int32 [1]
    late      int32 [S]       set to 1 for a slice that never came

    program p of P:  for tile in p, p + P, p + 2P, ... of all tiles, slice by slice in the order:
                         wait for the flag of the tile's slice (unless own, or waited for already)
                         compute the tile

Tiles of one slice run side by side, and those of the next start as multiprocessors become free: a slice that is not a whole
number of waves costs nothing. All programs wait for the same flag at once when communication is the bottleneck, and nothing else
does: so transfers must not need a multiprocessor (copy engine, not NCCL kernels), or `programs` must leave some free.

Sources: arXiv 2604.24013, section 3 (own slice first); persistent form as in Triton's tutorial on persistent matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped]

from ...errors import KernelError
from ..launch import Launch, device_of, operand_kind
from ..order import GatherGroup
from ..tiles import Tile, default_tile
from .flags import POLLS, check_int32, wait_flag
from .language import jit
from .operands import as_blocks, check_epilogue, check_operands, product_arguments, scalar, vector
from .product import activate, place, product, row_offset


@jit
def all_gather_matmul_kernel(
    own_ptr: tl.tensor,
    gathered_ptr: tl.tensor,
    b_ptr: tl.tensor,
    out_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    order_ptr: tl.tensor,
    flags_ptr: tl.tensor,
    epoch_ptr: tl.tensor,
    late_ptr: tl.tensor,
    polls: tl.tensor,
    slices: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    depth: tl.tensor,
    inner: tl.tensor,
    own_slice: tl.tensor,
    gathered_slice: tl.tensor,
    a_outer: tl.tensor,
    a_row: tl.tensor,
    a_k: tl.tensor,
    b_k: tl.tensor,
    b_n: tl.tensor,
    out_slice: tl.tensor,
    out_outer: tl.tensor,
    out_row: tl.tensor,
    out_n: tl.tensor,
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
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(cols, BLOCK_N)
    tiles = tiles_m * tiles_n
    epoch = tl.load(epoch_ptr)
    left = tl.cast(polls, tl.int32)
    ready = -1  # the last group that was waited for
    for index in range(tl.program_id(0), slices * tiles, tl.num_programs(0)):
        group = index // tiles
        slice_ = tl.load(order_ptr + 2 * group).to(tl.int64)
        part = tl.load(order_ptr + 2 * group + 1).to(tl.int64)
        if (part < 0) & (group != ready):
            left = wait_flag(flags_ptr + slice_, epoch, left, PLAIN)
            if left == 0:
                tl.store(late_ptr + slice_, 1)
        ready = group
        tile_m, tile_n = place(index % tiles, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        a = gathered_ptr + slice_ * gathered_slice if part < 0 else own_ptr + part * own_slice
        a = a + row_offset(row % rows, inner, a_outer, a_row, SPLIT)
        b = b_ptr + (col % cols).to(tl.int64) * b_n
        acc = product(a, b, depth, a_k, b_k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, PLAIN)
        if scale_ptr is not None:
            acc *= tl.load(scale_ptr)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + col, mask=col < cols, other=0.0).to(tl.float32)[None, :]
        out = out_ptr + slice_ * out_slice + row_offset(row, inner, out_outer, out_row, SPLIT)
        value = activate(acc, EPILOGUE).to(out_ptr.dtype.element_ty)
        mask = (row[:, None] < rows) & (col[None, :] < cols)
        tl.store(out[:, None] + col[None, :].to(tl.int64) * out_n, value, mask=mask)


def order_table(order: Sequence[GatherGroup], device: torch.device | str = "cpu") -> torch.Tensor:
    """The `order` argument. Made once a schedule: it is copied to the device."""
    rows = [(group.slice, -1 if group.own_part is None else group.own_part) for group in order]
    return torch.tensor(rows, dtype=torch.int32).to(device)


def all_gather_matmul_launch(
    own: torch.Tensor,
    gathered: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor,
    flags: torch.Tensor,
    epoch: torch.Tensor,
    late: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    epilogue: str = "none",
    allow_tf32: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
    polls: int = POLLS,
) -> Launch | None:
    """The launch of `all_gather_matmul`; None where the output is empty."""
    slices = gathered.shape[0]
    if own.shape[1:] != gathered.shape[1:] or out.shape[:1] != gathered.shape[:1]:
        raise KernelError.wrong(
            "slices",
            "own [m, ...] and gathered [S, ...] of equal slices, out [S, ...]",
            f"{tuple(own.shape)}, {tuple(gathered.shape)}, {tuple(out.shape)}",
        )
    check_operands(gathered[0], b, out[0])
    check_operands(own[0], b, out[0])
    check_epilogue(epilogue)
    for tensor, name, size in ((order, "order", 2 * slices), (flags, "flags", slices), (late, "late", slices)):
        check_int32(tensor, name, size)
    check_int32(epoch, "epoch", 1)
    kind = operand_kind(gathered.dtype, allow_tf32)
    cols, rows = b.shape[1], prod(gathered.shape[1:-1])
    if out.numel() == 0:
        return None
    device = device_of(gathered)
    if tile is None:
        heavy = bias is not None or epilogue != "none"
        tile = default_tile(
            device.target, kind, rows, cols, slices=slices, heavy=heavy, multiprocessors=device.multiprocessors
        )
    inner, (own_strides, a_strides, out_strides) = as_blocks(own[0], gathered[0], out[0])
    if own_strides != a_strides:
        raise KernelError.wrong("own", f"a slice with the strides of one of gathered, {a_strides}", own_strides)
    total = slices * tile.count(rows, cols)
    arguments: dict[str, Any] = {
        "own_ptr": own,
        "gathered_ptr": gathered,
        "b_ptr": b,
        "out_ptr": out,
        "bias_ptr": vector(bias, cols, "bias"),
        "scale_ptr": scalar(scale, "scale"),
        "order_ptr": order,
        "flags_ptr": flags,
        "epoch_ptr": epoch,
        "late_ptr": late,
        "polls": polls,
        "slices": slices,
        "own_slice": own.stride(0),
        "gathered_slice": gathered.stride(0),
        **product_arguments(b, a_strides, out_strides, rows, inner, kind, tile),
        "out_slice": out.stride(0),
        "EPILOGUE": epilogue,
    }
    grid = (min(programs or device.multiprocessors, total),)
    return Launch(f"all_gather_matmul[{kind}]", all_gather_matmul_kernel, grid, arguments, tile.warps, tile.stages)


def all_gather_matmul(
    own: torch.Tensor,
    gathered: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor,
    flags: torch.Tensor,
    epoch: torch.Tensor,
    late: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    epilogue: str = "none",
    allow_tf32: bool = False,
    tile: Tile | None = None,
    programs: int | None = None,
    polls: int = POLLS,
) -> torch.Tensor:
    """Fill `out` as slices arrive, and return it. Shapes and the contract: see the module.

    `programs`: thread blocks, one a multiprocessor by default. Raises KernelError for shapes, strides or dtypes that do not fit.
    """
    launch = all_gather_matmul_launch(
        own, gathered, b, out, order, flags, epoch, late, bias=bias, scale=scale, epilogue=epilogue,
        allow_tf32=allow_tf32, tile=tile, programs=programs, polls=polls,
    )  # fmt: skip
    if launch is not None:
        launch.run()
    return out


def all_gather_matmul_reference(
    slices: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    epilogue: str = "none",
) -> torch.Tensor:
    """The same in plain torch, in float64, of the whole [S, rows, k]."""
    from .slice_matmul import matmul_into_reference

    return matmul_into_reference(slices, b, bias=bias, scale=scale, epilogue=epilogue)
