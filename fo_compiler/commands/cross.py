"""`fo-compiler cross`: what a model compiles to on a GPU that is not there, with a table of its kernels.

Options of the backend are read from their environment variables, as in FO_REWRITE=always.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import CommandError

if TYPE_CHECKING:
    from ..codegen.absent_gpu import Program
    from ..codegen.cross_compile import KernelReport

Kernels: TypeAlias = "list[tuple[str, str | None, KernelReport]]"  # graph, source in the program, what became of it

TARGETS = ("sm_80", "sm_90", "sm_100")
MACHINES = {"sm_80": "a100-nvlink", "sm_90": "h100-nvlink", "sm_100": "h100-nvlink"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="mlp, or module:function or file.py:function (docs/gpu.md)")
    parser.add_argument("--target", required=True, choices=TARGETS, help="the GPU's compute capability")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="ranks in the group (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=0, help="whose program (default: %(default)s)")
    parser.add_argument("--forward", action="store_true", help="no backward: the program for inference")
    parser.add_argument("--only-graph", action="store_true", help="leave out those kernels of ours that no graph calls")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the programs, sources, PTX and cubins there")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    import torch.distributed as dist

    try:
        import triton  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        raise CommandError(
            "Triton is not installed: `pip install triton` (the CPU build of torch has none)."
        ) from error
    from ..codegen.absent_gpu import generate, kernel_reports
    from ..codegen.cross_compile import all_specs, compile_kernel
    from ..codegen.example_models import find_example
    from ..options import Options
    from ..torch_adapter import init_fake_process_group

    example = find_example(args.model)
    options = Options.create()
    if options.machine is None:
        options = replace(options, machine=MACHINES[args.target])
    if args.ranks < 1:
        raise CommandError(f"--ranks: expected at least 1, got {args.ranks}.")
    if not 0 <= args.rank < args.ranks:
        raise CommandError(f"--rank: expected 0 to {args.ranks - 1}, got {args.rank}.")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    init_fake_process_group(args.rank, args.ranks)
    try:
        model, inputs = _model_and_inputs(example(args.ranks), args.model)
        programs, report = generate(model, inputs, args.target, options, backward=not args.forward)
    finally:
        dist.destroy_process_group()
    kernels: Kernels = [
        (p.graph, source, kernel) for p in programs for source, kernel in kernel_reports(p, args.target)
    ]
    if not args.only_graph:
        kernels += [("ours", None, compile_kernel(spec, args.target)) for spec in all_specs(args.target)]
    if args.out is not None:
        _write(args.out, programs, str(report), kernels)
    rows = [_row(graph, kernel) for graph, _, kernel in kernels]
    if args.json:
        print(
            json.dumps({"target": args.target, "collectives": json.loads(report.to_json()), "kernels": rows}, indent=2)
        )
    else:
        print(report)
        print(_table(rows))
        if args.out is not None:
            print(f"written to {args.out}")
    return 0


def _model_and_inputs(found: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise CommandError(f"model: expected {name} to return (model, [inputs]), got {type(found).__name__}.")
    return found


def _row(graph: str, kernel: KernelReport) -> dict[str, Any]:
    return {
        "graph": graph,
        "kernel": kernel.name,
        "registers": kernel.registers,
        "shared_memory_bytes": kernel.shared_memory_bytes,
        "spills": kernel.spills,
        "tensor_core_instruction": kernel.tensor_core_instruction,
    }


def _table(rows: list[dict[str, Any]], widest: int = 70) -> str:
    header = ("graph", "kernel", "registers", "shared memory", "spills", "tensor cores")
    cells = [header, *([str(value if value is not None else "-") for value in row.values()] for row in rows)]
    shown = [[cell if len(cell) <= widest else cell[: widest - 3] + "..." for cell in line] for line in cells]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in shown
    )


def _write(
    out: Path, programs: list[Program], records: str, kernels: list[tuple[str, str | None, KernelReport]]
) -> None:
    """The programs, their launches, the records, and each kernel as source, PTX and cubin."""
    from ..codegen.program import launch_table, plan_of_program

    (out / "records.txt").write_text(records)
    for program in programs:
        (out / f"{program.graph}.py").write_text(program.source)
        (out / f"{program.graph}.launches.txt").write_text(launch_table(plan_of_program(program.source)))
    for graph, source, kernel in kernels:
        folder = out / "kernels" / graph
        folder.mkdir(parents=True, exist_ok=True)
        name = kernel.name.replace("/", ".").replace(" ", "_")
        if source is not None:
            (folder / f"{name}.py").write_text(source)
        (folder / f"{name}.ptx").write_text(kernel.ptx)
        (folder / f"{name}.cubin").write_bytes(kernel.cubin)
