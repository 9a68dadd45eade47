"""Checks of `make gpu-check` that move tensors between ranks: copy engine, streams and, with several GPUs, NCCL and AsyncTP.

NCCL refuses two ranks on a device, symmetric memory does not: so on one GPU the ranks are processes that share it, and map each
other's memory through CUDA IPC. What is checked is all that a second GPU would do but the wire.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.gpu_context import Context, Skipped
from fo_compiler.torch_adapter import async_tp_ops

RANKS = 4
SHAPES = {"values": (512, 256, 264), "speed": (8192, 8192, 7168)}  # m of all ranks together, k, n of one rank
SECONDS = 120
STEPS = 5


def copy_engine(context: Context) -> dict[str, Any]:
    """An all-gather matmul and a matmul reduce-scatter by copy engine, ranks sharing one GPU, against float64; then replayed."""
    _need(1)
    return _run("values_of_copy_engine", RANKS, one_gpu=True)


def timeline(context: Context) -> dict[str, Any]:
    """How much of the transfers' time lies under matmuls, by the profiler, on one GPU: of rank 0."""
    _need(1)
    return _run("overlap_on_timeline", RANKS, one_gpu=True)


def several_gpus(context: Context) -> dict[str, Any]:
    """Plain, c10d, copy engine and AsyncTP on all GPUs, in microseconds a step."""
    count = _need(2)
    return _run("compare_on_gpus", min(count, 8), one_gpu=False)


def _need(gpus: int) -> int:
    count = torch.cuda.device_count()
    if count < gpus:
        raise Skipped(f"needs {gpus} GPU{'s' if gpus > 1 else ''}, found {count}")
    return count


def _run(check: str, ranks: int, one_gpu: bool) -> dict[str, Any]:
    """Run a function of this module in one process a rank; the figures of rank 0. Raises what a rank raised."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        workers = mp.spawn(  # type: ignore[attr-defined, no-untyped-call, unused-ignore]
            _rank, (check, ranks, one_gpu, port, folder), nprocs=ranks, join=False
        )
        if not _joined(workers):
            raise TimeoutError(f"{check}: {ranks} ranks were not done after {SECONDS} s")
        figures: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
        return figures


def _joined(workers: Any) -> bool:
    """Wait for all processes for SECONDS; what is left then is ended."""
    import time

    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            if workers.join(timeout=1.0):
                return True
        return False
    finally:
        for process in workers.processes:
            if process.is_alive():
                process.kill()


def _rank(rank: int, check: str, ranks: int, one_gpu: bool, port: int, folder: str) -> None:
    os.environ.update(
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        LOCAL_WORLD_SIZE=str(ranks),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
    )
    if one_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0 if one_gpu else rank)
    dist.init_process_group("gloo" if one_gpu else "nccl", rank=rank, world_size=ranks)
    try:
        figures = globals()[check](rank, ranks)
        dist.barrier()
        if rank == 0:
            (Path(folder) / "figures.json").write_text(json.dumps(figures))
    finally:
        dist.destroy_process_group()


# --- the two regions, each as a function of this rank's tensors --------------------------------------------------------

c10d = torch.ops._c10d_functional


def _gather(x: Tensor, w: Tensor) -> Tensor:
    """x [M / ranks, K], w [K, N] -> [M, N]."""
    group = dist.group.WORLD
    assert group is not None
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, group.size(), group.group_name)) @ w  # type: ignore[no-any-return]


def _scatter(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K], w [K, N] -> [M / ranks, N]: this rank's rows of the sum over ranks."""
    group = dist.group.WORLD
    assert group is not None
    summed = c10d.reduce_scatter_tensor(x @ w, "sum", group.size(), group.group_name)
    return c10d.wait_tensor(summed)  # type: ignore[no-any-return]


def _inputs(rank: int, ranks: int, which: str, gathered: bool) -> tuple[Tensor, Tensor]:
    m, k, n = SHAPES[which]
    generator = torch.Generator("cuda").manual_seed(rank)
    rows = m // ranks if gathered else m
    return tuple(
        torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16) for size in ((rows, k), (k, n))
    )  # type: ignore[return-value]


