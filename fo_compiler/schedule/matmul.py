"""How long a matmul takes: the compute half of a `Machine`.

Roofline   peak throughput and memory bandwidth, with whole tiles on whole waves of compute units
Measured   points from `fo-compiler calibrate`, joined by a law that knows shapes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
    """Measured points, joined by a law of five terms: FLOP, the elements of each factor and of the result, and a start.

    The terms' costs are fitted to the points (none is below 0). By how much the points differ from the law is carried over to
    other shapes, most of it to those that are near: a thin matmul is slow whatever its FLOP count is. At the points the answer
    is the measured time.
    """

    points: tuple[MatmulPoint, ...]
    memory_GBps: float

    def __post_init__(self) -> None:
        if not self.points:
            raise MachineError.wrong("matmul.points", "at least one measured matmul", "none")
        if any(not 0 < p.time_us < math.inf or min(p.m, p.k, p.n) < 1 for p in self.points):
            raise MachineError.wrong("matmul.points", "sizes of at least 1 and times above 0", "others")

    def time_us(self, m: int, k: int, n: int, dtype: str) -> float:
        law = self._laws.get(dtype)
        if law is None:
            raise MachineError.wrong("matmul.points", f"a point for {dtype}", f"points for {', '.join(self._laws)}")
        return law.time_us(m, k, n)

    @cached_property
    def _laws(self) -> dict[str, _Law]:
        return {
            dtype: _Law.fit([p for p in self.points if p.dtype == dtype])
            for dtype in sorted({p.dtype for p in self.points})
        }


NEAR = 0.05  # squared distance, in doublings of a size, within which points count alike
SWEEPS = 300


@dataclass(frozen=True)
class _Law:
    costs: tuple[float, ...]  # us a unit of each term
    points: tuple[tuple[tuple[float, ...], float], ...]  # log2 of the sizes, log of measured / fitted

    @classmethod
    def fit(cls, points: Sequence[MatmulPoint]) -> _Law:
        """The least relative errors, term by term in turn: it begins with FLOP, which one point alone is explained by."""
        rows = [[term / p.time_us for term in _terms(p.m, p.k, p.n)] for p in points]
        columns = list(zip(*rows, strict=True))
        products = [[sum(a * b for a, b in zip(one, other, strict=True)) for other in columns] for one in columns]
        costs = [0.0] * len(columns)
        for _ in range(SWEEPS):
            for i, column in enumerate(columns):
                rest = sum(column) - sum(cost * product for cost, product in zip(costs, products[i], strict=True))
                costs[i] = max(0.0, costs[i] + rest / products[i][i])
        times: dict[tuple[float, ...], list[float]] = {}
        for p in points:
            times.setdefault(_place(p.m, p.k, p.n), []).append(p.time_us / _fitted(costs, p.m, p.k, p.n))
        logs = [(place, sum(map(math.log, ratios)) / len(ratios)) for place, ratios in times.items()]
        return cls(tuple(costs), tuple(logs))

    def time_us(self, m: int, k: int, n: int) -> float:
        place, total, weights = _place(m, k, n), 0.0, 0.0
        fitted = _fitted(self.costs, m, k, n)
        for other, log in self.points:
            distance = sum((a - b) ** 2 for a, b in zip(place, other, strict=True))
            if not distance:
                return fitted * math.exp(log)
            weight = 1 / (distance + NEAR)
            total, weights = total + weight * log, weights + weight
        return fitted * math.exp(total / weights)


def _terms(m: int, k: int, n: int) -> tuple[float, ...]:
    return (2.0 * m * k * n, 1.0 * m * k, 1.0 * k * n, 1.0 * m * n, 1.0)


def _place(m: int, k: int, n: int) -> tuple[float, ...]:
    return (math.log2(max(m, 1)), math.log2(max(k, 1)), math.log2(max(n, 1)))


def _fitted(costs: Sequence[float], m: int, k: int, n: int) -> float:
    return sum(cost * term for cost, term in zip(costs, _terms(m, k, n), strict=True))


MatmulModel = Roofline | Measured
