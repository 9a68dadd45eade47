"""The whole set: `python -m benchmarks` (some 40 minutes), or `python -m benchmarks --quick` (some 10).

Results go to benchmarks/results/*.json; docs/performance.md says what each one is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import never_slower, overhead, overlap

RESULTS = Path(__file__).resolve().parent / "results"
RATE = "250mbit"  # slow enough that the host work of 8 ranks on a few cores is small beside the transfers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory for the JSON files")
    args = parser.parse_args()
    ratios = _repeated("--ratio", ("0.5", "1") if args.quick else ("0.2", "0.5", "1", "2"))
    sweep = ["--sweep", "--rate", RATE, "--repeats", "5"]

    def run(title: str, program: object, arguments: list[str], name: str) -> None:
        print(f"\n== {title}", flush=True)
        program.main([*arguments, "--out", str(args.results / name)])  # type: ignore[attr-defined]

    run("host time of the ops, share of the pass in a compile", overhead, [], "overhead.json")
    run("overlap, links alike", overlap, [*sweep, *ratios, *_repeated("--ranks", "24")], "overlap_uniform.json")
    few = _repeated("--ratio", ("0.5", "1"))
    run(
        "overlap, one slow uplink",
        overlap,
        [*sweep, *few, "--ranks", "4", "--slow-rank", "1"],
        "overlap_slow_link.json",
    )
    if not args.quick:
        run("overlap, 8 ranks", overlap, [*sweep, *few, "--ranks", "8"], "overlap_8.json")
    run("never slower", never_slower, ["--count", "30" if args.quick else "120"], "never_slower.json")
    return 0


def _repeated(option: str, values: str | tuple[str, ...]) -> list[str]:
    return [word for value in values for word in (option, value)]


if __name__ == "__main__":
    sys.exit(main())
