"""Matmul and reduce-scatter in one persistent kernel: each slice leaves as soon as its last tile is done.

    place[s] = round(scale * (a[s] @ b) + sum of what is added to slice s)

    a         [S, rows, k] or [S, outer, inner, k]    all slices, own ones included
    b         [k, n]
    groups    int64 [S, 5]    in the order of the schedule's program, own slices last: slice, address of its place, address of the
                              flag to raise (0: none), first row and number of rows of `adds`
    adds      int64 [A, 2]    address of a partial sum, address of the flag under which it arrives; None: nothing is added
    counters  int32 [S]       zeros; the kernel leaves zeros
    epoch     int32 [1]
    late      int32 [A]       set to 1 for a partial sum that never came; not read where nothing is added

`scatter_tables` makes `groups` and `adds`. A place is a [rows, n] or [outer, inner, n] tensor, here (the copy engine takes it
from there once its flag is up) or mapped from the peer (tiles are stored straight there). Places and partial sums have one dtype
and the strides of `like`.

    ring     a slice adds the running sum that arrived, and goes to the next rank
    direct   a slice goes to its owner; an own slice adds the N - 1 partial sums that arrived, in float32, rounded once

    program p of P:  for tile in p, p + P, ... of all tiles, slice by slice in the order:
                         compute the tile; wait for and add what is added; store
                         count it (release); whoever counts the slice's last tile (acquire) raises its flag (release)

Waiting comes after the product, so it hides under it. A wait is for a slice that the peer computes earlier in its own order,
so ranks cannot wait for each other in a cycle (`schedule.verify`), as long as every program of a rank runs: `programs` may be no
more than there are multiprocessors.

Sources: arXiv 2604.24013, section 3 (own slice last); PTX ISA, "Causality order": release patterns of many blocks that meet in
one counter are cumulative.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped]

from ...errors import KernelError
from ..launch import Launch, device_of, operand_kind
from ..order import ScatterGroup
from ..tiles import Tile, default_tile
from .flags import POLLS, check_int32, set_flag, wait_flag
from .language import jit
from .operands import as_blocks, check_operands, product_arguments, scalar
from .product import place, product, row_offset


@jit
def matmul_reduce_scatter_kernel(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    like_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    adds_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    epoch_ptr: tl.tensor,
    late_ptr: tl.tensor,
    polls: tl.tensor,
    slices: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    depth: tl.tensor,
    inner: tl.tensor,
    a_slice: tl.tensor,
    a_outer: tl.tensor,
    a_row: tl.tensor,
    a_k: tl.tensor,
    b_k: tl.tensor,
    b_n: tl.tensor,
    out_outer: tl.tensor,
    out_row: tl.tensor,
    out_n: tl.tensor,
    SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
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
    for index in range(tl.program_id(0), slices * tiles, tl.num_programs(0)):
        entry = groups_ptr + 5 * (index // tiles)
        slice_ = tl.load(entry)
        tile_m, tile_n = place(index % tiles, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        a = a_ptr + slice_ * a_slice + row_offset(row % rows, inner, a_outer, a_row, SPLIT)
        b = b_ptr + (col % cols).to(tl.int64) * b_n
        acc = product(a, b, depth, a_k, b_k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, PLAIN)
        if scale_ptr is not None:
            acc *= tl.load(scale_ptr)
        mask = (row[:, None] < rows) & (col[None, :] < cols)
        rows_at = row_offset(row, inner, out_outer, out_row, SPLIT)
        offset = rows_at[:, None] + col[None, :].to(tl.int64) * out_n
        if adds_ptr is not None:
            first = tl.load(entry + 3)
            for i in range(first, first + tl.load(entry + 4)):
                arrival = tl.load(adds_ptr + 2 * i + 1).to(tl.pointer_type(tl.int32))
                left = wait_flag(arrival, epoch, left, PLAIN)
                if left == 0:
                    tl.store(late_ptr + i, 1)
                partial = tl.load(adds_ptr + 2 * i).to(like_ptr.dtype)
                if ALIGNED:
                    partial = tl.multiple_of(partial, 16)
                acc += tl.load(partial + offset, mask=mask, other=0.0).to(tl.float32)
        target = tl.load(entry + 1).to(like_ptr.dtype)
        if ALIGNED:
            target = tl.multiple_of(target, 16)
        tl.store(target + offset, acc.to(like_ptr.dtype.element_ty), mask=mask)
        flag = tl.load(entry + 2)
        if flag != 0:
            tl.debug_barrier()  # the tile is stored, by all threads
            if tl.atomic_add(counters_ptr + slice_, 1, sem="acq_rel", scope="gpu") == tiles - 1:
                tl.store(counters_ptr + slice_, 0)
                set_flag(flag.to(tl.pointer_type(tl.int32)), epoch, PLAIN)


def scatter_tables(
    order: Sequence[ScatterGroup],
    places: Sequence[torch.Tensor],
    flags: Sequence[torch.Tensor | None],
    partials: dict[int, tuple[torch.Tensor, torch.Tensor]],
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The `groups` and `adds` arguments. Made once a schedule and its buffers: they are copied to the device.

    By slice: `places`, and `flags` (a view of one element, or None). By step: `partials`, what arrives and its flag.
    Raises KernelError where places and partial sums differ in shape, strides or dtype.
    """
    tensors = [*places, *(partial for partial, _ in partials.values())]
    if len({(t.shape, t.stride(), t.dtype) for t in tensors}) > 1:
        raise KernelError.wrong("places", "one shape, dtype and strides", sorted({str(t.stride()) for t in tensors}))
    groups: list[tuple[int, ...]] = []
    adds: list[tuple[int, int]] = []
    for group in order:
        flag = flags[group.slice]
        address = 0 if flag is None else flag.data_ptr()
        groups.append((group.slice, places[group.slice].data_ptr(), address, len(adds), len(group.adds)))
        adds += [(partials[step][0].data_ptr(), partials[step][1].data_ptr()) for step in group.adds]
    table = torch.tensor(groups, dtype=torch.int64).to(device)
    return table, torch.tensor(adds, dtype=torch.int64).to(device) if adds else None


