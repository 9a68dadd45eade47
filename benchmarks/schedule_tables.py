"""The tables and pictures of docs/scheduling.md, computed by the scheduler itself.

python benchmarks/schedule_tables.py                      print all tables
python benchmarks/schedule_tables.py --write docs         replace the tables in docs/scheduling.md, draw docs/figures/
python benchmarks/schedule_tables.py --ranks 2 4 8        smaller groups only (seconds instead of a minute)
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil
from pathlib import Path

from fo_compiler.schedule import COLLECTIVES, Kind, Post, Schedule, build
from fo_compiler.schedule.choose import Choice, Region, choose
from fo_compiler.schedule.machine import Machine, simple_machine
from fo_compiler.schedule.network import Matrix, TwoLevel, Uniform
from fo_compiler.schedule.picture import svg
from fo_compiler.schedule.presets import PRESETS
from fo_compiler.schedule.simulate import RegionCost, simulate

# The region of the tables: 10 ms of compute; its gathered tensor takes 6 ms over one port.
COMPUTE_US = 10e3
TENSOR_BYTES = 60e6
PORT = Uniform(latency_us=10.0, bandwidth_GBps=10.0)
LAUNCH_US = 2.0  # for each slice

Table = list[list[str]]


def machines(ranks: int) -> dict[str, Machine]:
    """The same group of ranks on four networks."""
    slow_link = tuple(
        tuple(PORT.bandwidth_GBps / (5 if {a, b} == {1, 2} else 1) for b in range(ranks)) for a in range(ranks)
    )
    latency = ((PORT.latency_us,) * ranks,) * ranks
    scales = (1.0, 1.5) + (1.0,) * (ranks - 2)
    across = replace(PORT, bandwidth_GBps=PORT.bandwidth_GBps / 4, latency_us=20.0)
    return {
        "uniform": simple_machine("uniform", network=PORT),
        "two nodes": simple_machine("two nodes", network=TwoLevel(max(1, ranks // 2), PORT, across)),
        "one slow link": simple_machine("one slow link", network=Matrix(latency, slow_link)),
        "one slow rank": simple_machine("one slow rank", network=PORT, compute_scale=scales),
    }


def region(ranks: int) -> Region:
    return Region(
        lambda m: COMPUTE_US / ranks / m + LAUNCH_US,
        TENSOR_BYTES / ranks,
        whole_compute_us=COMPUTE_US + LAUNCH_US,
        add_us=lambda m: 0.0,
    )


def ms(us: float) -> str:
    return f"{us / 1e3:.2f}"


def row(choice: Choice, ring_us: float) -> list[str]:
    best = choice.best
    assert best is not None
    above = best.predicted_us / choice.bound.us - 1
    return [
        ms(choice.plain_us), ms(choice.sliced_us), ms(ring_us), best.name, ms(best.predicted_us), ms(choice.bound.us),
        f"{above:.1%}",
    ]  # fmt: skip


def groups_table(kind: Kind, sizes: Sequence[int]) -> Table:
    """Serial, sliced, ring, chosen and bound for groups of several sizes on four networks."""
    table = [["machine", "N", "serial", "sliced", "ring", "chosen", "ms", "bound", "above bound"]]
    for name in machines(2):
        for ranks in sizes:
            machine = machines(ranks)[name]
            choice = choose(kind, machine, ranks, region(ranks))
            ring = simulate(build(kind, "ring", ranks), machine, region(ranks).cost(kind, machine, 1)).makespan_us
            table.append([name, str(ranks), *row(choice, ring)])
    return table


def kinds_table(ranks: int) -> Table:
    """Every kind on every network, for one size of group."""
    table = [["kind", "machine", "serial", "chosen", "ms", "bound", "above bound"]]
    for kind in COLLECTIVES:
        for name, machine in machines(ranks).items():
            choice = choose(kind, machine, ranks, region(ranks))
            serial, _, _, *rest = row(choice, 0.0)
            table.append([str(kind), name, serial, *rest])
    return table


def paper_table() -> Table:
    """Table 1 of the paper (MLP, tensor parallel over 4 ranks) and the rule that goes with it."""
    ranks, compute_us, communication_us = 4, 78.5e3, 43.8e3
    choice = choose(
        Kind.ALL_GATHER,
        simple_machine(),
        ranks,
        Region(lambda m: compute_us / ranks / m, communication_us / (ranks - 1) * 1e3),
    )
    table = [["", "paper, measured (ms)", "predicted (ms)"]]
    table.append(["serial", "122.3", ms(choice.plain_us)])
    table.append(["sliced (k = 8)", "83.9", ms(choice.sliced_us)])
    table.append(["schedule", "77.1", ms(choice.predicted_us)])
    table.append(["lower bound", "", ms(choice.bound.us)])
    return table


def rule_table() -> Table:
    """Exposed time beside the paper's limit T_comm <= T_comp (N - 1) / N."""
    table = [["N", "T_comm / T_comp", "limit", "exposed, m = 1 (ms)", "exposed, m = 4 (ms)"]]
    for ranks in (2, 4, 8):
        for share in (0.4, 0.7, 0.87, 0.95, 1.2):
            exposed = []
            for m in (1, 4):
                cost = RegionCost(COMPUTE_US / ranks / m, share * COMPUTE_US / (ranks - 1) / m * 1e3)
                exposed.append(
                    ms(simulate(build(Kind.ALL_GATHER, "ring", ranks, m), simple_machine(), cost).exposed_us)
                )
            table.append([str(ranks), f"{share:.2f}", f"{(ranks - 1) / ranks:.3f}", *exposed])
    return table


