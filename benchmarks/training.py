"""A training step of the demo's transformer, at a larger size, on limited links: step time and exposed communication.

python benchmarks/training.py --ranks 2 --ranks 4 --rate 500mbit

Real matmuls. The links and the matmuls are calibrated in the run (`fo-compiler calibrate` does the same), and the backend decides
by itself. Three ways of compiling the same model train from the same seed, one step of each in turn:

inductor      plain
scheduled     Inductor with its own settings for overlap (it moves whole collectives), with times of the same machine file
flashoverlap  ours

step_ms       median step, slowest rank
exposed_ms    how long a rank waits for communication, or posts it, in a step: by torch.profiler, from the ops that do so
hidden        1 - exposed / exposed under plain Inductor: it runs under compute, or takes less time than the collective
bound_ms      the larger of plain Inductor's step without its exposed time, and of links_ms: what the busiest rank's link takes
              for the fewest bytes that any of the three ways sent in a step (limited links only)
peak_mb       most memory that a step adds
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.fx import Node, map_arg
from torch.utils.flop_counter import flop_registry

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.network import INTERFACE
from benchmarks.results import save, why
from benchmarks.world import World, shaping_here
from fo_compiler.schedule import Kind
from fo_compiler.schedule.machine import Machine
from fo_compiler.schedule.matmul import Measured
from fo_compiler.torch_adapter import memory_bandwidth

PHASES = ("forward", "backward")
SCHEDULED = {
    "reorder_for_compute_comm_overlap": True,
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
}
ESTIMATION = "aten_distributed_optimizations.custom_runtime_estimation"
COLLECTIVES = {
    "all_gather_into_tensor": Kind.ALL_GATHER,
    "reduce_scatter_tensor": Kind.REDUCE_SCATTER,
    "all_reduce": Kind.ALL_REDUCE,
    "all_to_all_single": Kind.ALL_TO_ALL,
}
# Ops and ranges in which a rank stands still for communication, or starts it. gloo's own run in threads of its own.
COMMUNICATION = ("_c10d_functional::", "fo_compiler post ", "fo_compiler wait ")
Step = Callable[[int], float]


def calibrate(path: str) -> None:
    from fo_compiler.calibration import Calibrator

    calibration = Calibrator(repeats=3).machine("calibrated in this run")
    if dist.get_rank() == 0:
        calibration.machine.save(path)


load = cache(Machine.load)  # Inductor's scheduler asks for the time of every node


def estimated_ms(machine_file: str, node: Node, override_size: int | None = None) -> float:
    """What a node takes by the machine of this run, for Inductor's scheduler: by itself it asks a GPU, and finds none here."""
    machine = load(machine_file)
    assert isinstance(machine.matmul, Measured)

    tensors: list[torch.Tensor] = []

    def value(argument: Node) -> Any:
        found = argument.meta.get("val")
        if isinstance(found, torch.Tensor):
            tensors.append(found)
        return found

    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    out = value(node)
    kind = COLLECTIVES.get(getattr(node.target, "_opname", ""))
    if kind is not None:
        ranks = dist.get_world_size()
        sent = tensors[0].nbytes if override_size is None else override_size
        slice_bytes = sent if kind is Kind.ALL_GATHER else sent / ranks
        return (machine.collective_us(kind, ranks, slice_bytes) or 0.0) / 1e3
    flop_of = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if flop_of is not None:
        flop_per_us = max(point.flop / point.time_us for point in machine.matmul.points)
        return float(flop_of(*args, **kwargs, out_val=out)) / flop_per_us / 1e3
    return sum(tensor.nbytes for tensor in tensors) / machine.matmul.memory_GBps / 1e6


