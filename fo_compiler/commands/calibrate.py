"""`fo-compiler calibrate`: measure the machine that predictions are made for, on the real process group.

torchrun --nproc-per-node 2 --no-python fo-compiler calibrate --out machine.json
torch.compile(model, backend="flashoverlap", options={"machine": "machine.json"})
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CommandError

if TYPE_CHECKING:
    from ..calibration import Calibration

HOW = "torchrun --nproc-per-node N --no-python fo-compiler calibrate --out machine.json"
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"Run it on the ranks that will train: {HOW}"
    parser.add_argument("--out", type=Path, default=Path("machine.json"), help="file to write (default: machine.json)")
    parser.add_argument("--name", help="of the machine, for the records (default: the file's name)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--backend", help="of the process group (default: nccl on cuda, gloo on cpu)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        action="append",
        help="of the matmuls; may be repeated (default: float32 on cpu, bfloat16 on cuda)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement; the median counts")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    if args.repeats < 1:
        raise CommandError(f"--repeats: expected at least 1, got {args.repeats}.")
    if not args.out.parent.is_dir() or args.out.is_dir():  # before minutes of measuring
        raise CommandError(f"--out: expected a file in a directory that exists, got {str(args.out)!r}.")
    import torch
    import torch.distributed as dist

    from ..calibration import Calibrator

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: this torch sees no CUDA device.")
    ours = not dist.is_initialized()
    if ours:
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise CommandError(f"expected to run on every rank of a group, got a single process. Start it with: {HOW}")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(args.backend or ("nccl" if device == "cuda" else "gloo"))
    try:
        first = dist.get_rank() == 0
        dtypes = args.dtype or (["bfloat16"] if device == "cuda" else ["float32"])

        def say(text: str) -> None:
            if first and not args.json:
                print(text, flush=True)

        calibration = Calibrator(device, args.repeats).machine(
            args.name or args.out.stem, [getattr(torch, dtype) for dtype in dtypes], say=say
        )
        if first:
            calibration.machine.save(args.out)
            print(json.dumps(figures(calibration, args.out)) if args.json else report(calibration, args.out))
        dist.barrier()
    finally:
        if ours:
            dist.destroy_process_group()
    return 0


def figures(calibration: Calibration, path: Path) -> dict[str, Any]:
    """What was measured, as data. The fit's errors are shares of the measured times."""
    machine = calibration.machine
    fits = calibration.links.values()
    return {
        "machine": str(path),
        "network": type(machine.network).__name__.lower(),
        "full_duplex": getattr(machine.network, "full_duplex", True),
        "latency_us": sorted(round(fit.latency_us, 2) for fit in fits),
        "bandwidth_GBps": sorted(round(fit.bandwidth_GBps, 4) for fit in fits),
        "fit_error": round(calibration.median_error, 4),
        "worst_fit_error": round(calibration.worst_error, 4),
        "post_us": round(machine.post_us, 2),
        "compute_slowdown": round(machine.compute_slowdown, 3),
        "transfer_slowdown": round(machine.transfer_slowdown, 3),
        "margin": round(machine.margin, 4),
        "collectives": {
            name: {
                "latency_us": round(fit.latency_us, 2),
                "bandwidth_GBps": round(fit.bandwidth_GBps, 4),
                "fit_error": round(fit.median_error, 4),
            }
            for name, fit in calibration.collectives.items()
        },
        "regions": {
            name: {"predicted_gain": round(trial.predicted, 4), "measured_gain": round(trial.measured, 4)}
            for name, trial in calibration.trials.items()
        },
        "memory_GBps": round(machine.matmul.memory_GBps, 2),
        "matmuls": [
            {"m": p.m, "k": p.k, "n": p.n, "dtype": p.dtype, "us": round(p.time_us, 2)} for p in calibration.points
        ],
    }


def report(calibration: Calibration, path: Path) -> str:
    """The same as text, for people."""
    machine = calibration.machine
    lines = [machine.source, ""]
    if calibration.links:
        lines.append(f"{'link':>10}{'latency':>14}{'bandwidth':>14}{'error of the fit: median, worst':>34}")
        for (source, destination), fit in sorted(calibration.links.items()):
            lines.append(
                f"{source:>5} -> {destination}{fit.latency_us:>11.1f} us{fit.bandwidth_GBps:>9.3f} GB/s"
                f"{fit.median_error:>25.1%}, {fit.worst_error:.1%}"
            )
    if calibration.collectives:
        lines += ["", f"{'collective':>16}{'latency':>14}{'slices of':>14}{'error of the fit: median, worst':>34}"]
        for name, fit in calibration.collectives.items():
            lines.append(
                f"{name:>16}{fit.latency_us:>11.1f} us{fit.bandwidth_GBps:>9.3f} GB/s"
                f"{fit.median_error:>25.1%}, {fit.worst_error:.1%}"
            )
    if calibration.trials:
        lines += ["", f"{'whole region':>16}{'gain of a rewrite: predicted, measured':>44}"]
        for name, trial in calibration.trials.items():
            lines.append(f"{name:>16}{trial.predicted:>33.0%}, {trial.measured:.0%}")
    lines += [f"  {note}" for note in calibration.notes]
    lines.append("")
    lines.append(f"{'matmul':>24}{'dtype':>8}{'time':>14}{'speed':>16}")
    for point in calibration.points:
        shape = f"{point.m} x {point.k} x {point.n}"
        lines.append(
            f"{shape:>24}{point.dtype:>8}{point.time_us:>11.1f} us{point.flop / point.time_us / 1e3:>9.1f} GFLOPS"
        )
    lines += [
        "",
        f"posting a step and waiting for one that is done: {machine.post_us:.1f} us",
        f"compute under a transfer is {machine.compute_slowdown:.2f} times as slow, "
        f"a transfer under compute {machine.transfer_slowdown:.2f} times",
        f"a prediction has to gain {machine.margin:.0%}, by how much times differ from run to run"
        + (", and as much as it was off by on a whole region" if calibration.trials else ""),
        f"adding: {machine.matmul.memory_GBps:.1f} GB/s",
        "",
        f'wrote {path}: use it with options={{"machine": "{path}"}} or FO_MACHINE={path}',
    ]
    return "\n".join(lines)
