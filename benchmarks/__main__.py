"""The whole set: `python -m benchmarks` (a good hour on two quiet cores), or parts of it: `--part training`.

Results go to benchmarks/results/*.json after each case; `python -m benchmarks.report` puts them into docs/performance.md, which
says what each one is. A part that fails is named at the end, and does not keep the others from running.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks import never_slower, overhead, overlap, timeline, training
from benchmarks.results import RESULTS

RATE = "250mbit"  # slow enough that the host work of several ranks on a few cores is small beside the transfers
_SWEEP = f"--sweep --rate {RATE} --slice-mb 1 --repeats 7 --budget-s 4"

# Name -> module and arguments; the file of the results has the same name.
PARTS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "overlap_example": (overlap.main, "--kind all_gather --ranks 4 --rate 1gbit --slice-mb 2 --slice-ms 25"),
    "overlap_uniform": (overlap.main, f"{_SWEEP} --ranks 4 --ranks 2 --minutes 12"),
    "overlap_slow_link": (overlap.main, f"{_SWEEP} --ranks 4 --links slow_link --ratio 0.5 --minutes 4"),
    "overlap_nodes": (overlap.main, f"{_SWEEP} --ranks 4 --links nodes --ratio 0.5 --minutes 4"),
    "overlap_8": (overlap.main, f"{_SWEEP} --ranks 8 --ratio 0.5 --minutes 6"),
    "overlap_large": (
        overlap.main,
        f"--sweep --rate {RATE} --slice-mb 4 --budget-s 8 --ranks 4 --ratio 0.5 --ratio 1 --ratio 2 --minutes 16",
    ),
    "overlap_small": (
        overlap.main,
        f"--sweep --rate {RATE} --slice-mb 0.25 --budget-s 4 --ranks 4 --ratio 0.5 --minutes 3",
    ),
    "overlap_matmul": (
        overlap.main,
        "--sweep --ranks 2 --compute matmul --rate 1gbit --ratio 0.5 --budget-s 5 --minutes 3",
    ),
    "training": (training.main, "--ranks 2 --ranks 4 --minutes 12"),
    "overhead": (overhead.main, "--layers 2 --pass-layers 2 8 32 --minutes 5"),
    "timeline": (timeline.main, ""),
    "never_slower": (never_slower.main, "--ranks 2 4 --count 110 25 --minutes 15"),
    "never_slower_default": (never_slower.main, "--ranks 2 --count 60 --minutes 3.5 --machine loopback"),
    "compile_8": (overhead.main, "--no-ops --layers 8 --pass-layers --minutes 15"),
    "compile_32": (overhead.main, "--no-ops --layers 32 --pass-layers --minutes 40"),
}
NOT_QUICK = (
    "overlap_slow_link",
    "overlap_nodes",
    "overlap_8",
    "overlap_large",
    "overlap_small",
    "overlap_matmul",
    "training",
)
APART = ("compile_8", "compile_32")  # minutes of compiling: only where it is asked for


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", choices=PARTS, action="append", help=f"may be repeated; default: all but {', '.join(APART)}"
    )
    parser.add_argument("--quick", action="store_true", help=f"without {', '.join(NOT_QUICK)}")
    parser.add_argument(
        "--redo",
        metavar="SHARE",
        help="of the overlap tables: keep what is there, and measure again what was disturbed by more than this",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON files")
    args = parser.parse_args(arguments)
    failed = []
    for name in args.part or [name for name in PARTS if name not in (*APART, *(NOT_QUICK if args.quick else ()))]:
        program, words = PARTS[name]
        module = program.__module__.rpartition(".")[2]
        print(f"\n== {name}: python benchmarks/{module}.py {words}", flush=True)
        start = time.monotonic()
        try:
            redo = ["--redo", args.redo] if args.redo and program is overlap.main else []
            status = program([*words.split(), "--out", str(args.results / f"{name}.json"), *redo])
        except Exception:
            traceback.print_exc()
            status = 1
        print(f"== {name}: {'done' if status == 0 else 'FAILED'} in {time.monotonic() - start:.0f} s", flush=True)
        if status:
            failed.append(name)
    if failed:
        print(f"\nFAILED: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
