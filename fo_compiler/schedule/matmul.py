"""How long a matmul takes: the compute half of a `Machine`.

Roofline   peak throughput and memory bandwidth, with whole tiles on whole waves of compute units
Measured   points from `fo-compiler calibrate`, joined by power laws
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import MachineError

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
_ALIASES = {
    "float64": "fp64", "double": "fp64", "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16",
    "half": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip


def dtype_name(dtype: str) -> str:
    """The short name of a dtype: `bf16` for `bfloat16` and `torch.bfloat16`. Raises MachineError for an unknown one."""
    name = dtype.removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        raise MachineError.wrong("dtype", f"one of {', '.join(DTYPE_BYTES)}", dtype)
    return name


@dataclass(frozen=True)
class Roofline:
    """The larger of compute time and memory time.

    Compute counts whole tiles on whole waves, which is what makes a thin slice slow: with `units` compute units (SMs, cores) and
    `tile` x `tile` outputs a block, a matmul of T blocks takes ceil(T / units) waves, and a wave takes
    2 tile^2 (K + `ramp_k`) FLOP at 1 / units of `efficiency` x peak; `ramp_k` stands for prologue and epilogue.
    """

    peak_TFLOPS: dict[str, float]  # by dtype, dense
    memory_GBps: float
    units: int
    tile: int = 128
    efficiency: float = 0.8  # of peak, in the steady state of a large matmul
    ramp_k: int = 128

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.peak_TFLOPS.items())), self.memory_GBps, self.units, self.tile))

    def time_us(self, m: int, k: int, n: int, dtype: str) -> float:
        peak = self.peak_TFLOPS.get(dtype)
        if peak is None:
            raise MachineError.wrong("matmul.peak_TFLOPS", f"an entry for {dtype}", f"{sorted(self.peak_TFLOPS)}")
        waves = math.ceil(math.ceil(m / self.tile) * math.ceil(n / self.tile) / self.units)
        flop_per_us = peak * 1e6 * self.efficiency / self.units
        compute_us = waves * 2 * self.tile**2 * (k + self.ramp_k) / flop_per_us
        memory_us = (m * k + k * n + m * n) * DTYPE_BYTES[dtype] / (self.memory_GBps * 1e3)
        return max(compute_us, memory_us)


@dataclass(frozen=True)
class MatmulPoint:
    """One measured matmul, [M, K] @ [K, N]."""

    m: int
    k: int
    n: int
    dtype: str
    time_us: float

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.k * self.n


@dataclass(frozen=True)
class Measured:
    """Measured points. Between two of them time follows a power law of the FLOP count; beyond the ends the last one
    goes on, with an exponent between 0 (a floor) and 1 (constant throughput)."""

    points: tuple[MatmulPoint, ...]
    memory_GBps: float

    def __post_init__(self) -> None:
        if not self.points:
            raise MachineError.wrong("matmul.points", "at least one measured matmul", "none")

    def time_us(self, m: int, k: int, n: int, dtype: str) -> float:
        points = sorted((p for p in self.points if p.dtype == dtype), key=lambda p: p.flop)
        if not points:
            known = sorted({p.dtype for p in self.points})
            raise MachineError.wrong("matmul.points", f"a point for {dtype}", f"points for {', '.join(known)}")
        flop = 2.0 * m * k * n
        if len(points) == 1:
            return points[0].time_us * flop / points[0].flop
        upper = next((i for i, p in enumerate(points) if p.flop >= flop and i > 0), len(points) - 1)
        low, high = points[upper - 1], points[upper]
        if high.flop == low.flop:
            return (low.time_us + high.time_us) / 2 * flop / low.flop
        exponent = math.log(high.time_us / low.time_us) / math.log(high.flop / low.flop)
        if not low.flop <= flop <= high.flop:
            exponent = min(max(exponent, 0.0), 1.0)
        anchor = low if flop <= high.flop else high
        return anchor.time_us * float((flop / anchor.flop) ** exponent)


MatmulModel = Roofline | Measured
