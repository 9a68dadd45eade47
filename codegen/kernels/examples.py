"""One launch a kernel, a kind of operands and a form, on tensors that hold nothing: what is compiled without a GPU.

The sizes are those of a layer of a large model, so that the default tiles are the ones used there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from ..launch import Launch
from ..tiles import fitting_tiles, operand_kinds, tiles
from .flags import set_flags_launch, wait_flags_launch
from .partial_sums import sum_partials_launch
from .slice_matmul import matmul_into_launch
from .whole_gather import all_gather_matmul_launch
from .whole_scatter import matmul_reduce_scatter_launch

ROWS, DEPTH, COLS = 4096, 4096, 4096
RANKS = 8
_DTYPES = {"16bit": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


def launches(target: str) -> Iterator[Launch]:
    """All of them for `target`. Names differ."""
    for kind in operand_kinds(target):
        yield from _matmul_into(target, kind)
        yield from _whole_region(target, kind)
    yield from _others()


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _out_dtype(kind: str) -> torch.dtype:
    return torch.float32 if kind in ("tf32", "fp32") else torch.bfloat16


def _named(launch: Launch | None, name: str) -> Launch:
    assert launch is not None
    return Launch(name, launch.kernel, launch.grid, launch.arguments, launch.warps, launch.stages)


def _matmul_into(target: str, kind: str) -> Iterator[Launch]:
    a, b = _meta(ROWS, DEPTH, dtype=_DTYPES[kind]), _meta(DEPTH, COLS, dtype=_DTYPES[kind])
    # A weight as nn.Linear keeps it, [n, k]; the only form that fp8 has on tensor cores.
    weight = _meta(COLS, DEPTH, dtype=_DTYPES[kind]).t()
    bias, scale = _meta(COLS, dtype=_out_dtype(kind)), _meta(1, dtype=torch.float32)
    out = _meta(ROWS, COLS, dtype=_out_dtype(kind))
    tf32 = kind == "tf32"
    for tile, right in product(tiles(target, kind), ("kn", "nk")):
        if kind == "fp8" and right == "kn":
            continue
        launch = matmul_into_launch(
            a, b if right == "kn" else weight, out, scale=scale if kind == "fp8" else None, allow_tf32=tf32, tile=tile
        )
        yield _named(launch, f"matmul_into[{kind},{right},{tile}]")
    tile = fitting_tiles(target, kind, heavy=True)[0]
    start = _meta(ROWS, COLS, dtype=torch.float32)
    launch = matmul_into_launch(a, weight, start, start=start, allow_tf32=tf32, tile=tile)
    yield _named(launch, f"matmul_into[{kind},accumulate,{tile}]")
    batch, joined = _meta(4, ROWS // 4, DEPTH, dtype=a.dtype), _meta(4, 4 * ROWS, COLS, dtype=out.dtype)
    launch = matmul_into_launch(
        batch, weight, joined[:, : ROWS // 4], bias=bias, epilogue="gelu", allow_tf32=tf32, tile=tile
    )
    yield _named(launch, f"matmul_into[{kind},split,bias,gelu,{tile}]")


def _whole_region(target: str, kind: str) -> Iterator[Launch]:
    rows, dtype, out_dtype, tf32 = ROWS // RANKS, _DTYPES[kind], _out_dtype(kind), kind == "tf32"
    weight = _meta(COLS, DEPTH, dtype=dtype).t()
    slices, own = _meta(RANKS, rows, DEPTH, dtype=dtype), _meta(1, rows, DEPTH, dtype=dtype)
    out, bias = _meta(RANKS, rows, COLS, dtype=out_dtype), _meta(COLS, dtype=out_dtype)
    order, counters, epoch = (_meta(*shape, dtype=torch.int32) for shape in ((RANKS, 2), (RANKS,), (1,)))
    groups, adds = _meta(RANKS, 5, dtype=torch.int64), _meta(RANKS - 1, 2, dtype=torch.int64)
    for heavy in (False, True):
        tile = fitting_tiles(target, kind, heavy)[0]
        form = f"{kind}{',bias,silu' if heavy else ''},{tile}"
        launch = all_gather_matmul_launch(
            own, slices, weight, out, order, counters, epoch, counters, bias=bias if heavy else None,
            epilogue="silu" if heavy else "none", allow_tf32=tf32, tile=tile,
        )  # fmt: skip
        yield _named(launch, f"all_gather_matmul[{form}]")
        form = f"{kind}{',adds' if heavy else ''},{tile}"
        launch = matmul_reduce_scatter_launch(
            slices,
            weight,
            out[0],
            groups,
            adds if heavy else None,
            counters,
            epoch,
            counters[1:],  # one for each of `adds`
            allow_tf32=tf32,
            tile=tile,
        )
        yield _named(launch, f"matmul_reduce_scatter[{form}]")


def _others() -> Iterator[Launch]:
    parts, residual = (
        [_meta(ROWS, COLS, dtype=torch.bfloat16) for _ in range(RANKS)],
        _meta(ROWS, COLS, dtype=torch.float32),
    )
    yield _named(sum_partials_launch(parts, parts[0]), "sum_partials[8,bf16]")
    yield _named(
        sum_partials_launch([p[:, 8:] for p in parts], parts[0][:, 8:], residual[:, 8:]),
        "sum_partials[8,bf16,residual,rows]",
    )
    flags, epoch = _meta(RANKS, dtype=torch.int32), _meta(1, dtype=torch.int32)
    yield wait_flags_launch(flags, epoch, flags)
    yield set_flags_launch(_meta(RANKS, dtype=torch.int64), epoch)
