"""How much of a collective is hidden, on real sockets, and how near that is to the limit.

python benchmarks/overlap.py --kind all_gather --ranks 4 --rate 1gbit --slice-mb 2 --slice-ms 25     one case
python benchmarks/overlap.py --sweep                                                                 all of them
python benchmarks/overlap.py --compute matmul --ranks 2                                              real matmuls

Ranks are processes in network namespaces with a limited uplink each (root; without, they run on loopback as it is, and the
output says so). All ways of running the region take turns within one run, and all ranks start each at the same moment; a
time is that of the slowest rank, and what is printed is the median:

serial      eager: the collective, then the matmul (or the reverse)
inductor    the same module under torch.compile's own backend
sliced      cut in 2, 4 or 8 with asynchronous collectives, written by hand; the best of the three
overlap     torch.compile(..., backend="flashoverlap", options={"machine": the links as measured in this run})
compute     the matmul alone
comm        the better of the collective and our transfers, alone
bound       no schedule on these links can be faster
hidden      1 - (overlap - compute) / comm
predicted   what the cost model said, before the region first ran
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.network import Shaping
from benchmarks.outcome import Times, disturbance, slowest, summary, table, told
from benchmarks.regions import COMPUTES, KINDS, Case
from benchmarks.results import save, why
from benchmarks.ways import ways
from benchmarks.world import World, shaping_here, synchronized, undisturbed
from fo_compiler.calibration import Calibrator, LinkFit, network_of
from fo_compiler.records import record
from fo_compiler.schedule import Kind
from fo_compiler.schedule.machine import CollectiveTime, Machine
from fo_compiler.schedule.matmul import MatmulPoint, Measured
from fo_compiler.schedule.network import Network, TwoLevel, Uniform

RATIOS = (0.5, 1.0, 0.2, 2.0)  # T_comm / T_comp; the most telling first, in case that time runs out
LINKS = ("uniform", "slow_link", "nodes")
LEAST_REPEATS = 3
CASE_S = 400  # at most, for a case, its compiles included; a transfer that hangs ends it after 120 s


@dataclass(frozen=True)
class Setup:
    """The links of a run, and how long it may take over each case."""

    shaping: Shaping | None
    line: str  # what the links are, in words
    repeats: int
    budget_s: float  # for the repeats of one case


@dataclass(frozen=True)
class Links:
    """What was measured once for a set of ranks: the links, what a step costs the host, the group's own collectives."""

    network: Network
    post_us: float
    collectives: tuple[CollectiveTime, ...]
    slice_bytes: int  # at sizes up to this


# --- on the ranks ---------------------------------------------------------------------------------------------------


