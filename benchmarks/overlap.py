"""How much of a collective is hidden, on real sockets, and how near that is to the limit.

python benchmarks/overlap.py --kind all_gather --ranks 4 --rate 1gbit --slice-mb 2 --slice-ms 25     one case
python benchmarks/overlap.py --sweep                                                                 all of them

Ranks are processes in network namespaces with a limited uplink each (root; without, they run on loopback as it is, and the
output says so). All ways of running the region take turns within one run, and all ranks start each at the same moment; a
time is that of the slowest rank, and what is printed is the median:

serial      eager: the collective, then the matmul (or the reverse)
inductor    the same module under torch.compile's own backend
sliced      cut in 2, 4 or 8 with asynchronous collectives, written by hand; the best of the three
overlap     torch.compile(..., backend="flashoverlap", options={"machine": the links as measured in this run})
compute     the matmul alone
comm        the better of the collective and our transfers, alone
bound       no schedule on links of the measured speed can be faster
hidden      1 - (overlap - compute) / comm
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.regions import COMPUTES, KINDS, Case, ways
from benchmarks.world import World, shaping_here, synchronized, undisturbed
from fo_compiler.calibration import Calibrator, LinkFit, network_of
from fo_compiler.records import record
from fo_compiler.schedule import Kind
from fo_compiler.schedule.bound import Bound, lower_bound
from fo_compiler.schedule.choose import DEFAULT_SLICES_PER_RANK
from fo_compiler.schedule.machine import Machine
from fo_compiler.schedule.matmul import MatmulPoint, Measured
from fo_compiler.schedule.network import Matrix, Network
from fo_compiler.schedule.simulate import RegionCost

RATIOS = (0.2, 0.5, 0.75, 1.0, 1.5, 2.0)  # T_comm / T_comp
SLICED = "sliced_"

Times = dict[str, list[float]]


# --- on the ranks ---------------------------------------------------------------------------------------------------


def measure_links(case: Case, alike: bool) -> dict[tuple[int, int], LinkFit]:
    """The links that the case uses, at the sizes that it uses."""
    calibrator = Calibrator(repeats=3)
    sizes = sorted({4096, case.slice_bytes // 8, case.slice_bytes // 2, case.slice_bytes})
    with undisturbed(case.compute == "standin"):
        return calibrator.links(sizes, [1] if alike else None)


def measure_compute(case: Case) -> tuple[float, list[MatmulPoint], tuple[float, float]]:
    """Time of 16 columns of the matmul on one slice; its points for the machine; contention with transfers."""
    import torch

    calibrator = Calibrator(repeats=5)
    m, k, n = case.shape
    points = []
    for slices in (1, case.ranks, 2 * case.ranks, 4 * case.ranks, 8 * case.ranks):
        us = calibrator.matmul_us(m // slices, k, n, torch.float32)
        points.append(MatmulPoint(m // slices, k, n, "fp32", us))
    return points[1].time_us, points, calibrator.contention(4 * case.slice_bytes)


def run_ways(case: Case, machine: str, options: dict[str, Any], repeats: int) -> tuple[Times, dict[str, Any]]:
    """Times of this rank in ms, one for each repeat, and what the backend did."""
    all_ways = ways(case, machine, options)
    with record() as report:
        for way in all_ways.values():
            way()
    (decision,) = report.records
    if case.compute == "matmul":
        import torch

        torch.testing.assert_close(all_ways["overlap"](), all_ways["serial"](), rtol=1e-3, atol=1e-2)
    times: Times = {name: [] for name in all_ways}
    gc.collect()
    gc.disable()
    with undisturbed(case.compute == "standin"):
        for turn in range(repeats + 1):
            for name, way in all_ways.items():
                start = synchronized(case.ranks)
                way()
                if turn:  # the first one warms up
                    times[name].append((time.perf_counter() - start) * 1e3)
    gc.enable()
    return times, {"rewritten": decision.rewritten, "schedule": decision.schedule, "reason": decision.reason}


# --- around them ----------------------------------------------------------------------------------------------------


def measure(world: World, case: Case, options: dict[str, Any], repeats: int, alike: bool) -> dict[str, Any]:
    """One case: its times in ms, and all that follows from them."""
    links = world.run(measure_links, case, alike)[0]
    network = network_of(links, case.ranks, True) if not alike else _uniform(links)
    slow = (1.0, 1.0)
    if case.compute == "matmul":
        slice_us, _, _ = world.run(measure_compute, replace(case, columns=256))[0]
        case = case.lasting(slice_us / 256)
        _, points, slow = world.run(measure_compute, case)[0]
    else:
        m, k, n = case.shape
        whole_us = case.slice_ms * case.ranks * 1e3
        points = [MatmulPoint(m // part, k, n, "fp32", whole_us / part) for part in (1, 64)]
    machine = Machine(
        "measured in this run",
        "benchmarks/overlap.py",
        network,
        Measured(tuple(points), memory_GBps=10.0),
        post_us=100.0,
        compute_slowdown=slow[0],
        transfer_slowdown=slow[1],
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(machine.to_json())
        file.flush()
        results = world.run(run_ways, case, file.name, options, repeats)
    times = slowest([result[0] for result in results])
    return {
        "kind": case.kind, "ranks": case.ranks, "compute": case.compute, "slice_mb": case.slice_mb, "slice_ms": case.slice_ms,
        **summary(times, case, network), **results[0][1],
    }  # fmt: skip


def slowest(of_ranks: list[Times]) -> Times:
    """Each turn lasts as long as its slowest rank does."""
    return {
        name: [max(turn) for turn in zip(*(times[name] for times in of_ranks), strict=True)] for name in of_ranks[0]
    }


def summary(times: Times, case: Case, network: Network) -> dict[str, Any]:
    """Medians in ms, and how near they are to the bound."""
    median = {name: statistics.median(values) for name, values in times.items()}
    chunked = {name: ms for name, ms in median.items() if name.startswith(SLICED)}
    best_chunks = min(chunked, key=lambda name: chunked[name])
    comm = min(median["collective"], median["transfers"])
    bound = bound_of(case, median["compute"] * 1e3, network)
    overlap = median["overlap"]
    low, high = quartiles(times["overlap"])
    return {
        "serial_ms": round(median["serial"], 3),
        "inductor_ms": round(median["inductor"], 3),
        "sliced_ms": round(chunked[best_chunks], 3),
        "sliced_in": int(best_chunks.removeprefix(SLICED)),
        "overlap_ms": round(overlap, 3),
        "overlap_quartiles_ms": [round(low, 3), round(high, 3)],
        "compute_ms": round(median["compute"], 3),
        "comm_ms": round(comm, 3),
        "collective_ms": round(median["collective"], 3),
        "transfers_ms": round(median["transfers"], 3),
        "bound_ms": round(bound.us / 1e3, 3),
        "bound_why": bound.why,
        "hidden": round(1 - (overlap - median["compute"]) / comm, 4),
        "of_bound": round(overlap / (bound.us / 1e3), 4),
        "ratio": round(comm / median["compute"], 3),
        "link_GBps": round(_speed(network), 5),
    }


def quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def bound_of(case: Case, compute_us: float, network: Network) -> Bound:
    """The least that the region can take on these links, over all numbers of slices; sums and posts are free."""
    machine = Machine("bound", "measured links", network, Measured((MatmulPoint(1, 1, 1, "fp32", 1.0),), 1e9))
    bounds = (
        lower_bound(
            Kind(case.kind), machine, case.ranks, m,
            RegionCost(compute_us / case.ranks / m, case.slice_bytes / m),
        )
        for m in DEFAULT_SLICES_PER_RANK
    )  # fmt: skip
    return min(bounds, key=lambda bound: bound.us)


def _uniform(links: dict[tuple[int, int], LinkFit]) -> Network:
    """All links alike, as they were made: the median."""
    fits = sorted(links.values(), key=lambda fit: fit.bandwidth_GBps)
    middle = fits[len(fits) // 2]
    return network_of({pair: middle for pair in links}, 0, True)


def _speed(network: Network) -> float:
    if isinstance(network, Matrix):
        return statistics.median(v for a, row in enumerate(network.bandwidth_GBps) for b, v in enumerate(row) if a != b)
    return network.fabric(2).alone_GBps(1)


# --- command line ---------------------------------------------------------------------------------------------------

COLUMNS = ("ratio", "serial_ms", "inductor_ms", "sliced_ms", "overlap_ms", "compute_ms", "comm_ms", "bound_ms")


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Cases as a Markdown table."""
    head = ["kind", "ranks", *(c.removesuffix("_ms").replace("ratio", "comm/comp") for c in COLUMNS)]
    head += ["hidden", "overlap/bound", "schedule"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [row["kind"], str(row["ranks"])]
        cells += [f"{row[c]:.2f}" if c == "ratio" else f"{row[c]:.1f}" for c in COLUMNS]
        cells += [f"{row['hidden']:.3f}", f"{row['of_bound']:.3f}", row["schedule"] or "left alone"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sweep(ranks: int, args: argparse.Namespace, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """All ratios of communication to compute on one network: the links stay, the compute changes."""
    shaping, line = shaping_here(args.rate, args.slow_rank, args.slow_factor)
    say(f"{ranks} ranks, {line}")
    slowest_bits = min(map(shaping.bits_per_second, range(ranks))) if shaping else 8e9
    comm_ms = (ranks - 1) * args.slice_mb * 2**20 * 8 / slowest_bits * 1e3
    with World(ranks, shaping) as world:
        for kind in args.kind or KINDS:
            for ratio in args.ratio or RATIOS:
                case = Case(kind, ranks, args.slice_mb, comm_ms / ratio / ranks)
                row = {"links": line, **measure(world, case, {}, args.repeats, args.slow_rank is None)}
                say(table([row]).splitlines()[-1])
                yield row


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kind", choices=KINDS, action="append", help="may be given twice; default: both in a sweep")
    made.add_argument(
        "--ranks", type=int, action="append", help="may be repeated in a sweep; default: 4; 2, 4, 8 in a sweep"
    )
    made.add_argument("--rate", default="1gbit", help="of each uplink")
    made.add_argument("--slow-rank", type=int, default=None, help="a rank whose uplink is slower")
    made.add_argument("--slow-factor", type=float, default=0.5, help="by how much")
    made.add_argument("--slice-mb", type=float, default=2.0, help="MiB of one rank's part")
    made.add_argument("--slice-ms", type=float, default=25.0, help="compute of one rank's part")
    made.add_argument("--compute", choices=COMPUTES, default="standin")
    made.add_argument("--schedule", default="auto", help="force a family")
    made.add_argument("--slices-per-rank", type=int, default=None)
    made.add_argument("--rewrite", default="auto", choices=("auto", "always"))
    made.add_argument("--repeats", type=int, default=7)
    made.add_argument("--ratio", type=float, action="append", help="of a sweep; may be repeated")
    made.add_argument("--sweep", action="store_true", help="all ratios, 2, 4 and 8 ranks")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--out", type=Path, help="write the results of a sweep to this file")
    return made


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)

    def say(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    if args.sweep:
        rows: list[dict[str, Any]] = []
        for ranks in args.ranks or (2, 4, 8):
            for row in sweep(ranks, args, say):
                rows.append(row)
                if args.out:  # what is measured is not lost when the run is ended
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(json.dumps(rows, indent=1) if args.json else table(rows))
        return 0
    kind, ranks = (args.kind or ["all_gather"])[0], (args.ranks or [4])[0]
    shaping, line = shaping_here(args.rate, args.slow_rank, args.slow_factor)
    say(line)
    case = Case(kind, ranks, args.slice_mb, args.slice_ms, args.compute)
    options = {"rewrite": args.rewrite, "schedule": args.schedule, "slices_per_rank": args.slices_per_rank}
    with World(ranks, shaping, pinned=args.compute == "matmul") as world:
        row = {"links": line, **measure(world, case, options, args.repeats, args.slow_rank is None)}
    print(json.dumps(row, indent=1) if args.json else table([row]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
