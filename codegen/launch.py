"""A kernel with everything that it is launched with: what runs on a GPU, and what is compiled for one that is not there.

A kernel module makes a `Launch` of tensors; `Launch.run` starts it. Made of tensors on the "meta" device, the same launch is
the specification that `cross_compile.py` compiles, so that the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .tiles import MULTIPROCESSORS, Tile, target_for

DEFAULT_TARGET = "sm_90"  # whose tiles are used where there is no GPU: in the interpreter


@dataclass(frozen=True)
class Launch:
    """`arguments` by parameter name, in order, constants included; tensors may be on the meta device."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    warps: int
    stages: int

    def run(self) -> None:
        """Start it on the current stream of the device that its tensors are on: Triton takes that of the current device."""
        tensor = next(value for value in self.arguments.values() if isinstance(value, torch.Tensor))
        elsewhere = tensor.is_cuda and tensor.device.index != torch.cuda.current_device()
        with torch.cuda.device(tensor.device) if elsewhere else nullcontext():
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)


@dataclass(frozen=True)
class Device:
    """What tile sizes depend on."""

    target: str
    multiprocessors: int


def device_of(tensor: torch.Tensor) -> Device:
    """The GPU that `tensor` is on; `DEFAULT_TARGET` for a tensor on none. Raises KernelError for a GPU before sm_80."""
    if not tensor.is_cuda:
        return Device(DEFAULT_TARGET, MULTIPROCESSORS[DEFAULT_TARGET])
    properties = torch.cuda.get_device_properties(tensor.device)
    return Device(target_for((properties.major, properties.minor)), properties.multi_processor_count)


def operand_kind(dtype: torch.dtype, allow_tf32: bool) -> str:
    """How operands of a dtype are multiplied; a key of the tile table. Raises KernelError for a dtype without a kernel."""
    from ..errors import KernelError

    if dtype in (torch.bfloat16, torch.float16):
        return "16bit"
    if dtype == torch.float32:
        return "tf32" if allow_tf32 else "fp32"
    if dtype == torch.float8_e4m3fn:
        return "fp8"
    raise KernelError.wrong("dtype", "bfloat16, float16, float32 or float8_e4m3fn", dtype)


def tile_arguments(tile: Tile, depth: int) -> dict[str, Any]:
    """The constants that a tile gives a matmul kernel; `EVEN_K` spares it a mask."""
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "EVEN_K": depth % tile.block_k == 0,
    }
