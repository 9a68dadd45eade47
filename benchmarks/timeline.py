"""The measured timeline of one region on one rank, before and after, from torch.profiler: the README's picture.

python benchmarks/timeline.py --out benchmarks/results/timeline.json --svg docs/figures/measured_timeline.svg

An all-gather and a (timed) matmul on limited links, once under plain Inductor and once under the backend. Compute and waiting are
ops in the profile; a transfer is drawn from where it is posted to where the rank has it, its wait included. Of several runs
the median one is shown. Drawing needs matplotlib (`pip install -e .[bench]`); `--draw` draws a file that is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.overlap import links_measured, machine_for, standin_points
from benchmarks.regions import Case
from benchmarks.results import save
from benchmarks.world import World, shaping_here, synchronized, undisturbed
from fo_compiler.runtime.profile import parse_range

Span = dict[str, Any]  # lane, name, start_ms, end_ms
SVG = Path(__file__).resolve().parent.parent / "docs" / "figures" / "measured_timeline.svg"
LANES = ("transfers", "compute", "waits")
COLOURS = {"transfers": "#ee8866", "compute": "#4477aa", "waits": "#bbbbbb"}


def profiled(case: Case, machine: str, runs: int) -> dict[str, list[Span]]:
    """The spans of the median run of this rank, before and after."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.ways import ways

    found: dict[str, list[Span]] = {}
    all_ways = ways(case, {"machine": machine})
    for name, way in (("before", all_ways["inductor"]), ("after", all_ways["overlap"])):
        way()
        seen: list[list[Span]] = []
        for _ in range(runs):
            with profile(activities=[ProfilerActivity.CPU]) as profiler, undisturbed():
                synchronized(case.ranks)
                way()
            seen.append(spans([(e.name, e.time_range.start, e.time_range.end) for e in profiler.events()]))
        seen.sort(key=end_ms)
        found[name] = seen[len(seen) // 2]
    return found


def spans(events: list[tuple[str, float, float]]) -> list[Span]:
    """Compute, transfers and waits of a region out of a profile, in ms from the first of them."""
    found: list[Span] = []

    def add(lane: str, name: str, start: float, end: float) -> None:
        found.append({"lane": lane, "name": name, "start_ms": start / 1e3, "end_ms": end / 1e3})

    posted: dict[str, float] = {}
    whole: float | None = None
    for name, start, end in sorted(events, key=lambda event: event[1]):
        step = parse_range(name)
        if name == "fo_bench::timed_matmul":
            add("compute", "matmul", start, end)
        elif name.startswith("_c10d_functional::all_gather"):
            whole = start if whole is None else whole
        elif name == "_c10d_functional::wait_tensor" and whole is not None:
            add("transfers", "all-gather", whole, end)
            add("waits", "", start, end)
            whole = None
        elif step is not None and step["what"] == "post":
            posted[step["step"]] = start
        elif step is not None:
            add("transfers", f"step {step['step']}", posted.pop(step["step"], start), end)
            add("waits", "", start, end)
    first = min((span["start_ms"] for span in found), default=0.0)
    return [
        {**span, "start_ms": round(span["start_ms"] - first, 3), "end_ms": round(span["end_ms"] - first, 3)}
        for span in found
    ]


def end_ms(of_run: list[Span]) -> float:
    return max((span["end_ms"] for span in of_run), default=0.0)


def draw(data: dict[str, Any], path: Path) -> None:
    """Both timelines to one scale, as an SVG of a few KB without dates and paths in it."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "fo-compiler", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    )
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, sharex=True, figsize=(8, 3.0), layout="constrained")
    titles = {"before": "plain Inductor", "after": "flashoverlap"}
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        of_run = data[name]
        for lane, label in enumerate(LANES):
            for span in (span for span in of_run if span["lane"] == label):
                width = span["end_ms"] - span["start_ms"]
                axis.barh(
                    lane,
                    width,
                    left=span["start_ms"],
                    height=0.8,
                    color=COLOURS[label],
                    edgecolor="white",
                    linewidth=0.5,
                )
                if span["name"] and width > 0.06 * end_ms(data["before"]):
                    middle = (span["start_ms"] + span["end_ms"]) / 2
                    axis.text(middle, lane, span["name"], ha="center", va="center", color="white", fontsize=8)
        axis.set_yticks(range(len(LANES)), LANES)
        axis.invert_yaxis()
        axis.set_title(f"{title}: {end_ms(of_run):.0f} ms", loc="left", fontsize=10)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel(f"ms; rank 0 of {data['ranks']}, {data['links']}, compute a timed stand-in")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate", default="250mbit", help="of each uplink")
    parser.add_argument("--slice-mb", type=float, default=1.0)
    parser.add_argument("--slice-ms", type=float, default=45.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the spans to this file")
    parser.add_argument("--svg", type=Path, default=SVG, help="the picture")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing, draw the spans in this file")
    args = parser.parse_args(arguments)
    if args.draw:
        draw(json.loads(args.draw.read_text()), args.svg)
        return 0
    case = Case("all_gather", args.ranks, args.slice_mb, args.slice_ms)
    shaping, line = shaping_here(args.rate)
    with World(args.ranks, shaping) as world:
        links = links_measured(world, case, shaping)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(machine_for(case, links, standin_points(case)).to_json())
            file.flush()
            found = world.run(profiled, case, file.name, args.runs)[0]
    data = {"ranks": args.ranks, "links": line, **found}
    for name in ("before", "after"):
        print(f"{name}: {end_ms(found[name]):.1f} ms")
    if args.out:
        save(args.out, data)
    try:
        draw(data, args.svg)
    except ImportError:
        print("no picture: matplotlib is not installed (pip install -e .[bench])")
        return 0
    print(f"wrote {args.svg}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