def _compiled(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    torch.compiler.reset()
    return torch.compile(function, backend="flashoverlap", options={"rewrite": "always", **options})


def _expected(rank: int, ranks: int, gathered: bool) -> Tensor:
    """In float64, from the seeds of all ranks."""
    all_inputs = [[t.double() for t in _inputs(r, ranks, "values", gathered)] for r in range(ranks)]
    if gathered:
        return torch.cat([x for x, _ in all_inputs]) @ all_inputs[rank][1]
    return torch.stack([x @ w for x, w in all_inputs]).sum(0).chunk(ranks)[rank]


def values_of_copy_engine(rank: int, ranks: int) -> dict[str, Any]:
    errors: dict[str, float] = {}
    wrong: list[str] = []
    for gathered, function in ((True, _gather), (False, _scatter)):
        inputs, expected = _inputs(rank, ranks, "values", gathered), _expected(rank, ranks, gathered)
        ways: dict[str, dict[str, Any]] = {
            "1 compute stream": {},
            "2 compute streams": {"compute_streams": 2},
            "one kernel": {"slice_matmul": "whole"},
        }
        for way, options in ways.items():
            compiled = _compiled(function, transport="copy_engine", **options)
            for _ in range(STEPS):  # slots are reused
                result = compiled(*inputs)
            error = ((result.double() - expected).abs().max() / expected.abs().max()).item()
            name = f"{function.__name__[1:]}, {way}"
            errors[name] = error
            if not error <= 2.0**-7:  # NaN is wrong
                wrong.append(f"{name}: relative error {error:.3g} on rank {rank}, expected below 2**-7 in bf16")
    if wrong:  # told last, so that the other ranks are not left alone in the middle
        raise AssertionError("; ".join(wrong))
    return {"relative_error": errors, "ranks": ranks}


def overlap_on_timeline(rank: int, ranks: int) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    inputs = _inputs(rank, ranks, "speed", True)
    compiled = _compiled(_gather, transport="copy_engine")
    for _ in range(3):
        compiled(*inputs)
    torch.cuda.synchronize()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        compiled(*inputs)
        torch.cuda.synchronize()
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in profiler.events() or ()]
    copies = [(start, end) for name, start, end in spans if "memcpy" in name.lower()]
    matmuls = [(start, end) for name, start, end in spans if any(word in name for word in ("gemm", "nvjet", "matmul"))]
    copied = sum(end - start for start, end in copies)
    return {
        "copies": len(copies),
        "matmuls": len(matmuls),
        "copy_us": copied,
        "copy_under_matmul_fraction": covered(copies, matmuls) / copied if copied else None,
    }


def covered(spans: Iterable[tuple[float, float]], by: Sequence[tuple[float, float]]) -> float:
    """How much of the time of `spans` lies inside the union of `by`."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(by):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return sum(max(0.0, min(end, last) - max(start, first)) for start, end in spans for first, last in merged)


def compare_on_gpus(rank: int, ranks: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"ranks": ranks}
    for gathered, function in ((True, _gather), (False, _scatter)):
        inputs = _inputs(rank, ranks, "speed", gathered)
        ways: dict[str, Callable[..., object]] = {
            "inductor": torch.compile(function),
            "c10d": _compiled(function, transport="c10d"),
            "copy_engine": _compiled(function, transport="copy_engine"),
            "copy_engine, 2 compute streams": _compiled(function, transport="copy_engine", compute_streams=2),
            "copy_engine, one kernel": _compiled(function, transport="copy_engine", slice_matmul="whole"),
            "AsyncTP": _async_tp(gathered),
        }
        figures[function.__name__[1:]] = {name: _time_us(way, inputs) for name, way in ways.items()}
    return figures


def _async_tp(gathered: bool) -> Callable[..., object]:
    """PyTorch's own overlap of the same region, called as its compiler pass would."""
    group, ops = dist.group.WORLD, async_tp_ops()
    assert group is not None
    name = group.group_name
    if gathered:
        return lambda x, w: ops.fused_all_gather_matmul(x, [w], gather_dim=0, group_name=name)
    return lambda x, w: ops.fused_matmul_reduce_scatter(x, w, "sum", scatter_dim=0, group_name=name)


def _time_us(way: Callable[..., object], inputs: Sequence[Tensor], repeats: int = 20) -> float:
    """Median microseconds of a call, the ranks starting together."""
    for _ in range(5):
        way(*inputs)
    times: list[float] = []
    for _ in range(repeats):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        way(*inputs)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
