"""Checks of what a kernel is given, and how its rows lie in memory."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelError
from ..launch import tile_arguments
from ..tiles import Tile
from .language import INTERPRETED

Strides = tuple[int, int, int]  # of a block of rows, a row, an element of a row
EPILOGUES = ("none", "relu", "gelu", "gelu_tanh", "silu")


def check_operands(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Raises KernelError unless out [..., n] can be a [..., k] @ b [k, n]."""
    if a.dim() not in (2, 3) or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise KernelError.wrong("operands", "a [rows, k] or [outer, inner, k] and b [k, n]", _shapes(a, b))
    if a.dtype != b.dtype:
        raise KernelError.wrong("operands", "one dtype", f"{a.dtype} and {b.dtype}")
    if out.shape != (*a.shape[:-1], b.shape[1]):
        raise KernelError.wrong("out", f"shape {(*a.shape[:-1], b.shape[1])}", tuple(out.shape))
    if len({a.device, b.device, out.device}) > 1:
        raise KernelError.wrong("operands", "tensors on one device", f"{a.device}, {b.device}, {out.device}")


def check_epilogue(epilogue: str) -> None:
    if epilogue not in EPILOGUES:
        raise KernelError.wrong("epilogue", f"one of {', '.join(EPILOGUES)}", epilogue)


def as_blocks(*tensors: torch.Tensor) -> tuple[int, list[Strides]]:
    """Rows in a block, and each tensor's strides: one block of all rows where every tensor allows it.

    The tensors have equal leading dims, one or two, and their elements last.
    """
    first = tensors[0]
    if first.dim() == 2:
        return first.shape[0], [(0, t.stride(0), t.stride(1)) for t in tensors]
    outer, inner = first.shape[:2]
    if outer == 1:
        return inner, [(0, t.stride(1), t.stride(2)) for t in tensors]
    if inner == 1:
        return outer, [(0, t.stride(0), t.stride(2)) for t in tensors]
    if all(t.stride(0) == inner * t.stride(1) for t in tensors):
        return outer * inner, [(0, t.stride(1), t.stride(2)) for t in tensors]
    return inner, [(t.stride(0), t.stride(1), t.stride(2)) for t in tensors]


def product_arguments(
    b: torch.Tensor, a_strides: Strides, out_strides: Strides, rows: int, inner: int, kind: str, tile: Tile
) -> dict[str, Any]:
    """The arguments that every kernel with a matmul has: sizes, strides, how to multiply, and its tile.

    `rows` rows lie in blocks of `inner` (`as_blocks`); `kind` is that of `operand_kind`.
    """
    depth, cols = b.shape
    return {
        "rows": rows,
        "cols": cols,
        "depth": depth,
        "inner": inner,
        **dict(zip(("a_outer", "a_row", "a_k"), a_strides, strict=True)),
        "b_k": b.stride(0),
        "b_n": b.stride(1),
        **dict(zip(("out_outer", "out_row", "out_n"), out_strides, strict=True)),
        "SPLIT": inner != rows,
        "PRECISION": "tf32" if kind == "tf32" else "ieee",
        "PLAIN": INTERPRETED,
        **tile_arguments(tile, depth),
    }


def vector(tensor: torch.Tensor | None, size: int, name: str) -> torch.Tensor | None:
    """A contiguous [size] tensor, or None. Raises KernelError for another shape."""
    if tensor is not None and tensor.shape != (size,):
        raise KernelError.wrong(name, f"shape ({size},)", tuple(tensor.shape))
    return None if tensor is None else tensor.contiguous()


def scalar(tensor: torch.Tensor | None, name: str) -> torch.Tensor | None:
    """A float32 tensor of one element, or None. Raises KernelError for another one."""
    if tensor is not None and (tensor.numel() != 1 or tensor.dtype != torch.float32):
        raise KernelError.wrong(name, "one float32 element", f"{tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor


def _shapes(*tensors: torch.Tensor) -> str:
    return " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
