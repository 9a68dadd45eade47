"""Is anything slower under our backend than under plain Inductor, where it may choose?

python benchmarks/never_slower.py --ranks 2 4 --count 110 25 --minutes 9

Many small regions (tiny to large M, K, N; a collective before or after a real float32 matmul) on gloo ranks over loopback, each
doing what `options={"machine": FILE}` decides, FILE being calibrated at the start of the run, for these ranks. Every region is
compiled by plain Inductor, by ours as it decides (auto), by ours with rewrite="always", to see whether leaving it alone was
right, and by plain Inductor again: what runs twice a turn would find more of its code in the caches. Then they take turns. What
counts is, above 1 being faster,

    speed-up = median over the turns of (time under plain Inductor / time under ours)

with the interval that holds this median at 95 %, whatever the distribution (from the sign test). Inductor against itself is
judged in the same way: so often would an equal program be called slower, and so far from 1 is it found.

Where auto leaves a region alone its graph is Inductor's, but for one op that keeps the records.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.results import save, why
from benchmarks.world import World

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
Shape = tuple[str, int, int, int]  # kind, M, K, N of the whole matmul
WRONG = 0.05  # a decision is wrong if the other one is faster by this much, at 95 %
SLOWER = 0.02  # and a region is slower if it is so by this much, at 95 %
MOST_TURNS = 150
SIZES_M = (32, 128, 512, 2048, 8192)
SIZES_KN = (32, 128, 256, 512, 1024, 2048)


def shapes(count: int, seed: int = 0) -> list[Shape]:
    """`count` different regions, none of which takes more than about 0.2 s."""
    every = [
        (kind, m, k, n)
        for kind in KINDS
        for m in SIZES_M
        for k in SIZES_KN
        for n in SIZES_KN
        if 2.0 * m * k * n < 4e9 and m * max(k, n) * 4 <= 32e6
    ]
    return Random(seed).sample(every, min(count, len(every)))


def calibrate(path: str) -> None:
    import torch.distributed as dist

    from fo_compiler.calibration import Calibrator

    calibration = Calibrator(repeats=7).machine("calibrated in this run")
    if dist.get_rank() == 0:
        calibration.machine.save(path)


def measure(shape: Shape, machine: str | None, budget_ms: float) -> dict[str, Any]:
    """Times of one region on this rank, by turn."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol
    from torch import Tensor

    from benchmarks.regions import all_gather, reduce_scatter
    from fo_compiler.records import record
    from fo_compiler.torch_adapter import with_own_code

    kind, m, k, n = shape
    group = dist.group.WORLD
    assert group is not None
    ranks = dist.get_world_size()
    w = torch.randn(k, n)

    def region(x: Tensor) -> Tensor:
        if kind == "all_gather":
            x = all_gather(x, 0, group)
        elif kind == "all_to_all":
            x = funcol.all_to_all_single(x, None, None, group)
        x = torch.mm(x, w)
        if kind == "reduce_scatter":
            x = reduce_scatter(x, "sum", 0, group)
        return funcol.all_reduce(x, "sum", group) if kind == "all_reduce" else x

    x = torch.randn(m // ranks if kind == "all_gather" else m, k)
    torch.compiler.reset()
    options: dict[str, Any] = {"machine": machine} if machine else {}

    def compiled(backend: str, **options: Any) -> Any:
        # Among the compiles of one code torch looks at the others' entries first.
        return torch.compile(with_own_code(region), backend=backend, dynamic=False, options=options or None)

    ways = {
        "inductor": compiled("inductor"),
        "auto": compiled("flashoverlap", **options),
        "always": compiled("flashoverlap", **options, rewrite="always"),
        "again": compiled("inductor"),
    }
    with record() as report:
        for way in ways.values():
            way(x)
    automatic, always = (r for r in [*report.records, *report.records[-1:]][:2])
    times: dict[str, list[float]] = {name: [] for name in ways}
    start = time.perf_counter()
    for way in ways.values():
        way(x)  # warms up, and says how often there is time for
    once_ms = torch.tensor((time.perf_counter() - start) * 1e3)
    dist.all_reduce(once_ms, dist.ReduceOp.MAX)
    turns = int(min(MOST_TURNS, max(9, budget_ms / once_ms.item())))
    gc.collect()
    gc.disable()
    names, random = list(ways), Random(0)  # the same on all ranks
    for _ in range(turns):
        random.shuffle(names)  # what ran before leaves its traces in caches and allocators
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            ways[name](x)
            times[name].append((time.perf_counter() - start) * 1e3)
    gc.enable()
    return {
        "times": times,
        "rewritten": automatic.rewritten,
        "schedule": always.schedule,
        "reason": automatic.reason,
    }


def ratio(above: list[float], below: list[float]) -> tuple[float, float, float]:
    """The median of `above / below` over the turns, and the interval that holds it at 95 % (order statistics)."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=True))
    half = 0.98 * math.sqrt(len(ratios))  # the turns on one side of the median are binomial
    low, high = math.floor((len(ratios) - 1) / 2 - half), math.ceil((len(ratios) - 1) / 2 + half)
    return statistics.median(ratios), ratios[max(low, 0)], ratios[min(high, len(ratios) - 1)]


def judge(shape: Shape, of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, speed-ups, and whether the decision was right."""
    times = {
        name: [max(turn) for turn in zip(*(rank["times"][name] for rank in of_ranks), strict=True)]
        for name in of_ranks[0]["times"]
    }
    plain = times["inductor"]
    ours, low, high = ratio(plain, times["auto"])
    same, _, same_high = ratio(plain, times["again"])
    rewritten = of_ranks[0]["rewritten"]
    wrong = ""
    if rewritten and high < 1 - WRONG:
        wrong = "rewritten, and slower"
    elif not rewritten and ratio(times["auto"], times["always"])[1] > 1 + WRONG:
        wrong = "left alone, and would be faster"
    return {
        "shape": list(shape),
        "ranks": len(of_ranks),
        "turns": len(plain),
        "inductor_ms": round(statistics.median(plain), 3),
        "auto_ms": round(statistics.median(times["auto"]), 3),
        "always_ms": round(statistics.median(times["always"]), 3),
        "speedup": round(ours, 4),
        "interval": [round(low, 4), round(high, 4)],
        "speedup_always": round(ratio(plain, times["always"])[0], 4),
        "noise": round(abs(same - 1), 4),
        "slower": high < 1 - SLOWER,
        "same_is_slower": same_high < 1 - SLOWER,
        "rewritten": rewritten,
        "schedule": of_ranks[0]["schedule"],
        "wrong": wrong,
        "reason": of_ranks[0]["reason"],
    }


def conclusion(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the sweep says. Percentiles are of all regions."""
    speedups = sorted(row["speedup"] for row in rows)
    noises = sorted(row["noise"] for row in rows)
    return {
        "regions": len(rows),
        "rewritten": sum(row["rewritten"] for row in rows),
        "worst": speedups[0],
        "percentile_5": speedups[int(0.05 * len(speedups))],
        "median": statistics.median(speedups),
        "best": speedups[-1],
        "noise_median": statistics.median(noises),
        "noise_percentile_95": noises[min(len(noises) - 1, int(0.95 * len(noises)))],
        "noise_worst": noises[-1],
        "slower": sum(row["slower"] for row in rows),
        "slower_and_rewritten": sum(row["slower"] and row["rewritten"] for row in rows),
        "Inductor_slower_than_itself": sum(row["same_is_slower"] for row in rows),
        "wrong_rewritten": sum(row["wrong"].startswith("rewritten") for row in rows),
        "wrong_left_alone": sum(row["wrong"].startswith("left") for row in rows),
        "worst_rewritten": min((row["speedup"] for row in rows if row["rewritten"]), default=None),
        "median_rewritten": statistics.median(rewritten)
        if (rewritten := [r["speedup"] for r in rows if r["rewritten"]])
        else None,
        "median_speedup_always": statistics.median(row["speedup_always"] for row in rows),
    }


def run(ranks: int, count: int, seconds: float, preset: str | None, budget_ms: float) -> Iterator[dict[str, Any]]:
    """Judge `count` regions, or as many as there is time for; one that fails is reported, and ends the ranks."""
    end = time.monotonic() + seconds
    with World(ranks, None) as world, tempfile.TemporaryDirectory() as directory:
        machine = preset or f"{directory}/machine.json"
        if preset is None:
            world.run(calibrate, machine)
        for shape in shapes(count):
            if time.monotonic() > end:
                return
            yield judge(shape, world.run(measure, shape, machine, budget_ms))


def line_of(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return (
        f"{row['ranks']} {'x'.join(map(str, row['shape'])):32} {row['inductor_ms']:9.3f} ms"
        f"  speed-up {row['speedup']:.3f} [{low:.2f}, {high:.2f}]  always {row['speedup_always']:.3f} ({row['schedule']})"
        f"  {'rewritten' if row['rewritten'] else 'left alone'}{f'  WRONG: {wrong}' if (wrong := row['wrong']) else ''}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--count", type=int, nargs="+", default=[110, 25], help="regions, for each number of ranks")
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="stop after this long, what is left being shared in proportion to the counts",
    )
    parser.add_argument("--machine", help="a preset or a file instead of calibrating")
    parser.add_argument("--budget-ms", type=float, default=900, help="time for the turns of one region")
    parser.add_argument("--out", type=Path, help="write the results to this file, after each region")
    args = parser.parse_args(arguments)
    if len(args.ranks) != len(args.count):
        parser.error(f"expected a count for each of --ranks {args.ranks}, got {args.count}")
    rows: list[dict[str, Any]] = []
    status = 0
    end = time.monotonic() + args.minutes * 60
    for i, (ranks, count) in enumerate(zip(args.ranks, args.count, strict=True)):
        seconds = (end - time.monotonic()) * count / sum(args.count[i:])
        try:
            for row in run(ranks, count, seconds, args.machine, args.budget_ms):
                rows.append(row)
                print(line_of(row), flush=True)
                if args.out:
                    save(args.out, {"conclusion": conclusion(rows), "regions": rows})
        except (RuntimeError, TimeoutError) as error:
            print(
                f"FAILED: {ranks} ranks, after {len(rows)} regions: {why(error)}\n{error}", file=sys.stderr, flush=True
            )
            status = 1
    if rows:
        print(json.dumps(conclusion(rows), indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main())