def train(machine: str, sizes: dict[str, int], steps: int) -> dict[str, Any]:
    """Train in all ways on this rank; per way its step times, exposed times and losses."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import llama
    import train_tensor_parallel as demo

    from fo_compiler.records import record

    config = replace(llama.LlamaConfig(), dim=sizes["dim"], hidden_dim=sizes["hidden"], n_layers=sizes["layers"])
    batches = demo.text_batches(steps + 4, sizes["batch"], sizes["seq_len"])
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "inductor": ("inductor", {}),
        "scheduled": ("inductor", {**SCHEDULED, ESTIMATION: partial(estimated_ms, machine)}),
        "flashoverlap": ("flashoverlap", {"machine": machine}),
    }
    memory_GBps = load(machine).matmul.memory_GBps
    found: dict[str, Any] = {name: {"losses": [], "step_ms": [], "sent_bytes": []} for name in ways}
    running: dict[str, Step] = {}
    with record() as report:
        for name, (backend, options) in ways.items():
            step = _trainer(backend, options, config, batches)
            start = time.perf_counter()
            try:
                with memory_bandwidth(memory_GBps):
                    found[name]["losses"].append(step(0))
            except Exception as error:  # of the competitor's settings, on this device
                if name == "flashoverlap":
                    raise
                found[name]["failed"] = f"{type(error).__name__}: {why(error)}"
                continue
            found[name]["first_step_s"] = time.perf_counter() - start
            if dist.get_rank() == 0:
                print(
                    f"{name}: compiled and first step in {found[name]['first_step_s']:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            running[name] = step
    for index in range(1, steps + 1):
        for name, step in running.items():
            dist.barrier()
            sent, start = sent_bytes(), time.perf_counter()
            found[name]["losses"].append(step(index))
            found[name]["step_ms"].append((time.perf_counter() - start) * 1e3)
            found[name]["sent_bytes"].append(sent_bytes() - sent)
    profiled: dict[str, list[dict[str, float]]] = {name: [] for name in running}
    for index in range(steps + 1, steps + 4):  # in turns, too
        for name, step in running.items():
            profiled[name].append(profiled_ms(step, index))
    for name, step in running.items():
        found[name]["exposed_ms"] = {phase: statistics.median(ms[phase] for ms in profiled[name]) for phase in PHASES}
        found[name]["exposed_share"] = statistics.median(
            sum(ms[phase] for phase in PHASES) / ms["step"] for ms in profiled[name]
        )
        found[name]["peak_mb"] = peak_mb(step, steps + 1)
    torch.compiler.reset()
    return {"ways": found, "records": [(r.graph, r.rewritten, r.collective) for r in report.records]}


def _trainer(backend: str, options: dict[str, Any], config: Any, batches: list[Any]) -> Step:
    import llama
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model = llama.apply_tensor_parallel(llama.Llama(config), init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    # A code object of its own: each way keeps its graphs, and none is compiled again because of another one.
    compiled = torch.compile(model, backend=backend, options=options or None)

    def step(index: int) -> float:
        tokens, targets = batches[index]
        with torch.profiler.record_function("phase forward"):
            loss = F.cross_entropy(compiled(tokens).flatten(0, 1), targets.flatten())
        with torch.profiler.record_function("phase backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def profiled_ms(step: Step, index: int) -> dict[str, float]:
    """One profiled step of this rank: how long it took (`step`), and per phase the time in ops of communication."""
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        step(index)
        step_ms = (time.perf_counter() - start) * 1e3
    events = [(event.name, event.time_range.start, event.time_range.end) for event in profiler.events()]
    return {"step": step_ms} | {phase: us / 1e3 for phase, us in exposed_us(events).items()}


def sent_bytes() -> int:
    """Bytes that this rank has sent through its limited link, headers included; 0 where it has none."""
    counts = Path("/proc/self/net/dev")  # Linux only, as limited links are
    for line in counts.read_text().splitlines() if counts.exists() else ():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return 0


def peak_mb(step: Step, index: int) -> float:
    """The most memory that a step of this rank adds to what was there before it, in MB (1e6 bytes)."""
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(index)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return float(max(accumulate((size for _, size in changes), initial=0))) / 1e6


def exposed_us(events: list[tuple[str, float, float]]) -> dict[str, float]:
    """Time in ops of communication by phase, from (name, start, end); an op inside another one counts once."""
    total = dict.fromkeys(PHASES, 0.0)
    for phase in PHASES:
        spans = [(start, end) for name, start, end in events if name == f"phase {phase}"]
        inside = sorted(
            (start, end) for name, start, end in events
            if name.startswith(COMMUNICATION) and any(first <= start < last for first, last in spans)
        )  # fmt: skip
        until = float("-inf")
        for start, end in inside:
            total[phase] += max(0.0, end - max(start, until))
            until = max(until, end)
    return total


def conclude(of_ranks: list[dict[str, Any]], bits_per_second: Callable[[int], float] | None = None) -> dict[str, Any]:
    """Medians of the slowest rank, and what is hidden against plain Inductor; the links are those of the ranks."""
    ways: dict[str, Any] = {}
    for name, mine in of_ranks[0]["ways"].items():
        all_of_it = [rank["ways"][name] for rank in of_ranks]
        if any("failed" in of_rank for of_rank in all_of_it):
            ways[name] = {"failed": next(of_rank["failed"] for of_rank in all_of_it if "failed" in of_rank)}
            continue
        turns = [max(turn) for turn in zip(*(of_rank["step_ms"] for of_rank in all_of_it), strict=True)]
        exposed = {phase: max(of_rank["exposed_ms"][phase] for of_rank in all_of_it) for phase in PHASES}
        ways[name] = {
            "step_ms": round(statistics.median(turns), 2),
            "first_step_s": round(max(of_rank["first_step_s"] for of_rank in all_of_it), 1),
            "exposed_ms": {phase: round(ms, 2) for phase, ms in exposed.items()},
            "peak_mb": round(max(of_rank["peak_mb"] for of_rank in all_of_it), 2),
            "loss": mine["losses"][-1],
        }
    plain = ways["inductor"]
    for way in ways.values():
        if "failed" not in way:
            way["hidden"] = {
                phase: round(1 - way["exposed_ms"][phase] / max(plain["exposed_ms"][phase], 1e-9), 4)
                for phase in PHASES
            }
            way["loss_difference"] = abs(way["loss"] / plain["loss"] - 1)
    records = of_ranks[0]["records"]
    counts = {
        phase: {
            "rewritten": sum(done for graph, done, _ in records if graph == phase),
            "collectives": sum(graph == phase for graph, _, _ in records),
        }
        for phase in PHASES
    }
    sent = [
        min(statistics.median(way["sent_bytes"]) for way in rank["ways"].values() if "failed" not in way)
        for rank in of_ranks
    ]
    links_ms = max(8e3 * size / bits_per_second(rank) for rank, size in enumerate(sent)) if bits_per_second else 0.0
    # By the share of a profiled step, which takes longer than others do; of the rank that computes longest.
    exposed_share = min(rank["ways"]["inductor"]["exposed_share"] for rank in of_ranks)
    compute_ms = plain["step_ms"] * (1 - exposed_share)
    return {
        "ways": ways,
        "compute_ms": round(compute_ms, 2),
        "links_ms": round(links_ms, 2),
        "bound_ms": round(max(compute_ms, links_ms), 2),
        "collectives": counts,
    }


def table(rows: list[dict[str, Any]]) -> str:
    head = [
        "ranks",
        "",
        "step, ms",
        "bound (compute, links), ms",
        "exposed forward, ms",
        "exposed backward, ms",
        "hidden forward",
        "hidden backward",
    ]
    head += ["peak, MB", "rewritten"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['ranks']} | {row['failed']} {'| ' * (len(head) - 2)}|")
            continue
        for name, way in row["ways"].items():
            if "failed" in way:
                lines.append(f"| {row['ranks']} | {name} | {way['failed']} {'| ' * (len(head) - 3)}|")
                continue
            counts = row["collectives"].values()
            done = (
                ", ".join(f"{c['rewritten']} of {c['collectives']}" for c in counts) if name == "flashoverlap" else ""
            )
            exposed, hidden = way["exposed_ms"], way["hidden"]
            peak = f"{way['peak_mb']:.1f}"
            bound = f"{row['bound_ms']:.0f} ({row['compute_ms']:.0f}, {row['links_ms']:.0f})"
            cells = [str(row["ranks"]), name, f"{way['step_ms']:.0f}", bound]
            cells += [f"{exposed[phase]:.0f}" for phase in PHASES]
            cells += [f"{hidden[phase]:.2f}" for phase in PHASES] if name != "inductor" else ["", ""]
            lines.append(f"| {' | '.join([*cells, peak, done])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="may be repeated; default: 2 and 4")
    parser.add_argument("--rate", default="500mbit", help="of each uplink")
    parser.add_argument("--layers", type=int, default=1, help="blocks; compile time grows with them")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1408)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=6.0, help="at most, for each number of ranks")
    parser.add_argument("--out", type=Path, help="write the results to this file, after each number of ranks")
    args = parser.parse_args(arguments)
    sizes = {name: getattr(args, name) for name in ("layers", "dim", "hidden", "batch", "seq_len")}
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks or (2, 4):
        shaping, line = shaping_here(args.rate)
        print(f"{ranks} ranks, {line}", flush=True)
        row: dict[str, Any] = {"ranks": ranks, "links": line, **sizes}
        try:
            with World(ranks, shaping) as world, tempfile.TemporaryDirectory() as directory:
                machine = f"{directory}/machine.json"
                world.run(calibrate, machine)
                of_ranks = world.run(train, machine, sizes, args.steps, timeout_s=args.minutes * 60)
                row |= conclude(of_ranks, shaping.bits_per_second if shaping else None)
        except (RuntimeError, TimeoutError) as error:
            print(f"FAILED: {ranks} ranks: {error}", file=sys.stderr, flush=True)
            row["failed"] = f"failed: {why(error)}"
        rows.append(row)
        print(table([row]), flush=True)
        if args.out:
            save(args.out, rows)
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
