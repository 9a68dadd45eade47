"""From measured times to what is reported: medians, hidden share, lower bound, prediction; and the table of it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fo_compiler.records import Record
from fo_compiler.schedule import Kind
from fo_compiler.schedule.bound import Bound, lower_bound
from fo_compiler.schedule.choose import DEFAULT_SLICES_PER_RANK
from fo_compiler.schedule.machine import Machine
from fo_compiler.schedule.matmul import MatmulPoint, Measured
from fo_compiler.schedule.network import Matrix, Network
from fo_compiler.schedule.simulate import RegionCost
from fo_compiler.schedule.taper import UNITS

from .network import Shaping
from .regions import Case
from .ways import SLICED

Times = dict[str, list[float]]


def slowest(of_ranks: list[Times]) -> Times:
    """Each turn lasts as long as its slowest rank does."""
    return {
        name: [max(turn) for turn in zip(*(times[name] for times in of_ranks), strict=True)] for name in of_ranks[0]
    }


def summary(times: Times, case: Case, network: Network, shaping: Shaping | None = None) -> dict[str, Any]:
    """Medians in ms, and how near they are to the bound: that of the limited links, or else of the measured `network`."""
    median = {name: statistics.median(values) for name, values in times.items()}
    chunked = {name: ms for name, ms in median.items() if name.startswith(SLICED)}
    best_chunks = min(chunked, key=lambda name: chunked[name])
    comm = min(median["collective"], median["transfers"])
    links = (shaping.links(case.ranks), shaping.burst_us) if shaping else (network, 0.0)
    bound = bound_of(case, median["compute"] * 1e3, *links)
    overlap = median["overlap"]
    low, high = quartiles(times["overlap"])
    return {
        "serial_ms": round(median["serial"], 3),
        "inductor_ms": round(median["inductor"], 3),
        "sliced_ms": round(chunked[best_chunks], 3),
        "sliced_in": int(best_chunks.removeprefix(SLICED)),
        "overlap_ms": round(overlap, 3),
        "overlap_quartiles_ms": [round(low, 3), round(high, 3)],
        "spread": round((high - low) / overlap, 4),
        "repeats": len(times["overlap"]),
        "compute_ms": round(median["compute"], 3),
        "comm_ms": round(comm, 3),
        "collective_ms": round(median["collective"], 3),
        "transfers_ms": round(median["transfers"], 3),
        "bound_ms": round(bound.us / 1e3, 3),
        "bound_why": bound.why,
        "hidden": round(1 - (overlap - median["compute"]) / comm, 4),
        "of_bound": round(overlap / (bound.us / 1e3), 4),
        "ratio": round(comm / median["compute"], 3),
        "link_GBps": round(speed(network), 5),
        "links_slow": round(max(0.0, 1 - speed(network) / speed(links[0])), 4) if links[0].is_uniform else 0.0,
    }


def disturbance(row: dict[str, Any] | None) -> float:
    """How far to trust a row: how much its runs differ, or how much slower than they are its links (alike) were measured.

    Not at all where there is none, or it failed.
    """
    return math.inf if row is None or "failed" in row else float(max(row["spread"], row["links_slow"]))


def told(records: list[Record]) -> dict[str, Any]:
    """What the backend did, and the time that it predicted: the sum over the regions, each as it was decided.

    The two collectives of a chain that is one region have one reason.
    """
    regions = list({(record.region or record.collective, record.reason): record for record in records}.values())
    schedules = [record.schedule for record in regions if record.rewritten]
    predicted = [predicted_ms(record) for record in regions]
    known = [ms for ms in predicted if ms is not None]
    return {
        "rewritten": sum(record.rewritten for record in records),
        "collectives": len(records),
        "schedule": " + ".join(map(str, schedules)) or None,
        "predicted_ms": round(sum(known), 3) if known else None,
        "reason": "; ".join(record.reason for record in regions),
    }


def predicted_ms(record: Record) -> float | None:
    """The predicted time of a region, rewritten or left alone, out of the reason in its record; None where it has none."""
    name = re.escape(record.schedule or "") if record.rewritten else "plain"
    found = re.search(rf"\b{name} ([0-9.e+-]+) ms", record.reason)
    return float(found[1]) if found else None


def quartiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]


def bound_of(case: Case, compute_us: float, network: Network, burst_us: float = 0.0) -> Bound:
    """The least that the region can take on these links, over all numbers of slices; sums, posts and a burst are free."""
    machine = Machine("bound", "links alone", network, Measured((MatmulPoint(1, 1, 1, "fp32", 1.0),), 1e9))

    bounds = (
        lower_bound(
            Kind(case.kind), machine, case.ranks, m, RegionCost(compute_us / case.ranks / m, case.slice_bytes / m)
        )
        for m in (*DEFAULT_SLICES_PER_RANK, UNITS)
    )
    least = min(bounds, key=lambda bound: bound.us)
    return replace(least, us=max(compute_us, least.us - burst_us))


def speed(network: Network) -> float:
    if isinstance(network, Matrix):
        return statistics.median(v for a, row in enumerate(network.bandwidth_GBps) for b, v in enumerate(row) if a != b)
    return network.fabric(2).alone_GBps[1]


COLUMNS = ("ratio", "serial_ms", "inductor_ms", "sliced_ms", "overlap_ms", "compute_ms", "comm_ms", "bound_ms")


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Cases as a Markdown table."""
    head = ["kind", "ranks", "MB", *(c.removesuffix("_ms").replace("ratio", "comm/comp") for c in COLUMNS)]
    head += ["hidden", "overlap/bound", "spread", "predicted", "schedule"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = [row["kind"], str(row["ranks"]), f"{row['slice_mb']:g}"]
        if "failed" in row:
            lines.append(f"| {' | '.join(cells)} | {row['failed']} {'| ' * (len(head) - 4)}|")
            continue
        cells += [f"{row[c]:.2f}" if c == "ratio" else f"{row[c]:.1f}" for c in COLUMNS]
        cells += [f"{row['hidden']:.3f}", f"{row['of_bound']:.3f}", f"{row['spread']:.1%}"]
        cells += ["-" if row["predicted_ms"] is None else f"{row['predicted_ms']:.1f}", row["schedule"] or "left alone"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