def measure_links(case: Case, alike: bool) -> tuple[dict[tuple[int, int], LinkFit], dict[Kind, LinkFit], float]:
    """The links and the collectives, at the sizes that the case uses, and how long a step holds up a rank, in us."""
    calibrator = Calibrator(repeats=9)
    sizes = sorted({4096, case.slice_bytes // 8, case.slice_bytes // 2, case.slice_bytes})
    with undisturbed(case.compute == "standin"):
        links = calibrator.links(sizes, [1] if alike else None)
        return links, calibrator.collectives((sizes[0], sizes[-1])), calibrator.post_us()


def measure_compute(case: Case) -> tuple[float, list[MatmulPoint], tuple[float, float], float]:
    """Time of the matmul on one slice; its points for the machine; contention with transfers; memory bandwidth."""
    import torch

    calibrator = Calibrator(repeats=5)
    m, k, n = case.shape
    shapes = [(m // slices, k, n) for slices in (1, case.ranks, 2 * case.ranks, 4 * case.ranks, 8 * case.ranks)]
    times = calibrator.matmuls_us(shapes, torch.float32)
    points = [MatmulPoint(*shape, "fp32", us) for shape, us in zip(shapes, times, strict=True)]
    return points[1].time_us, points, calibrator.contention(4 * case.slice_bytes), calibrator.memory_GBps()


def run_ways(case: Case, machine: str, options: dict[str, Any], repeats: int, budget_s: float) -> tuple[Times, Any]:
    """Times of this rank in ms, one for each repeat, and what the backend did with each collective."""
    import torch
    import torch.distributed as dist

    all_ways = ways(case, {"machine": machine, **options})
    with record() as report:
        for way in all_ways.values():
            way()
    if case.compute == "matmul":
        ours, plain = all_ways["overlap"](), all_ways["serial"]()
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4 * plain.abs().max().item())
    times: Times = {name: [] for name in all_ways}
    gc.collect()
    gc.disable()

    def turn() -> float:
        began = time.perf_counter()
        for name, way in all_ways.items():
            start = synchronized(case.ranks)
            way()
            times[name].append((time.perf_counter() - start) * 1e3)
        return time.perf_counter() - began

    with undisturbed(case.compute == "standin"):
        seconds = torch.tensor(turn())  # warms up, and says how often there is time for
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        for of_way in times.values():
            of_way.clear()
        for _ in range(max(LEAST_REPEATS, min(repeats, int(budget_s / seconds.item())))):
            turn()
    gc.enable()
    return times, report.records


# --- around them ----------------------------------------------------------------------------------------------------


def measure(world: World, case: Case, options: dict[str, Any], setup: Setup, links: Links) -> dict[str, Any]:
    """One case: its times in ms, and all that follows from them."""
    if case.compute == "matmul":
        slice_us, _, _, _ = world.run(measure_compute, replace(case, columns=256))[0]
        case = case.lasting(slice_us / 256)
        _, *rest = world.run(measure_compute, case)[0]
        machine = machine_for(case, links, *rest)
    else:
        machine = machine_for(case, links, standin_points(case))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(machine.to_json())
        file.flush()
        results = world.run(run_ways, case, file.name, options, setup.repeats, setup.budget_s, timeout_s=CASE_S)
    return {
        **_named(case, setup),
        **summary(slowest([result[0] for result in results]), case, links.network, setup.shaping),
        **told(results[0][1]),
    }


def standin_points(case: Case) -> list[MatmulPoint]:
    """What the machine says of the stand-in: in proportion to its rows."""
    m, k, n = case.shape
    whole_us = case.slice_ms * case.ranks * 1e3 / case.matmuls
    return [MatmulPoint(m // part, k, n, "fp32", whole_us / part) for part in (1, 64)]


def machine_for(
    case: Case,
    links: Links,
    points: list[MatmulPoint],
    slow: tuple[float, float] = (1.0, 1.0),
    memory_GBps: float = 10.0,
) -> Machine:
    """What predictions of a case are made for; `slow`: what compute and transfers do to each other."""
    return Machine(
        "measured in this run",
        "benchmarks/overlap.py",
        links.network,
        Measured(tuple(points), memory_GBps),
        post_us=links.post_us,
        compute_slowdown=slow[0],
        transfer_slowdown=slow[1],
        collectives=links.collectives,
    )


NAMES = ("links", "kind", "ranks", "compute", "slice_mb", "slice_ms")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a case is known by."""
    return tuple(row[name] for name in NAMES)


def _named(case: Case, setup: Setup) -> dict[str, Any]:
    return {
        "links": setup.line, "kind": case.kind, "ranks": case.ranks, "compute": case.compute,
        "slice_mb": case.slice_mb, "slice_ms": round(case.slice_ms, 3),
    }  # fmt: skip


def links_measured(world: World, case: Case, shaping: Shaping | None) -> Links:
    """Links and collectives, measured at the sizes that a case uses."""
    alike = shaping is None or shaping.nodes > 1 or shaping.slow_rank is None
    links, collectives, post_us = world.run(measure_links, case, alike, timeout_s=CASE_S)[0]
    network = network_of(links, case.ranks, True) if not alike else _network(links, case.ranks, shaping)
    times = (CollectiveTime(k.value, case.ranks, fit.latency_us, fit.bandwidth_GBps) for k, fit in collectives.items())
    return Links(network, post_us, tuple(times), case.slice_bytes)


def _network(links: dict[tuple[int, int], LinkFit], ranks: int, shaping: Shaping | None) -> Network:
    """Links that were made alike, or alike inside nodes and alike between them."""
    per_node = ranks // (shaping.nodes if shaping else 1)
    crossing = [fit for (a, b), fit in links.items() if a // per_node != b // per_node]
    inside = [fit for (a, b), fit in links.items() if a // per_node == b // per_node]
    if not crossing or not inside:
        return _uniform(inside or crossing)
    across = _uniform(crossing)  # one transfer at a time crossed: it had all that the ranks of a node share
    return TwoLevel(per_node, _uniform(inside), across, adapter_GBps=across.bandwidth_GBps)


def _uniform(links: Iterable[LinkFit]) -> Uniform:
    """Links that were made alike: the median."""
    fits = sorted(links, key=lambda fit: fit.bandwidth_GBps)
    middle = fits[len(fits) // 2]
    return Uniform(middle.latency_us, middle.bandwidth_GBps)


# --- command line ---------------------------------------------------------------------------------------------------


def run(cases: list[Case], setup: Setup, options: dict[str, Any], end: float) -> Iterator[dict[str, Any]]:
    """Measure cases of one number of ranks. What fails, or is left over at `end`, is reported; the rest gets new ranks."""
    left = list(cases)
    while left:
        if time.monotonic() > end:
            yield from ({**_named(case, setup), "failed": "not measured: no time left"} for case in left)
            return
        with World(left[0].ranks, setup.shaping) as world:
            links: Links | None = None
            while left and time.monotonic() < end:
                case = left.pop(0)
                try:
                    if links is None or links.slice_bytes != case.slice_bytes:
                        links = links_measured(world, case, setup.shaping)
                    yield measure(world, case, options, setup, links)
                except (RuntimeError, TimeoutError) as error:
                    print(f"FAILED: {case}: {error}", file=sys.stderr, flush=True)
                    yield {**_named(case, setup), "failed": f"failed: {why(error)}"}
                    break


def sweep_cases(args: argparse.Namespace, ranks: int, shaping: Shaping | None) -> list[Case]:
    """All kinds at one ratio of communication to compute, then at the next: the links stay, the compute changes."""

    def made(kind: str, mb: float, ratio: float) -> Case:
        case = Case(kind, ranks, mb, 1.0, args.compute)
        transfer_ms = case.slice_bytes * 8 / (shaping.slowest if shaping else 8e9) * 1e3
        return replace(case, slice_ms=case.crossings * (ranks - 1) * transfer_ms / ratio / ranks)

    return [
        made(kind, mb, ratio) for mb in args.slice_mb for ratio in args.ratio or RATIOS for kind in args.kind or KINDS
    ]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kind", choices=KINDS, action="append", help="may be repeated; default: all in a sweep")
    made.add_argument(
        "--ranks", type=int, action="append", help="may be repeated in a sweep; default: 4; 2, 4 in a sweep"
    )
    made.add_argument("--rate", default="1gbit", help="of each uplink")
    made.add_argument(
        "--links", choices=LINKS, default="uniform", help="alike; rank 1's slower; two nodes with slow uplinks"
    )
    made.add_argument("--slow-factor", type=float, default=0.5, help="what the slow links have of the rate")
    made.add_argument(
        "--slice-mb", type=float, nargs="+", default=[2.0], help="MiB of one rank's part; several in a sweep"
    )
    made.add_argument("--slice-ms", type=float, default=25.0, help="compute of one rank's part")
    made.add_argument("--compute", choices=COMPUTES, default="standin")
    made.add_argument("--schedule", default="auto", help="force a family")
    made.add_argument("--slices-per-rank", type=int, default=None)
    made.add_argument("--rewrite", default="auto", choices=("auto", "always"))
    made.add_argument("--repeats", type=int, default=7, help="of a case, where the budget has room for them")
    made.add_argument("--budget-s", type=float, default=30.0, help="for the repeats of one case")
    made.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="for each number of ranks; what does not fit is listed as not measured",
    )
    made.add_argument("--ratio", type=float, action="append", help="of a sweep; may be repeated")
    made.add_argument("--sweep", action="store_true", help="all kinds and ratios")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--out", type=Path, help="write the results to this file, after each case")
    made.add_argument(
        "--redo",
        type=float,
        metavar="SHARE",
        help="keep what is in the file of --out, and measure again what is missing or was disturbed by more than this (spread, "
        "or links that were measured as slower than they are); the run that was disturbed less stays",
    )
    return made


def quieter(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The one of two runs of a case that was disturbed less, whatever it found; of two that failed the later one."""
    return old if old and "failed" not in old and disturbance(old) <= disturbance(new) else new


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    options = {"rewrite": args.rewrite, "schedule": args.schedule, "slices_per_rank": args.slices_per_rank}
    rows: list[dict[str, Any]] = []
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    if args.redo is not None and args.out and args.out.exists():
        known = {_key(row): row for row in json.loads(args.out.read_text())}
    for ranks in args.ranks or ((2, 4) if args.sweep else (4,)):
        shaping, line = shaping_here(
            args.rate,
            slow_rank=1 if args.links == "slow_link" else None,
            slow_factor=args.slow_factor,
            nodes=2 if args.links == "nodes" else 1,
        )
        say(f"{ranks} ranks, {line}")
        setup = Setup(shaping, line, args.repeats, args.budget_s)
        if args.sweep:
            cases = sweep_cases(args, ranks, shaping)
        else:
            cases = [Case((args.kind or ["all_gather"])[0], ranks, args.slice_mb[0], args.slice_ms, args.compute)]
        wanted = [_key(_named(case, setup)) for case in cases]
        if args.redo is not None:
            cases = [c for c, key in zip(cases, wanted, strict=True) if disturbance(known.get(key)) > args.redo]
        for row in run(cases, setup, options, time.monotonic() + args.minutes * 60):
            key = _key(row)
            known[key] = quieter(known.get(key), row)
            say(table([row]).splitlines()[-1])
            if args.out:  # what is measured is not lost when the run is ended
                save(args.out, list(known.values()))
        rows += [known[key] for key in wanted]
    if args.json:
        print(json.dumps(rows if args.sweep else rows[0], indent=1))
    else:
        print(table(rows))
    return 1 if any("failed" in row for row in rows) and not args.sweep else 0


if __name__ == "__main__":
    sys.exit(main())
