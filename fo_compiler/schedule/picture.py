"""A simulated schedule as a Chrome trace (opens in Perfetto), as an SVG picture and as bars of text."""

from __future__ import annotations

from html import escape
from typing import Any

from .engine import Span
from .ir import Schedule, Stream
from .simulate import Simulation


def lanes(simulation: Simulation) -> dict[int, list[tuple[str, list[Span]]]]:
    """For each rank its streams as rows of spans that do not overlap: compute, then sends, then receives.

    Transfers that are in flight at one time get rows of their own (`send`, `send 2`, ...).
    """
    ranks = len(simulation.finish_us)
    rows: dict[int, list[tuple[str, list[Span]]]] = {}
    for rank in range(ranks):
        mine = [span for span in simulation.spans if span.rank == rank]
        rows[rank] = [("compute", sorted(_of(mine, Stream.COMPUTE, ""), key=lambda s: s.start_us))]
        for what in ("send", "recv"):
            free: list[list[Span]] = []
            for span in sorted(_of(mine, Stream.COMM, what), key=lambda s: (s.start_us, s.end_us)):
                row = next((row for row in free if row[-1].end_us <= span.start_us), None)
                if row is None:
                    free.append([span])
                else:
                    row.append(span)
            rows[rank] += [(what if i == 0 else f"{what} {i + 1}", row) for i, row in enumerate(free)]
    return rows


def _of(spans: list[Span], stream: Stream, prefix: str) -> list[Span]:
    return [span for span in spans if span.stream is stream and span.label.startswith(prefix)]


def chrome_trace(schedule: Schedule, simulation: Simulation) -> dict[str, Any]:
    """The Trace Event Format: a process a rank, a thread a stream, complete events with microseconds."""
    events: list[dict[str, Any]] = []

    def name(kind: str, pid: int, tid: int, value: str) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": value}}

    for rank, streams in lanes(simulation).items():
        events.append(name("process_name", rank, 0, f"rank {rank}"))
        for tid, (stream, spans) in enumerate(streams):
            events.append(name("thread_name", rank, tid, stream))
            for span in spans:
                args = {} if span.peer is None else {"peer": span.peer}
                events.append(
                    {
                        "name": span.label, "cat": str(span.stream), "ph": "X", "pid": rank, "tid": tid,
                        "ts": span.start_us, "dur": span.end_us - span.start_us, "args": args,
                    }
                )  # fmt: skip
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"schedule": f"{schedule.kind} {schedule.describe()}", "ranks": schedule.ranks},
    }


_ROW, _GAP, _LEFT, _WIDTH, _TOP = 16, 8, 110, 900, 40
_COLOURS = {"compute": "#4477aa", "add": "#66ccee", "post": "#bbbbbb", "send": "#ccbb44", "recv": "#ee8866"}


def svg(schedule: Schedule, simulation: Simulation, title: str = "") -> str:
    """A drawing: for each rank a row of compute and rows of transfers, to scale."""
    rows = lanes(simulation)
    scale = _WIDTH / simulation.makespan_us if simulation.makespan_us else 0.0
    title = title or f"{schedule.kind}, {schedule.describe()}, {schedule.ranks} ranks"
    body = [f'<text x="8" y="16" font-weight="bold">{escape(title)}</text>']
    body.append(f'<text x="8" y="31">0 to {simulation.makespan_us / 1e3:.4g} ms</text>')
    y = _TOP
    for rank, streams in rows.items():
        for stream, spans in streams:
            body.append(f'<text x="8" y="{y + 12}">rank {rank} {escape(stream)}</text>')
            for span in spans:
                colour = _COLOURS[span.label.split()[0]]
                x, width = _LEFT + span.start_us * scale, max((span.end_us - span.start_us) * scale, 0.5)
                body.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 2}" fill="{colour}" stroke="white">'
                    f"<title>{escape(span.label)}: {span.start_us:.1f} to {span.end_us:.1f} us</title></rect>"
                )
                label = span.label.split(" ", 1)[-1]
                if width > 7 * len(label):
                    body.append(f'<text x="{x + 3:.2f}" y="{y + 12}" fill="white">{escape(label)}</text>')
            y += _ROW
        y += _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{y + 8}" '
        'font-family="monospace" font-size="10">\n' + "\n".join(body) + "\n</svg>\n"
    )


def bars(simulation: Simulation, width: int = 72, ranks: int | None = None) -> str:
    """For each rank a line of compute (`#`) and a line of receives (`=`), to scale; `|` begins a span, blank = idle."""
    lines: list[str] = []
    scale = width / simulation.makespan_us if simulation.makespan_us else 0.0
    for rank in range(len(simulation.finish_us) if ranks is None else min(ranks, len(simulation.finish_us))):
        compute, receive = [" "] * width, [" "] * width
        for span in simulation.spans:
            if span.rank != rank or span.label.startswith("send"):
                continue
            row, fill = (compute, "#") if span.stream is Stream.COMPUTE else (receive, "=")
            first, end = (
                int(span.start_us * scale),
                max(int(span.end_us * scale), int(span.start_us * scale) + 1),
            )
            for at in range(min(first, width - 1), min(end, width)):
                row[at] = fill
            if end - first > 2:  # a mark on each span would be all that is seen of shorter ones
                row[min(first, width - 1)] = "|"
        lines.append(f"  rank {rank:<3} compute {''.join(compute)}")
        lines.append(f"           recv    {''.join(receive)}")
    return "\n".join(lines) + "\n"
