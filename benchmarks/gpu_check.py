"""`make gpu-check`: what can only be checked and measured on a GPU, in one command of a few minutes.

    python -m benchmarks.gpu_check [--only NAME] [--autotune] [--out FILE] [--seconds N]

Each check is a function named in `CHECKS`; it gives figures, or raises `Skipped` with what the machine lacks. It runs in a
process of its own, for as long as its limit says: a kernel that hangs or a device error ends that check, is reported, and
touches no other. All of them together take 8 minutes at most; what there is no time for is skipped. Without a GPU all are
skipped, by name, and the exit status is 0; it is 1 where a check failed.

Results: benchmarks/results/gpu_check_<GPU>.json, written after each check; without a GPU JSON on standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_context import Context, Failed, Skipped, context_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = 480  # all checks together
Result = dict[str, Any]


@dataclass(frozen=True)
class Check:
    """`place` is module:function(Context) -> figures; modules are imported when their check runs: some need Triton."""

    place: str
    seconds: float


# In the order in which they run: what says most about the rest comes first.
CHECKS: dict[str, Check] = {
    "kernel_values": Check("benchmarks.gpu_kernels:values", 120),
    "kernel_late_flags": Check("benchmarks.gpu_kernels:late_flags", 60),
    "copy_engine": Check("benchmarks.gpu_transports:copy_engine", 150),
    "timeline": Check("benchmarks.gpu_transports:timeline", 90),
    "kernel_speed": Check("benchmarks.gpu_kernels:speed", 120),
    "several_gpus": Check("benchmarks.gpu_transports:several_gpus", 150),
    "kernel_resources": Check("benchmarks.gpu_kernels:resources", 120),
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


def run_here(name: str, make_context: Callable[[], Context]) -> Result:
    """Run a check. The result has a `status`: "passed" (with figures), "skipped" or "failed" (with why)."""
    try:
        context = make_context()
        module, _, function = CHECKS[name].place.partition(":")
        return {"status": "passed", **getattr(importlib.import_module(module), function)(context)}
    except Skipped as reason:
        return {"status": "skipped", "reason": str(reason)}
    except Failed as failure:
        return {"status": "failed", "reason": str(failure), **failure.figures}
    except Exception as error:
        traceback.print_exc()
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def run_apart(name: str, seconds: float, autotune: bool = False) -> Result:
    """The same in a process of its own, which is ended, with all that it started, after `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--apart", "--only", name, "--out", str(file)]
        process = subprocess.Popen([*command, *(["--autotune"] if autotune else [])], cwd=ROOT, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {"status": "failed", "reason": f"not done after {seconds:.0f} s, and ended"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process whose kernel hangs may take its time
                process.wait(10)
        if not file.exists():
            return {"status": "failed", "reason": f"its process ended with status {status}, and left no result"}
        result: Result = json.loads(file.read_text())
        return result


def run_checks(
    names: list[str], run: Callable[[str, float], Result], report: Callable[[dict[str, Result]], None], seconds: float
) -> dict[str, Result]:
    """Run checks by name within `seconds`; `run` gets a name and how long it may take, `report` what there is so far."""
    results: dict[str, Result] = {}
    end = time.monotonic() + seconds
    for name in names:
        began = time.monotonic()
        limit = min(CHECKS[name].seconds, end - began)
        if limit < 1:
            result = {"status": "skipped", "reason": f"no time left of {seconds:.0f} s: run it with --only {name}"}
        else:
            result = run(name, limit)
        results[name] = {**result, "seconds": round(time.monotonic() - began, 1)}
        print(f"{name:24} {result['status']:8} {result.get('reason', '')}".rstrip(), flush=True)
        report(results)
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
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all checks together (default: %(default)s)")
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)  # this is the process of one check
    args = parser.parse_args(argv)
    names = [name for name in CHECKS if args.only is None or name in args.only]
    if args.apart:
        result = run_here(names[0], lambda: context_of(args.autotune))
        args.out.write_text(json.dumps({**result, "machine": machine()}))
        return 0
    found: dict[str, Any] = {}

    def run(name: str, seconds: float) -> Result:
        if not torch.cuda.is_available():
            return run_here(name, lambda: context_of(args.autotune))
        result = run_apart(name, seconds, args.autotune)
        found.update(result.pop("machine", {}))
        return result

    def report(results: dict[str, Result]) -> None:
        out = args.out
        if out is None and found.get("gpus"):
            out = RESULTS / f"gpu_check_{re.sub(r'[^A-Za-z0-9]+', '-', found['gpus'][0]['name'])}.json"
        text = json.dumps({"machine": found or machine(), "checks": results}, indent=1)
        if out is not None:
            out.write_text(text + "\n")
        if len(results) == len(names):
            print_speed(results.get("kernel_speed", {}))
            print(text if out is None else f"wrote {out}")

    results = run_checks(names, run, report, args.seconds)
    return 1 if any(result["status"] == "failed" for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
