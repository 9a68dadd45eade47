"""`fo-compiler plan`: what the scheduler would do with a region, in numbers, before anything is compiled."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

from ..errors import MachineError, OptionError
from ..schedule import Kind
from ..schedule.choose import (
    DEFAULT_CHUNKS,
    Choice,
    Region,
    choose,
    slices_to_try,
)
from ..schedule.ir import Schedule
from ..schedule.machine import Machine, simple_machine
from ..schedule.matmul import DTYPE_BYTES, dtype_name
from ..schedule.picture import bars, chrome_trace, svg
from ..schedule.presets import find_machine
from ..schedule.simulate import Simulation, simulate
from ..schedule.taper import TAPERED, UNITS
from ..schedule.timeline import text_timeline

DRAWN_SLICES = 10_000  # of all ranks together: to draw more takes seconds
DRAWN_RANKS = 8  # timelines of more ranks are cut off; --trace and --svg have all of them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", required=True, choices=[str(kind) for kind in Kind], help="what the collective does")
    parser.add_argument("--ranks", required=True, type=_positive, metavar="N", help="ranks in the group")
    shape = parser.add_argument_group("the region by shape: one [M, K] @ [K, N] a rank, sliced along M")
    shape.add_argument("--m", type=_positive, help="rows of the gathered input, or of the result that is scattered")
    shape.add_argument("--k", type=_positive, help="contracted size")
    shape.add_argument("--n", type=_positive, help="columns of the result")
    shape.add_argument("--dtype", default="bf16", help="bf16, fp16, fp32, fp64 or fp8 (default: %(default)s)")
    shape.add_argument("--machine", metavar="NAME_OR_FILE", help="a preset or the file of a measured machine")
    times = parser.add_argument_group("the region by time, of one slice of one rank at one slice a rank")
    times.add_argument("--compute-ms", type=_time, help="so that all compute of a rank takes N times this")
    times.add_argument("--transfer-ms", type=_time, help="so that the collective takes N - 1 times this")
    options = parser.add_argument_group("options")
    options.add_argument(
        "--schedule", help="only this family (default: all; `library`, all-reduces in slices, is the backend's alone)"
    )
    options.add_argument(
        "--slices-per-rank", type=_positive, nargs="+", metavar="M",
        help=f"only these numbers of slices (default: {_words(Kind.ALL_GATHER)}, for {Kind.ALL_GATHER_OUT} "
        f"{_words(Kind.ALL_GATHER_OUT)}; and pieces that shrink)",
    )  # fmt: skip
    options.add_argument(
        "--margin", type=_share, help="least gain to rewrite, as a share (default: the machine's, mostly 0.05)"
    )
    options.add_argument("--max-buffer-mb", type=_time, help="most memory for slices under way, in 10^6 bytes")
    options.add_argument(
        "--chunks",
        type=_positive,
        default=DEFAULT_CHUNKS,
        help="k of the k-slice overlap (default: %(default)s)",
    )
    options.add_argument("--rank", type=int, help="draw the steps of this rank only")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the figures as JSON instead of text")
    output.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace (opens in Perfetto)")
    output.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")


def run(args: argparse.Namespace) -> int:
    kind = Kind(args.kind)
    if args.rank is not None and not 0 <= args.rank < args.ranks:
        raise OptionError.wrong("--rank", f"a rank from 0 to {args.ranks - 1}", args.rank)
    machine, region, allowed, units = _inputs(args, kind)
    try:
        choice = choose(
            kind, machine, args.ranks, region,
            families=(args.schedule,) if args.schedule else None,
            slices_per_rank=allowed,
            margin=args.margin,
            max_buffer_bytes=None if args.max_buffer_mb is None else args.max_buffer_mb * 1e6,
            chunks=args.chunks,
            in_pieces=True,
            units=units,
        )  # fmt: skip
    except ValueError as error:
        if isinstance(error, MachineError):
            raise
        raise OptionError(str(error)) from error
    print(
        json.dumps(_figures(choice), indent=2) if args.json else _text(args, kind, machine, region, choice),
        end="",
    )
    if args.json:
        print()
    if args.trace or args.svg:
        schedule = choice.schedule
        if schedule is None:
            raise OptionError(f"nothing to draw: {choice.reason}")
        simulation = _simulated(kind, machine, schedule, region)
        if args.trace:
            args.trace.write_text(json.dumps(chrome_trace(schedule, simulation)))
        if args.svg:
            args.svg.write_text(svg(schedule, simulation))
    return 0


def _inputs(args: argparse.Namespace, kind: Kind) -> tuple[Machine, Region, tuple[int, ...], int | None]:
    """The machine, the region in numbers, the numbers of slices that it has rows for, and in how many tapered blocks are cut."""
    by_time = args.compute_ms is not None or args.transfer_ms is not None
    by_shape = any(value is not None for value in (args.m, args.k, args.n, args.machine))
    asked = tuple(args.slices_per_rank or slices_to_try(kind))
    units = None if args.slices_per_rank and args.schedule != TAPERED else max(args.slices_per_rank or (UNITS,))
    if by_time == by_shape:
        raise OptionError("expected either --m, --k, --n and --machine, or --compute-ms and --transfer-ms")
    if by_time:
        if args.compute_ms is None or args.transfer_ms is None:
            raise OptionError("expected both --compute-ms and --transfer-ms")
        # A link of 1 GB/s takes as many microseconds as the slice has thousands of bytes.
        region = Region(lambda m: args.compute_ms * 1e3 / m, args.transfer_ms * 1e6, add_us=lambda m: 0.0)
        return simple_machine(bandwidth_GBps=1.0), region, asked, units
    missing = [name for name in ("m", "k", "n", "machine") if getattr(args, name) is None]
    if missing:
        raise OptionError(f"a region by shape also needs {', '.join('--' + name for name in missing)}")
    machine = find_machine(args.machine)
    try:
        dtype, ranks = dtype_name(args.dtype), args.ranks
    except MachineError as error:
        raise OptionError.wrong("--dtype", f"one of {', '.join(DTYPE_BYTES)}", args.dtype) from error
    blocks = kind.blocks(ranks)
    rows = args.m // blocks
    allowed = tuple(m for m in asked if m <= rows)
    if not allowed or args.m % blocks:
        raise OptionError.wrong(
            "--m", f"a multiple of the {blocks} ranks, with {min(asked)} rows a rank or more", args.m
        )
    columns = max(args.k, args.n) if kind is Kind.CHAIN else args.k if kind.arrives_first else args.n
    region = Region(
        lambda m: machine.matmul_us(-(-rows // m), args.k, args.n, dtype),
        rows * columns * DTYPE_BYTES[dtype],
        whole_compute_us=machine.matmul_us(args.m, args.k, args.n, dtype),
    )
    return machine, region, allowed, units and min(units, rows)


def _simulated(kind: Kind, machine: Machine, schedule: Schedule, region: Region) -> Simulation:
    return simulate(schedule, machine, region.cost(kind, machine, schedule.slices_per_rank, in_pieces=True), spans=True)


def _figures(choice: Choice) -> dict[str, object]:
    best = choice.best if choice.rewrite else None
    return {
        "schedule": best.schedule.family if best else "plain",
        "slices_per_rank": best.schedule.slices_per_rank if best else 1,
        "predicted_ms": choice.predicted_us / 1e3,
        "serial_ms": choice.plain_us / 1e3,
        "sliced_ms": choice.sliced_us / 1e3,
        "bound_ms": choice.bound.us / 1e3,
        "hidden_fraction": choice.hidden_fraction,
    }


def _text(args: argparse.Namespace, kind: Kind, machine: Machine, region: Region, choice: Choice) -> str:
    lines = [f"{kind} over {args.ranks} ranks on machine {machine.name} ({machine.source})", ""]
    best = choice.best
    rows = [
        ("plain: compute and collective one after the other", choice.plain_us),
        (f"overlap in {args.chunks} chunks, the last one exposed, if cutting cost nothing", choice.sliced_us),
    ]
    rows += [(f"schedule {candidate.name}", candidate.predicted_us) for candidate in choice.candidates]
    rows.append((f"lower bound: {choice.bound.why}", choice.bound.us))
    width = max(len(what) for what, _ in rows)
    for what, us in rows:
        chosen = (best is not None and what == f"schedule {best.name}") if choice.rewrite else what.startswith("plain")
        lines.append(f"  {what:{width}}  {us / 1e3:10.4f} ms{'  <- chosen' if chosen else ''}")
    lines += ["", f"why: {choice.reason}"]
    if best is None:
        return "\n".join(lines) + "\n"
    lines += [f"{best.name} is {best.certificate}"]
    schedule = best.schedule
    lines += [*_formula(kind, machine, schedule, region), ""]
    if schedule.ranks * len(schedule.computed_by(0)) <= DRAWN_SLICES:
        simulation = _simulated(kind, machine, schedule, region)
        lines.append(f"time of each rank, 0 to {simulation.makespan_us / 1e3:.4g} ms:")
        lines.append(bars(simulation, ranks=DRAWN_RANKS))
    lines += [text_timeline(schedule, rank) for rank in _drawn(args, schedule)]
    if schedule.ranks > DRAWN_RANKS:
        lines.append(
            f"(the first {DRAWN_RANKS} of {schedule.ranks} ranks; --rank, --trace and --svg show the others)\n"
        )
    return "\n".join(lines)


def _formula(kind: Kind, machine: Machine, schedule: Schedule, region: Region) -> list[str]:
    """The closed form of the chosen schedule, where it has one: what its time is made of, in microseconds."""
    from ..schedule import closed_form  # sympy takes its time to import: only for those who read the text

    cost = region.cost(kind, machine, schedule.slices_per_rank)
    values = closed_form.values_for(kind, machine, schedule.ranks, schedule.slices_per_rank, cost)
    form = closed_form.closed_form(kind, schedule.family)
    contended = machine.compute_slowdown > 1 or machine.transfer_slowdown > 1
    if values is None or form is None:
        return []
    exposed = kind in closed_form.EXPOSED
    if contended and (exposed or schedule.slices_per_rank > 1):
        return []
    if not contended and not closed_form.evaluate(form.valid, values):
        return []
    makespan = closed_form.contended_makespan(kind) if contended else form.makespan
    makespan = closed_form.simplified(makespan, values)
    used = sorted((symbol for symbol in values if symbol in makespan.free_symbols), key=str)
    lines = [
        f"closed form: {makespan}",
        "       with " + ", ".join(f"{symbol} = {values[symbol]:.6g}" for symbol in used)
        + f": {closed_form.evaluate(makespan, values) / 1e3:.4f} ms",
    ]  # fmt: skip
    if not contended and not exposed:
        holds = "holds" if closed_form.evaluate(form.hidden, values) else "does not hold"
        lines.append(
            f"all hidden if t_l + t_b <= m t_c and t_l + (N - 1) m t_b <= (N m - 1) t_c, overheads aside: {holds}"
        )
    return lines


def _drawn(args: argparse.Namespace, schedule: Schedule) -> range:
    if args.rank is None:
        return range(min(schedule.ranks, DRAWN_RANKS if schedule.slices <= 64 else 1))
    return range(args.rank, args.rank + 1)


def _words(kind: Kind) -> str:
    return " ".join(map(str, slices_to_try(kind)))


def _argument(read: Callable[[str], float], fits: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    """The type of an argument: a number that `fits`."""

    def convert(text: str) -> float:
        try:
            value = read(text)
        except ValueError:
            value = nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return convert


_positive = _argument(int, lambda value: value >= 1, "a whole number of at least 1")
_time = _argument(float, lambda value: 0 <= value < inf, "a finite number of at least 0")
_share = _argument(float, lambda value: 0 <= value < 1, "a number of at least 0 and below 1")
