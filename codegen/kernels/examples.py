"""One launch a kernel, a kind of operands and a form, on tensors that hold nothing: what is compiled without a GPU.

The sizes are those of a layer of a large model, so that the default tiles are the ones used there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from ..launch import Launch
from ..tiles import fitting_tiles, operand_kinds, tiles
from .matmul_into import matmul_into_launch

ROWS, DEPTH, COLS = 4096, 4096, 4096
_DTYPES = {"16bit": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


def launches(target: str) -> Iterator[Launch]:
    """All of them for `target`. Names differ."""
    for kind in operand_kinds(target):
        yield from _matmul_into(target, kind)


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