def all_at_once(schedule: Schedule) -> Schedule:
    """The same transfers, all posted before the first compute."""
    assert schedule.relative is not None
    posts = [action for action in schedule.relative if isinstance(action, Post)]
    rest = [action for action in schedule.relative if not isinstance(action, Post)]
    return replace(schedule, relative=(*posts, *rest))


def sockets_table() -> Table:
    """Times on real sockets (network namespaces, each uplink limited; compute a timed sleep) beside the simulator's.

    Fitted from two of the measurements: compute alone took 25.25 ms a slice; a message of 2 MB took 19 ms, so with TCP, IP and
    Ethernet headers (1448 bytes of 1538 are payload) 2 ms are latency. At N = 8 the bytes follow from the serial time.
    """
    payload, latency_us, compute_us = 1448 / 1538, 2.0e3, 25.25e3
    of_8_ranks = (122e3 / 7 - latency_us) * 62.5 * payload
    measured = {
        (4, 0.125, 2e6): {"ring": 103.0, "direct": 103.6, "direct, all at once": 123.0},
        (4, 0.125, 3e6): {"ring": 113.0, "direct": 110.6, "direct, all at once": 152.0},
        (8, 0.0625, of_8_ranks): {"ring": 206.0, "direct, all at once": 290.0},
    }
    table = [["N", "link", "bytes a slice", "schedule", "measured (ms)", "simulated (ms)"]]
    for (ranks, GBps, size_bytes), times in measured.items():
        machine = simple_machine(bandwidth_GBps=GBps * payload, latency_us=latency_us)
        direct = build(Kind.ALL_GATHER, "direct", ranks)
        schedules = {
            "ring": build(Kind.ALL_GATHER, "ring", ranks), "direct": direct, "direct, all at once": all_at_once(direct)
        }  # fmt: skip
        for name, time_ms in times.items():
            simulated = simulate(schedules[name], machine, RegionCost(compute_us, size_bytes)).makespan_us
            link = f"{GBps * 8:g} Gbit/s"
            table.append(
                [str(ranks), link, f"{size_bytes / 1e6:.2g} MB", name, f"{time_ms:g}", f"{simulated / 1e3:.1f}"]
            )
    return table


