"""Put the measured tables into docs/performance.md and README.md: `python -m benchmarks.report`, after `python -m benchmarks`.

A table stands between `<!-- NAME -->` and `<!-- end -->`, and is made of benchmarks/results/NAME.json; `prediction` is made of
all that was measured on limited links, and `overlap_short` of `overlap_uniform`. A table whose results are not there stays as it
is.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import training
from benchmarks.outcome import table
from benchmarks.results import RESULTS

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "performance.md", ROOT / "README.md")
Rows = list[dict[str, Any]]
LISTED = 20  # wrong decisions, the worst first


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def overlap(rows: Rows) -> str:
    lines = dict.fromkeys(row["links"] for row in rows)
    return f"Links: {'; '.join(lines)}. Times in ms.\n\n{table(rows)}"


def overlap_short(rows: Rows) -> str:
    """What the README shows: without the columns that only who measures needs."""
    head = [
        "kind",
        "ranks",
        "T_comm / T_comp",
        "Inductor",
        "hand-sliced",
        "**ours**",
        "lower bound",
        "hidden",
        "ours / bound",
    ]
    return markdown(head, [
        [
            row["kind"].replace("_", "-"), str(row["ranks"]), f"{row['ratio']:.1f}",
            *(f"{row[f'{way}_ms']:.0f}" for way in ("inductor", "sliced")), f"**{row['overlap_ms']:.0f}**",
            f"{row['bound_ms']:.0f}", f"{row['hidden']:.2f}", f"{row['of_bound']:.2f}",
        ]
        for row in sorted(rows, key=lambda row: (-row["ranks"], round(row.get("ratio", 0), 1)))
        if "failed" not in row
    ])  # fmt: skip


def overhead(data: dict[str, Any]) -> str:
    parts = []
    if data["ops_us"]:
        parts.append(markdown(["op", "us"], [[name, f"{us:.0f}"] for name, us in data["ops_us"].items()]))
    rows = []
    for row in data["compile"]:
        if "failed" in row:
            rows.append([str(row["layers"]), row["failed"], "", "", "", ""])
            continue
        whole = [
            f"{row[f'{backend}_s']:.1f}" if f"{backend}_s" in row else "" for backend in ("inductor", "flashoverlap")
        ]
        share = f"{row['share']:.1%}" if "share" in row else ""
        rows.append([str(row["layers"]), str(row.get("graph_nodes", "")), *whole, f"{row['our_pass_s']:.2f}", share])
    head = ["layers", "nodes of both graphs", "Inductor, s", "flashoverlap, s", "our pass, s", "share"]
    return "\n\n".join([*parts, markdown(head, rows)])


def never_slower(data: dict[str, Any]) -> str:
    found, rows = data["conclusion"], data["regions"]
    parts = [
        markdown(
            ["", ""],
            # Where nothing was rewritten, what is said of rewritten regions is None.
            [[name.replace("_", " "), str(round(value, 3))] for name, value in found.items() if value is not None],
        )
    ]
    kinds = []
    for kind in dict.fromkeys(row["shape"][0] for row in rows):
        of_kind = [row for row in rows if row["shape"][0] == kind]
        kinds.append([
            kind,
            str(len(of_kind)),
            str(sum(row["rewritten"] for row in of_kind)),
            f"{min(row['speedup'] for row in of_kind):.2f}",
            f"{statistics.median(row['speedup'] for row in of_kind):.2f}",
            str(sum(row["wrong"].startswith("rewritten") for row in of_kind)),
            str(sum(row["wrong"].startswith("left") for row in of_kind)),
        ])  # fmt: skip
    head = [
        "kind",
        "regions",
        "rewritten",
        "worst",
        "median",
        "rewritten, and slower",
        "left alone, and would be faster",
    ]
    parts.append(markdown(head, kinds))
    wrong = sorted(
        (row for row in rows if row["wrong"]), key=lambda row: -abs(row["speedup"] - max(1, row["speedup_always"]))
    )
    parts.append(
        f"Wrong decisions: {len(wrong)} of {len(rows)}" + (f"; the worst {LISTED}:" if len(wrong) > LISTED else ".")
    )
    if wrong:
        head = ["region (kind, M, K, N)", "ranks", "Inductor, ms", "as decided", "at 95 %", "rewritten", ""]
        parts.append(
            markdown(head, [[
                ", ".join(map(str, row["shape"])), str(row.get("ranks", 2)), f"{row['inductor_ms']:.2f}", f"{row['speedup']:.2f}",
                f"{row['interval'][0]:.2f} to {row['interval'][1]:.2f}", f"{row['speedup_always']:.2f}", row["wrong"],
            ] for row in wrong[:LISTED]])
        )  # fmt: skip
    return "\n\n".join(parts)


def prediction(rows: Rows) -> str:
    """How far the cost model was off, for each kind: of what ran, and of the plain collective where that was predicted, too."""

    def line(name: str, of_kind: Rows) -> list[str]:
        errors = [row["predicted_ms"] / row["overlap_ms"] - 1 for row in of_kind]
        sizes = sorted(map(abs, errors))
        worst = max(errors, key=abs)
        return [
            name,
            str(len(errors)),
            f"{statistics.median(sizes):.1%}",
            f"{worst:+.1%}",
            f"{statistics.median(errors):+.1%}",
        ]

    told = [row for row in rows if row.get("predicted_ms")]
    kinds = dict.fromkeys((row["kind"], row["compute"]) for row in told)
    lines = [
        line(
            kind if compute == "standin" else f"{kind}, real matmuls",
            [r for r in told if (r["kind"], r["compute"]) == (kind, compute)],
        )
        for kind, compute in kinds
    ]
    head = ["kind", "cases", "median error", "worst", "median, signed (- is faster than it was)"]
    return markdown(head, [*lines, line("all", told)]) if told else ""


TABLES: dict[str, Callable[[Any], str]] = {
    "overlap_example": overlap,
    "overlap_uniform": overlap,
    "overlap_slow_link": overlap,
    "overlap_nodes": overlap,
    "overlap_8": overlap,
    "overlap_large": overlap,
    "overlap_small": overlap,
    "overlap_matmul": overlap,
    "training": training.table,
    "overhead": overhead,
    "compile_8": overhead,
    "compile_32": overhead,
    "never_slower": never_slower,
    "never_slower_default": never_slower,
}


def fill(text: str, results: Path) -> str:
    """The page with the tables whose results are there."""
    measured: Rows = []
    made: dict[str, str] = {}
    for name, make in TABLES.items():
        path = results / f"{name}.json"
        if path.exists():
            data = json.loads(path.read_text())
            made[name] = make(data)
            if make is overlap:
                measured += data
            if name == "overlap_uniform":
                made["overlap_short"] = overlap_short(data)
    made["prediction"] = prediction(measured)
    for name, made_table in made.items():
        if made_table:
            text = re.sub(
                rf"(<!-- {name} -->\n).*?(<!-- end -->)",
                lambda found, made_table=made_table: f"{found[1]}{made_table}\n{found[2]}",  # type: ignore[misc]
                text,
                flags=re.DOTALL,
            )
    return text


def main() -> int:
    for page in PAGES:
        page.write_text(fill(page.read_text(), RESULTS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