def matmul_reduce_scatter_launch(
    a: torch.Tensor,
    b: torch.Tensor,
    like: torch.Tensor,
    groups: torch.Tensor,
    adds: torch.Tensor | None,
    counters: torch.Tensor,
    epoch: torch.Tensor,
    late: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    allow_tf32: bool = False,
    aligned: bool = True,
    tile: Tile | None = None,
    programs: int | None = None,
    polls: int = POLLS,
) -> Launch | None:
    """The launch of `matmul_reduce_scatter`; None where there is nothing to compute."""
    slices = a.shape[0]
    check_operands(a[0], b, like)
    for tensor, name, shape in ((groups, "groups", (slices, 5)), (adds, "adds", None)):
        if tensor is not None and (tensor.dtype != torch.int64 or shape not in (None, tuple(tensor.shape))):
            raise KernelError.wrong(name, "the int64 tables of scatter_tables", f"{tensor.dtype} {tuple(tensor.shape)}")
    sizes = {"counters": (counters, slices), "late": (late, 0 if adds is None else len(adds)), "epoch": (epoch, 1)}
    for name, (tensor, size) in sizes.items():
        check_int32(tensor, name, size or None)
    kind = operand_kind(a.dtype, allow_tf32)
    cols, rows = b.shape[1], prod(a.shape[1:-1])
    if like.numel() == 0:
        return None
    device = device_of(a)
    if tile is None:
        heavy = adds is not None
        tile = default_tile(
            device.target, kind, rows, cols, slices=slices, heavy=heavy, multiprocessors=device.multiprocessors
        )
    inner, (a_strides, out_strides) = as_blocks(a[0], like)
    arguments: dict[str, Any] = {
        "a_ptr": a,
        "b_ptr": b,
        "like_ptr": like,
        "scale_ptr": scalar(scale, "scale"),
        "groups_ptr": groups,
        "adds_ptr": adds,
        "counters_ptr": counters,
        "epoch_ptr": epoch,
        "late_ptr": late,
        "polls": polls,
        "slices": slices,
        "a_slice": a.stride(0),
        **product_arguments(b, a_strides, out_strides, rows, inner, kind, tile),
        "ALIGNED": aligned,
    }
    grid = (min(programs or device.multiprocessors, slices * tile.count(rows, cols)),)
    name = f"matmul_reduce_scatter[{kind}{',adds' if adds is not None else ''}]"
    return Launch(name, matmul_reduce_scatter_kernel, grid, arguments, tile.warps, tile.stages)


def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    like: torch.Tensor,
    groups: torch.Tensor,
    adds: torch.Tensor | None,
    counters: torch.Tensor,
    epoch: torch.Tensor,
    late: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    allow_tf32: bool = False,
    aligned: bool = True,
    tile: Tile | None = None,
    programs: int | None = None,
    polls: int = POLLS,
) -> None:
    """Compute every slice and send it on its way. Shapes and the contract: see the module.

    `like` is one of the places. `aligned`: addresses in the tables are multiples of 16 bytes, as those of whole allocations are.
    `programs`: thread blocks, one a multiprocessor by default. Raises KernelError for shapes or dtypes that do not fit.
    """
    launch = matmul_reduce_scatter_launch(
        a, b, like, groups, adds, counters, epoch, late, scale=scale, allow_tf32=allow_tf32, aligned=aligned,
        tile=tile, programs=programs, polls=polls,
    )  # fmt: skip
    if launch is not None:
        launch.run()


def matmul_reduce_scatter_reference(
    a: torch.Tensor, b: torch.Tensor, added: Sequence[torch.Tensor] = (), *, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """What one slice [rows, k] becomes, in plain torch and float64: its product and what is added to it."""
    from .slice_matmul import matmul_into_reference

    value = matmul_into_reference(a, b, scale=scale)
    for partial in added:
        value = value + partial.double()
    return value