def slices_table() -> Table:
    """How many slices a rank: fine enough to hide, coarse enough for the kernels. H100, [8192, 8192] @ [8192, N]."""
    table = [["machine", "ranks", "m = 1", "m = 2", "m = 4", "m = 8", "plain", "bound"]]
    for name in ("h100-nvlink", "h100-pcie5", "h100-infiniband"):
        machine = PRESETS[name]
        for ranks in (4, 8):

            def compute(m: int | Fraction, machine: Machine = machine, ranks: int = ranks) -> float:
                return machine.matmul_us(ceil(8192 // ranks / m), 8192, 8192 // ranks)

            times = []
            for m in (1, 2, 4, 8):
                cost = RegionCost(compute(m), 8192 // ranks * 8192 * 2 / m)
                times.append(ms(simulate(build(Kind.ALL_GATHER, "ring", ranks, m), machine, cost).makespan_us))
            whole = machine.matmul_us(8192, 8192, 8192 // ranks)
            choice = choose(
                Kind.ALL_GATHER, machine, ranks, Region(compute, 8192 // ranks * 8192 * 2, whole_compute_us=whole)
            )
            table.append([name, str(ranks), *times, ms(choice.plain_us), ms(choice.bound.us)])
    return table


def pieces_table() -> Table:
    """Pieces that shrink beside slices of one size, where a post takes 2 % of the compute of a block."""
    table = [["N", "T_comm / T_comp", "bound (ms)", "equal slices", "ms", "in pieces", "ms"]]
    for ranks in (2, 4, 8):
        block_us = COMPUTE_US / ranks
        machine = simple_machine(post_us=0.02 * block_us)
        for ratio in (0.5, 0.9, 1.0, 1.3, 2.0):
            region = Region(lambda m, us=block_us: us / m, ratio * COMPUTE_US / (ranks - 1) * 1e3)  # type: ignore[misc]
            equal, pieces = (
                choose(Kind.ALL_GATHER, machine, ranks, region, in_pieces=True, units=units) for units in (None, 32)
            )
            best = [(choice.best.name, ms(choice.best.predicted_us)) for choice in (equal, pieces) if choice.best]
            table.append([str(ranks), f"{ratio:.1f}", ms(pieces.bound.us), *best[0], *best[1]])
    return table


def tables(sizes: Sequence[int]) -> dict[str, Callable[[], Table]]:
    return {
        "paper": paper_table,
        "rule": rule_table,
        "sockets": sockets_table,
        "all_gather": lambda: groups_table(Kind.ALL_GATHER, sizes),
        "reduce_scatter": lambda: groups_table(Kind.REDUCE_SCATTER, sizes),
        "kinds": lambda: kinds_table(8),
        "slices": slices_table,
        "pieces": pieces_table,
    }


def markdown(table: Table) -> str:
    head, *rows = table
    lines = ["| " + " | ".join(cells) + " |" for cells in ([*head], ["---"] * len(head), *rows)]
    return "\n".join(lines)


def figures() -> Iterator[tuple[str, str]]:
    gigabit, cost = simple_machine(bandwidth_GBps=0.125), RegionCost(25e3, 2e6)
    direct = build(Kind.ALL_GATHER, "direct", 4)
    for name, schedule, title in (
        ("one_step_ahead", direct, "direct all-gather, each transfer posted one step ahead: 100 ms"),
        ("all_at_once", all_at_once(direct), "the same transfers, all posted at once: they share the port, 123 ms"),
        ("reduce_scatter_ring", build(Kind.REDUCE_SCATTER, "ring", 4), "ring reduce-scatter: the own slice is last"),
    ):
        yield name, svg(schedule, simulate(schedule, gigabit, cost, spans=True), title)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="sizes of groups (even)")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="the folder of scheduling.md")
    args = parser.parse_args(argv)
    page = (args.write / "scheduling.md").read_text() if args.write else ""
    for name, make in tables(args.ranks).items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        text = markdown(make())
        if not args.write:
            print(f"\n## {name}\n\n{text}")
            continue
        page, count = re.subn(
            rf"(<!-- table {name} -->\n).*?(<!-- end -->)",
            lambda found, t=text: f"{found[1]}{t}\n{found[2]}",
            page,
            flags=re.S,
        )
        if count != 1:
            print(f"scheduling.md has no place for the table {name!r}", file=sys.stderr)
            return 1
    if args.write:
        (args.write / "scheduling.md").write_text(page)
        (args.write / "figures").mkdir(exist_ok=True)
        for name, picture in figures():
            (args.write / "figures" / f"{name}.svg").write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
