"""The kernel checks of `make gpu-check`: values against float64, flags that come late, speed against cuBLAS."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_context import Context, Failed, Layer, Skipped
from fo_compiler.codegen.autotune import best_tile
from fo_compiler.codegen.kernels import (
    all_gather_matmul,
    all_gather_matmul_launch,
    matmul_into,
    matmul_into_launch,
    matmul_into_reference,
    matmul_reduce_scatter_launch,
    order_table,
    scatter_tables,
    set_flags,
    sum_partials,
    sum_partials_reference,
)
from fo_compiler.codegen.launch import Launch
from fo_compiler.codegen.order import gather_order, scatter_order
from fo_compiler.codegen.tiles import Tile, fitting_tiles, operand_kinds
from fo_compiler.schedule import Kind, build

DTYPES = {"16bit": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
# Error of a product relative to sum |a| |b|: what tensor cores drop of the operands (tf32 keeps 11 bits) and of a sum of fp8
# between two carries (14 bits); float32 sums lose 2^-23 an addition at the very worst.
OPERAND_ERROR = {"16bit": 0.0, "fp32": 0.0, "tf32": 2.0**-9, "fp8": 2.0**-12}


def _random(context: Context, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(context.device).manual_seed(seed)
    return (torch.rand(shape, generator=generator, device=context.device) * 2 - 1).to(dtype)


def _int32(context: Context, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=context.device)


def error_ratio(result: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int, kind: str) -> float:
    """The largest error as a fraction of what is allowed: float32 sums of `terms` addends, one rounding. NaN gives inf."""
    sums = ((terms + 8) * 2.0**-23 + OPERAND_ERROR[kind]) * magnitude
    allowed = 1.2 * sums + torch.finfo(result.dtype).eps * (exact.abs() + sums) + 1e-30
    ratio = (result.double() - exact).abs() / allowed
    return float(torch.nan_to_num(ratio, nan=torch.inf).max())


def _check(figures: dict[str, float], name: str, ratio: float) -> None:
    figures[name] = round(ratio, 3)
    if ratio > 1:
        raise AssertionError(f"{name}: the error against float64 is {ratio:.3g} times what is allowed")


def _tiles(context: Context, kind: str, heavy: bool = False) -> tuple[Tile, ...]:
    return fitting_tiles(context.target, kind, heavy) if context.tile is None else (context.tile,)


def values(context: Context) -> dict[str, Any]:
    """Every tile and form of every kernel against float64; figures are errors as fractions of what is allowed.

    What fails is told when all the others have run, too.
    """
    figures: dict[str, float] = {}
    problems: list[str] = []
    for name, check in _value_checks(context, figures):
        try:
            check()
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    if problems:
        raise Failed(problems, {"errors": figures})
    return {"largest": max(figures.values()), "errors": figures}


def _value_checks(context: Context, figures: dict[str, float]) -> Iterator[tuple[str, Callable[[], None]]]:
    for kind in operand_kinds(context.target):
        for tile in _tiles(context, kind):
            yield f"{kind} {tile}", partial(_matmul_values, context, kind, tile, context.odd, figures)
        yield f"{kind} even", partial(_matmul_values, context, kind, _tiles(context, kind)[0], context.even, figures)
        yield f"{kind} heavy", partial(_heavy_values, context, kind, figures)
        yield f"{kind} region", partial(_region_values, context, kind, figures)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        yield f"sums {dtype}", partial(_sum_values, context, dtype, figures)


def _sum_values(context: Context, dtype: torch.dtype, figures: dict[str, float]) -> None:
    parts = [_random(context, *context.odd[:2], dtype=dtype, seed=i) for i in range(8)]
    residual = _random(context, *context.odd[:2], dtype=torch.float32)
    out = sum_partials(parts, torch.empty_like(parts[0]), residual=residual)
    exact = sum_partials_reference(parts, residual)
    magnitude = sum_partials_reference([part.abs() for part in parts], residual.abs())
    _check(figures, f"sum_partials {dtype}", error_ratio(out, exact, magnitude, 9, "fp32"))


def _operands(context: Context, kind: str, m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """a [m, k]; b [k, n] as a transposed weight, the only form that fp8 has on tensor cores; dtype of the output."""
    dtype = DTYPES[kind]
    out = torch.float32 if kind in ("tf32", "fp32") else torch.bfloat16
    return _random(context, m, k, dtype=dtype), _random(context, n, k, dtype=dtype, seed=1).t(), out


def _matmul_values(
    context: Context, kind: str, tile: Tile, shape: tuple[int, int, int], figures: dict[str, float]
) -> None:
    a, b, dtype = _operands(context, kind, *shape)
    out = torch.full((shape[0], shape[2]), torch.nan, dtype=dtype, device=context.device)
    matmul_into(a, b, out, allow_tf32=kind == "tf32", tile=tile)
    exact, magnitude = matmul_into_reference(a, b), matmul_into_reference(_abs(a), _abs(b))
    _check(figures, f"matmul_into {kind} {tile} {shape}", error_ratio(out, exact, magnitude, shape[1], kind))


def _heavy_values(context: Context, kind: str, figures: dict[str, float]) -> None:
    """Bias, a sum so far, an epilogue, and a slice of a flattened batch in a joined output."""
    m, k, n = context.odd
    rows = m // 3
    a, b, dtype = _operands(context, kind, 3 * rows, k, n)
    a = a.view(3, rows, k)
    bias, start = _random(context, n, dtype=dtype, seed=2), _random(context, 3, rows, n, dtype=torch.float32, seed=3)
    joined = torch.full((3, 4 * rows, n), torch.nan, dtype=dtype, device=context.device)
    tile = _tiles(context, kind, heavy=True)[0]
    for epilogue in ("relu", "gelu", "gelu_tanh", "silu"):
        out = joined[:, 2 * rows : 3 * rows]
        matmul_into(a, b, out, bias=bias, start=start, epilogue=epilogue, allow_tf32=kind == "tf32", tile=tile)
        exact = matmul_into_reference(a, b, bias=bias, start=start, epilogue=epilogue)
        magnitude = matmul_into_reference(_abs(a), _abs(b), bias=bias.abs(), start=start.abs())
        _check(figures, f"matmul_into {kind} {epilogue}", error_ratio(out, exact, magnitude, k, kind))
    if not torch.isnan(joined[:, : 2 * rows]).all() or not torch.isnan(joined[:, 3 * rows :]).all():
        raise AssertionError(f"matmul_into {kind}: wrote outside of its slice")


def _region_values(context: Context, kind: str, figures: dict[str, float]) -> None:
    """Whole regions with all flags up, as rank 1 of 4."""
    ranks, (m, k, n) = 4, context.odd
    a, b, dtype = _operands(context, kind, ranks * m, k, n)
    a = a.view(ranks, m, k)
    exact, magnitude = matmul_into_reference(a, b), matmul_into_reference(_abs(a), _abs(b))
    out = torch.full((ranks, m, n), torch.nan, dtype=dtype, device=context.device)
    gather, scatter = _gather(context, a, b, out, kind, ranks), _Scatter(context, a, b, out, kind, ranks)
    gather.run()
    _check(figures, f"all_gather_matmul {kind}", error_ratio(out, exact, magnitude, k, kind))
    out.fill_(torch.nan)
    scatter.launch.run()
    exact[1] += scatter.arriving.double().sum(0)
    magnitude[1] += scatter.arriving.double().abs().sum(0)
    _check(figures, f"matmul_reduce_scatter {kind}", error_ratio(out, exact, magnitude, k + ranks, kind))
    if scatter.flags.tolist() != [1, 0, 1, 1] or scatter.counters.any():
        raise AssertionError(f"matmul_reduce_scatter {kind}: flags {scatter.flags.tolist()}")


def _abs(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().abs()


def _gather(
    context: Context,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    kind: str,
    ranks: int,
    tile: Tile | None = None,
) -> Launch:
    """all_gather_matmul as rank 1, all slices there. Raises AssertionError where there is nothing to compute."""
    order = order_table(gather_order(build(Kind.ALL_GATHER, "ring", ranks, 1), 1), context.device)
    flags, epoch = _int32(context, *[1] * ranks), _int32(context, 1)
    launch = all_gather_matmul_launch(
        a[1:2], a, b, out, order, flags, epoch, torch.zeros_like(flags), allow_tf32=kind == "tf32",
        tile=tile or context.tile,
    )  # fmt: skip
    assert launch is not None
    return launch


class _Scatter:
    """matmul_reduce_scatter as rank 1, direct, all partial sums there."""

    def __init__(
        self,
        context: Context,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        kind: str,
        ranks: int,
        tile: Tile | None = None,
    ) -> None:
        order = scatter_order(build(Kind.REDUCE_SCATTER, "direct", ranks, 1), 1)
        steps = order[-1].adds
        self.arriving = _random(context, len(steps), *out.shape[1:], dtype=out.dtype, seed=5)
        self.flags, self.counters = torch.zeros_like(_int32(context, *[0] * ranks)), _int32(context, *[0] * ranks)
        self.arrived = _int32(context, *[1] * len(steps))
        groups, adds = scatter_tables(
            order,
            list(out),
            [None if s == 1 else self.flags[s : s + 1] for s in range(ranks)],
            {step: (self.arriving[i], self.arrived[i : i + 1]) for i, step in enumerate(steps)},
            context.device,
        )
        aligned = all(t.data_ptr() % 16 == 0 for t in (*out, *self.arriving))
        launch = matmul_reduce_scatter_launch(
            a, b, out[0], groups, adds, self.counters, _int32(context, 1), torch.zeros_like(self.arrived),
            allow_tf32=kind == "tf32", aligned=aligned, tile=tile or context.tile,
        )  # fmt: skip
        assert launch is not None
        self.launch = launch


def late_flags(context: Context) -> dict[str, Any]:
    """The kernel runs first; copies and flags follow on another stream. What was read too early is not a number."""
    if context.device.type != "cuda":
        raise Skipped("no streams on this device")
    ranks, (m, k, n) = 8, (256, 512, 512)
    a, b, dtype = _operands(context, "16bit", ranks * m, k, n)
    whole = a.view(ranks, m, k)
    order = gather_order(build(Kind.ALL_GATHER, "ring", ranks, 1), 1)
    table, flags = order_table(order, context.device), _int32(context, *[0] * ranks)
    epoch, late = _int32(context, 0), _int32(context, *[0] * ranks)
    addresses = [torch.tensor([flags[s].data_ptr()], device=context.device) for s in range(ranks)]
    compute, comm = torch.cuda.Stream(), torch.cuda.Stream()
    free = max(1, torch.cuda.get_device_properties(context.device).multi_processor_count - 8)
    exact, magnitude = matmul_into_reference(whole, b), matmul_into_reference(_abs(whole), _abs(b))
    worst, busy = 0.0, torch.ones(1 << 16, device=context.device)
    # All kernels once, so that none has to be loaded beside one that waits: at epoch 0 every flag is up.
    busy.sin_()
    set_flags(addresses[0], epoch)
    all_gather_matmul(whole[1:2], whole, b, whole.new_empty(ranks, m, n, dtype=dtype), table, flags, epoch, late)
    torch.cuda.synchronize()
    for _ in range(20):
        gathered = torch.full_like(whole, torch.nan)
        out = torch.full((ranks, m, n), torch.nan, dtype=dtype, device=context.device)
        epoch.add_(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(compute):
            all_gather_matmul(whole[1:2], gathered, b, out, table, flags, epoch, late, programs=free)
        with torch.cuda.stream(comm):
            for group in order[1:]:
                for _ in range(8):
                    busy.sin_()  # so that the kernel has to wait
                gathered[group.slice].copy_(whole[group.slice])
                set_flags(addresses[group.slice], epoch)
        torch.cuda.synchronize()
        if late.any():
            raise AssertionError(f"slices {late.nonzero().flatten().tolist()} were given up")
        worst = max(worst, error_ratio(out, exact, magnitude, k, "16bit"))
    if worst > 1:
        raise AssertionError(f"the error against float64 is {worst:.3g} times what is allowed")
    polls, began = 1 << 20, time.perf_counter()
    epoch.add_(1)  # whose flags nobody raises
    all_gather_matmul(whole[1:2], gathered, b, out, table, flags, epoch, late, programs=1, polls=polls)
    torch.cuda.synchronize()
    waited_us = (time.perf_counter() - began) * 1e6
    if late.tolist() != [int(s != 1) for s in range(ranks)]:
        raise AssertionError(f"a kernel whose flags never come marks {late.tolist()}")
    return {"steps": 20, "largest_error": round(worst, 3), "us_a_poll": round(waited_us / polls, 3)}


def resources(context: Context) -> dict[str, Any]:
    """Registers, shared memory and spills of every kernel, compiled for this device by its own Triton."""
    from fo_compiler.codegen.cross_compile import all_specs, compile_kernel

    reports = [compile_kernel(spec, context.target) for spec in all_specs(context.target)]
    spilled = {report.name: report.spills for report in reports if report.spills}
    return {
        "spills": spilled,  # figures, not a failure: an older Triton allocates registers in its own way
        "kernels": {
            report.name: [report.registers, report.shared_memory_bytes, report.tensor_core_instruction]
            for report in reports
        },
    }


def speed(context: Context) -> dict[str, Any]:
    """Each kernel at each layer: microseconds, TFLOP/s, and time as a ratio to one uncut matmul of cuBLAS."""
    rows = []
    for layer in context.layers:
        for kind in operand_kinds(context.target):
            if kind == "fp32" and layer is not context.layers[-1]:
                continue  # no tensor cores: seconds a figure, and one tells enough
            rows += list(_layer_speed(context, layer, kind))
    return {"rows": rows, "sums": _sum_speed(context)}


def _layer_speed(context: Context, layer: Layer, kind: str) -> Iterator[dict[str, Any]]:
    a, b, dtype = _operands(context, kind, layer.m, layer.k, layer.n)
    out = torch.empty(layer.m, layer.n, dtype=dtype, device=context.device)
    slices, joined = a.view(layer.ranks, -1, layer.k), out.view(layer.ranks, -1, layer.n)
    tf32 = kind == "tf32"

    def whole(tile: Tile | None) -> Launch:
        launch = matmul_into_launch(a, b, out, allow_tf32=tf32, tile=tile)
        assert launch is not None
        return launch

    def tuned(name: str, heavy: bool, make: Callable[[Tile | None], Launch]) -> Launch:
        """With the table's tile, or with the fastest one that fits."""
        if not context.autotune or context.tile is not None:
            return make(context.tile)
        launches = {tile: make(tile) for tile in _tiles(context, kind, heavy)}
        return launches[best_tile((name, layer, kind), list(launches), lambda t: launches[t].run(), context.timer)]

    def each_slice(run: Callable[[int], object]) -> Callable[[], None]:
        def body() -> None:
            for s in range(layer.ranks):
                run(s)

        return body

    pieces = [
        matmul_into_launch(slices[s], b, joined[s], allow_tf32=tf32, tile=context.tile) for s in range(layer.ranks)
    ]
    forms: dict[str, Callable[[], object]] = {
        "cublas": lambda: _library(a, b, out, tf32),
        "cublas per slice": each_slice(lambda s: _library(slices[s], b, joined[s], tf32)),
        "matmul_into": tuned("matmul_into", False, whole).run,
        "matmul_into per slice": each_slice(lambda s: pieces[s].run()),  # type: ignore[union-attr]
        "all_gather_matmul": tuned(
            "all_gather_matmul", False, lambda tile: _gather(context, slices, b, joined, kind, layer.ranks, tile)
        ).run,
    }
    scatter = _Scatter(context, slices, b, joined, kind, layer.ranks)  # keeps what its tables point at alive
    forms["matmul_reduce_scatter"] = scatter.launch.run
    reference_us = 0.0
    for form, run in forms.items():
        try:
            us = context.timer(run)
        except RuntimeError as error:  # a dtype that this cuBLAS lacks
            if not form.startswith("cublas"):
                raise
            yield {"layer": layer.name, "kind": kind, "form": form, "reason": str(error).splitlines()[0]}
            continue
        reference_us = us if form == "cublas" else reference_us
        yield {
            "layer": layer.name,
            "kind": kind,
            "form": form,
            "us": round(us, 1),
            "TFLOPS": round(layer.flop / us / 1e6, 1),
            "ratio": round(us / reference_us, 3) if reference_us else None,
        }


def _library(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, tf32: bool) -> None:
    if a.dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=a.device)
        torch.ops.aten._scaled_mm.out(a, b, one, one, out_dtype=out.dtype, out=out)
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        torch.mm(a, b, out=out)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _sum_speed(context: Context) -> list[dict[str, Any]]:
    """sum_partials of 8 against torch: GB/s of all that is read and written."""
    layer = context.layers[0]
    parts = [_random(context, layer.m // layer.ranks, layer.n, dtype=torch.bfloat16, seed=i) for i in range(8)]
    stacked, out = torch.stack(parts), torch.empty_like(parts[0])
    size_bytes = 9 * out.numel() * out.element_size()
    forms = {
        "torch.sum": lambda: torch.sum(stacked, 0, out=out),
        "sum_partials": lambda: sum_partials(parts, out),
    }
    rows = []
    for form, run in forms.items():
        us = context.timer(run)
        rows.append({"form": form, "us": round(us, 1), "GBps": round(size_bytes / us / 1e3, 1)})
    return rows
