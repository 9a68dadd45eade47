"""`fo-compiler trace RUN_DIR`: predicted and measured timelines of the rewritten regions in one Chrome trace.

RUN_DIR holds what a run wrote with `FO_DUMP_DIR=RUN_DIR` (rank<r>/<number>_<graph>/) and, anywhere below, the traces that
`torch.profiler` exported (`profiler.export_chrome_trace("RUN_DIR/rank0.json")`). The measured steps of a region are found by the
ranges that its ops leave in a profile (fo_compiler/runtime/profile.py). Each run of a region, predicted or measured, starts at 0.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CommandError, OptionError
from ..runtime.profile import parse_range

Event = dict[str, Any]
_PREDICTED = "_predicted.json"
_APART = 1000  # between the process numbers of one region and the next


@dataclass(frozen=True)
class Predicted:
    """A region in a dump."""

    graph: str  # "000_forward"
    region: str  # "ag0"
    schedule: str
    events: list[Event]


@dataclass(frozen=True)
class Measured:
    """One run of a region in a profile: from the post of its first step to the end of its last wait, on one thread."""

    rank: int
    graph: str  # "forward"
    region: str
    start_us: float
    end_us: float
    events: list[Event]  # of its thread, in that time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="dumps, and traces of torch.profiler")
    parser.add_argument("--graph", help="only this graph, as in 000_forward (default: all)")
    parser.add_argument("--region", help="only this region, as in ag0 (default: all)")
    parser.add_argument(
        "--out", type=Path, help="the trace to write (default: RUN_DIR/timelines.json; open it in Perfetto)"
    )


def run(args: argparse.Namespace) -> int:
    out = args.out or args.run_dir / "timelines.json"
    predicted = [
        found for found in find_predicted(args.run_dir)
        if args.graph in (None, found.graph) and args.region in (None, found.region)
    ]  # fmt: skip
    if not predicted:
        raise OptionError(
            f"expected predicted timelines of regions in {args.run_dir}, found none that fits (all-reduces in slices of the "
            f"library have none); if there are no dumps there, run with FO_DUMP_DIR={args.run_dir}"
        )
    measured = [run for path in profiles(args.run_dir, out) for run in find_measured(path)]
    trace, shown = merge(predicted, measured)
    out.write_text(json.dumps(trace))
    for region, count in zip(predicted, shown, strict=True):
        found = f"{count} measured runs" if count else "not in a profile"
        print(
            f"{region.graph} {region.region} ({region.schedule}): predicted {duration_ms(region.events):.3f} ms, {found}"
        )
    print(f"wrote {out}")
    return 0


def find_predicted(run_dir: Path) -> list[Predicted]:
    """The predicted regions of the lowest rank that has dumps (a prediction is of all ranks)."""
    ranks = sorted(run_dir.glob("rank*/"), key=lambda path: (len(path.name), path.name))
    found = []
    for path in sorted(ranks[0].glob(f"*/*{_PREDICTED}")) if ranks else []:
        region = path.name.removesuffix(_PREDICTED)
        try:
            data = json.loads(path.read_text())
            found.append(Predicted(path.parent.name, region, data["otherData"]["schedule"], data["traceEvents"]))
        except (ValueError, LookupError, TypeError) as error:
            raise CommandError(
                f"{path}: expected a timeline of a dump, got {error!r}; run again with a fresh FO_DUMP_DIR."
            ) from error
    return found


def profiles(run_dir: Path, out: Path) -> list[Path]:
    """Traces that torch.profiler wrote: JSON files with its header, beside what is ours."""
    found = []
    for path in sorted(run_dir.rglob("*.json")):
        if path == out or path.name.endswith(_PREDICTED) or path.name == "records.json":
            continue
        with path.open() as file:
            if '"schemaVersion"' in file.read(4096):
                found.append(path)
    return found


def find_measured(path: Path) -> list[Measured]:
    """The runs of rewritten regions in a profile. A region's first post begins a run of it, its next first post another one."""
    data = json.loads(path.read_text())
    spans = [event for event in data["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    rank = int(data.get("distributedInfo", {}).get("rank", -1))
    threads: dict[Any, list[Event]] = {}
    for event in spans:
        threads.setdefault(event["tid"], []).append(event)
    runs: list[Measured] = []
    for events in threads.values():
        events.sort(key=lambda event: event["ts"])
        steps: dict[tuple[str, str, str], list[tuple[Event, dict[str, str]]]] = {}
        for event in events:
            about = parse_range(event["name"])
            if about is not None:
                key = about["graph"], about["region"], about["collective"]
                steps.setdefault(key, []).append((event, about))
        for (graph, region, _), of_region in steps.items():
            for ranges in _apart(of_region):
                start, end = ranges[0]["ts"], max(event["ts"] + event["dur"] for event in ranges)
                inside = [event for event in events if event["ts"] >= start and event["ts"] + event["dur"] <= end]
                runs.append(Measured(_rank_of(of_region, rank), graph, region, start, end, inside))
    return sorted(runs, key=lambda run: (run.rank, run.start_us))


def _apart(ranges: list[tuple[Event, dict[str, str]]]) -> list[list[Event]]:
    """The ranges of a region, run by run: a step is posted once a run."""
    runs: list[list[Event]] = []
    posted: set[str] = set()
    for event, about in ranges:
        if not runs or (about["what"] == "post" and about["step"] in posted):
            runs.append([])
            posted = set()
        if about["what"] == "post":
            posted.add(about["step"])
        runs[-1].append(event)
    return runs


def _rank_of(ranges: list[tuple[Event, dict[str, str]]], otherwise: int) -> int:
    """The rank that a range speaks of: `rank 1 sends to 2, receives from 0`."""
    words = ranges[0][1]["peers"].split()
    return int(words[1]) if len(words) > 1 and words[1].isdecimal() else otherwise


def merge(predicted: list[Predicted], measured: list[Measured]) -> tuple[dict[str, Any], list[int]]:
    """One trace, and how many measured runs each predicted region got: a process a rank, predicted and measured apart.

    Graphs number their regions alike, and a profile says only whether it was the forward or the backward graph: a region shows
    the runs of all regions of its name in graphs of its kind.
    """
    events: list[Event] = []
    shown = []
    for index, region in enumerate(predicted):
        first = index * _APART
        title = f"{region.graph} {region.region}"
        for event in region.events:
            event = {**event, "pid": first + event["pid"]}
            if event["name"] == "process_name":
                event["args"] = {"name": f"{title} predicted, {event['args']['name']} ({region.schedule})"}
            events.append(event)
        runs = [run for run in measured if (run.graph, run.region) == (region.graph.partition("_")[2], region.region)]
        shown.append(len(runs))
        for number, run in enumerate(runs):
            pid = first + _APART // 2 + number
            name = f"{title} measured, rank {run.rank}, run {number}"
            events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
            for event in run.events:
                args = {**event.get("args", {}), **(parse_range(event["name"]) or {})}
                events.append({**event, "pid": pid, "tid": 0, "ts": event["ts"] - run.start_us, "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}, shown


def duration_ms(events: list[Event]) -> float:
    """From the start of a trace to the end of its last span."""
    return max((event["ts"] + event["dur"] for event in events if event["ph"] == "X"), default=0.0) / 1e3
