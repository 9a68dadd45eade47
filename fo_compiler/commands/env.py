"""`fo-compiler env`: versions, devices and effective options, for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    report = collect()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for part, values in report.items():
        print(part)
        for name, value in values.items():
            print(f"  {name:22}{_words(value)}")
    return 0


def collect() -> dict[str, dict[str, Any]]:
    """Everything, by part. Raises OptionError or MachineError for an environment variable with a wrong value."""
    import torch

    from .. import __version__
    from ..options import Options
    from ..schedule.presets import DEFAULT_PRESET, PRESETS, find_machine

    options = Options.create().to_dict()
    if options["machine"] is not None:
        find_machine(options["machine"])
    return {
        "versions": {
            "fo-compiler": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "triton": _version("triton"),
            "os": platform.platform(),
        },
        "distributed": _backends(),
        "devices": _devices(),
        "machines": {"presets": ", ".join(PRESETS), **{f"default for {d}": name for d, name in DEFAULT_PRESET.items()}},
        "options": {name: {"value": value, **_origin(name)} for name, value in options.items()},
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _backends() -> dict[str, bool]:
    import torch.distributed as dist

    if not dist.is_available():
        return {"available": False}
    return {
        name: getattr(dist, f"is_{name}_available", lambda: False)() for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
    }


def _devices() -> dict[str, str]:
    import torch

    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"}
    for index in range(torch.cuda.device_count()):
        devices[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    return devices


def _origin(name: str) -> dict[str, str]:
    variable = f"FO_{name.upper()}"
    return {"set_by": variable} if os.environ.get(variable) else {}


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['value']!r}" + (f"   (set by {value['set_by']})" if "set_by" in value else "")
    return {None: "not installed", True: "yes", False: "no"}.get(value, str(value))
