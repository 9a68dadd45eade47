"""Put the measured tables into docs/performance.md: `python -m benchmarks.report`, after `python -m benchmarks`.

A table stands between `<!-- NAME -->` and `<!-- end -->`, and is made of benchmarks/results/NAME.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.outcome import table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"


def overlap(rows: list[dict[str, Any]]) -> str:
    return f"Links: {rows[0]['links']}. Times in ms.\n\n{table(rows)}"


def overhead(data: dict[str, Any]) -> str:
    lines = ["| op | us |", "|---|---|"]
    lines += [f"| {name} | {us:.0f} |" for name, us in data["ops_us"].items()]
    lines += ["", "| layers | Inductor, s | flashoverlap, s | our pass, s | share |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['layers']} | {row['inductor_s']:.1f} | {row['flashoverlap_s']:.1f} | {row['our_pass_s']:.2f}"
        f" | {row['share']:.1%} |"
        for row in data["compile"]
    ]
    return "\n".join(lines)


def never_slower(data: dict[str, Any]) -> str:
    found, rows = data["conclusion"], data["regions"]
    lines = ["| | |", "|---|---|"]
    lines += [f"| {name.replace('_', ' ')} | {round(value, 3)} |" for name, value in found.items()]
    wrong = [row for row in rows if row["wrong"]]
    lines += ["", f"Wrong decisions: {len(wrong)} of {len(rows)}."]
    if wrong:
        lines += [
            "",
            "| region (kind, M, K, N) | Inductor, ms | as decided | rewritten | noise | |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {', '.join(map(str, row['shape']))} | {row['inductor_ms']:.2f} | {row['speedup']:.2f}"
            f" | {row['speedup_always']:.2f} | {row['noise']:.1%} | {row['wrong']} |"
            for row in wrong
        ]
    return "\n".join(lines)


TABLES: dict[str, Callable[[Any], str]] = {
    "overlap_uniform": overlap,
    "overlap_slow_link": overlap,
    "overlap_8": overlap,
    "overhead": overhead,
    "never_slower": never_slower,
}


def fill(text: str, results: Path) -> str:
    """The page with the tables whose results are there."""
    for name, make in TABLES.items():
        path = results / f"{name}.json"
        if path.exists():
            made = make(json.loads(path.read_text()))
            text = re.sub(
                rf"(<!-- {name} -->\n).*?(<!-- end -->)",
                lambda found, made=made: f"{found[1]}{made}\n{found[2]}",  # type: ignore[misc]
                text,
                flags=re.DOTALL,
            )
    return text


def main() -> int:
    PAGE.write_text(fill(PAGE.read_text(), RESULTS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
