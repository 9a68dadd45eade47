"""`make gpu-check`: what can only be checked and measured on a GPU, in one command of a few minutes.

    python -m benchmarks.gpu_check [--only NAME] [--autotune] [--out FILE]

Each check is a function named in `CHECKS`; it gives figures, or raises `Skipped` with what the machine lacks. Without a GPU
all are skipped, by name, and the exit status is 0; it is 1 where a check failed.
Results: benchmarks/results/gpu_check_<GPU>.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_context import Context, Skipped, context_of

RESULTS = Path(__file__).resolve().parent / "results"

# Name -> module:function(Context) -> figures, in the order in which they run. Modules are imported when their check runs: some
# need Triton. A check leaves nothing behind on the GPU.
CHECKS: dict[str, str] = {
    "kernel_resources": "benchmarks.gpu_kernels:resources",
    "kernel_values": "benchmarks.gpu_kernels:values",
    "kernel_late_flags": "benchmarks.gpu_kernels:late_flags",
    "kernel_speed": "benchmarks.gpu_kernels:speed",
    "copy_engine": "benchmarks.gpu_transports:copy_engine",
    "timeline": "benchmarks.gpu_transports:timeline",
    "several_gpus": "benchmarks.gpu_transports:several_gpus",
}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "gpus": []}
    if find_spec("triton"):
        import triton  # type: ignore[import-untyped]

        found["triton"] = triton.__version__
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found["gpus"].append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_GB": round(properties.total_memory / 1e9, 1),
            }
        )
    return found


def run_checks(names: list[str], make_context: Callable[[], Context]) -> dict[str, dict[str, Any]]:
    """Run checks by name. Each result has a `status`: "passed" (with figures), "skipped" or "failed" (with why)."""
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        began = time.perf_counter()
        try:
            context = make_context()
            module, _, function = CHECKS[name].partition(":")
            results[name] = {"status": "passed", **getattr(importlib.import_module(module), function)(context)}
        except Skipped as reason:
            results[name] = {"status": "skipped", "reason": str(reason)}
        except Exception as error:  # the other checks still run
            traceback.print_exc()
            results[name] = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        results[name]["seconds"] = round(time.perf_counter() - began, 1)
        print(f"{name:24} {results[name]['status']:8} {results[name].get('reason', '')}".rstrip(), flush=True)
    return results


def print_speed(result: dict[str, Any]) -> None:
    """The figures of `kernel_speed` as a table."""
    for row in result.get("rows", ()):
        figures = (
            f"{row['us']:10.1f} us {row['TFLOPS']:8.1f} TFLOP/s  x{row['ratio']}" if "us" in row else row["reason"]
        )
        print(f"  {row['layer']:18} {row['kind']:6} {row['form']:24} {figures}")
    for row in result.get("sums", ()):
        print(f"  {'sum of 8':18} {'16bit':6} {row['form']:24} {row['us']:10.1f} us {row['GBps']:8.1f} GB/s")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(CHECKS), help="only this check (repeatable)")
    parser.add_argument("--autotune", action="store_true", help="measure every tile, not only the table's choice")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args(argv)
    results = run_checks(
        [name for name in CHECKS if args.only is None or name in args.only], lambda: context_of(args.autotune)
    )
    print_speed(results.get("kernel_speed", {}))
    report = {"machine": machine(), "checks": results}
    out = args.out
    if out is None and torch.cuda.is_available():
        out = RESULTS / f"gpu_check_{re.sub(r'[^A-Za-z0-9]+', '-', torch.cuda.get_device_name())}.json"
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"wrote {out}")
    return 1 if any(result["status"] == "failed" for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
