"""What a check of `make gpu-check` gets: the device, sizes, a timer; and how it says that it cannot run here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from fo_compiler.codegen.tiles import Tile


class Skipped(Exception):
    """The machine lacks what a check needs; the message says what."""


class Failed(AssertionError):
    """A check that did not hold, with the figures that it has all the same."""

    def __init__(self, problems: Sequence[str], figures: dict[str, Any]) -> None:
        super().__init__("; ".join(problems))
        self.figures = figures


@dataclass(frozen=True)
class Layer:
    """A matmul of one rank, [m, k] @ [k, n], in a group of `ranks`."""

    name: str
    m: int
    k: int
    n: int
    ranks: int = 8

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.k * self.n


# Llama 3 70B and 8B, 8192 tokens, tensor parallel in 8 (https://arxiv.org/abs/2407.21783, table 3).
LAYERS = (
    Layer("70B gate and up", 8192, 8192, 7168),
    Layer("70B down", 8192, 3584, 8192),
    Layer("8B gate and up", 8192, 4096, 3584),
    Layer("8B qkv", 8192, 4096, 768),
)


@dataclass(frozen=True)
class Context:
    """`timer` gives microseconds; `tile` is forced where it is not None (the interpreter, which wants small ones)."""

    device: torch.device
    target: str
    timer: Callable[[Callable[[], object]], float]
    layers: tuple[Layer, ...] = LAYERS
    odd: tuple[int, int, int] = (300, 200, 264)  # m, k, n: no multiples of any tile
    even: tuple[int, int, int] = (512, 256, 512)
    autotune: bool = False
    tile: Tile | None = None


def context_of(autotune: bool = False) -> Context:
    """The GPU of this machine. Raises Skipped where there is none that the kernels run on."""
    if not torch.cuda.is_available():
        raise Skipped("no CUDA device")
    if not find_spec("triton"):
        raise Skipped("no Triton: pip install triton")
    from fo_compiler.codegen.autotune import time_us
    from fo_compiler.codegen.tiles import target_for
    from fo_compiler.errors import KernelError

    try:
        target = target_for(torch.cuda.get_device_capability())
    except KernelError as error:
        raise Skipped(str(error)) from error
    return Context(torch.device("cuda", torch.cuda.current_device()), target, time_us, autotune=autotune)
