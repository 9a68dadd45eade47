"""A schedule as text: one line a step, compute beside the transfers that run under it."""

from __future__ import annotations

from .ir import Add, Compute, Kind, Post, Recv, Schedule, Send, Store, Wait

_WHAT = {
    Kind.ALL_GATHER: "slices gathered",
    Kind.REDUCE_SCATTER: "partial sums scattered",
    Kind.ALL_REDUCE: "partial sums reduced",
    Kind.ALL_TO_ALL: "slices exchanged",
    Kind.ALL_TO_ALL_OUT: "results exchanged",
    Kind.ALL_GATHER_OUT: "results gathered",
    Kind.CHAIN: "slices gathered and their sums scattered",
}


SHOWN = 8  # transfers in a row


def _newest(transfers: list[str]) -> str:
    """The transfers in flight, of many the newest."""
    earlier = len(transfers) - SHOWN
    return "; ".join([f"{earlier} earlier"] * (earlier > 0) + transfers[-SHOWN:]) or "-"


def text_timeline(schedule: Schedule, rank: int) -> str:
    """Draw the program of `rank`. A row is a compute step; the right column is what is in flight meanwhile."""

    def name(of: Send | Recv | Compute | Add | Store) -> str:
        return schedule.slice_name(of.slice, rank, of.count)

    def transfer(post: Post) -> str:
        what = "sum " if post.sums else ""
        sent = f"send {what}{name(post.send)} -> rank {post.send.peer}" if post.send else ""
        received = f"recv {what}{name(post.recv)} <- rank {post.recv.peer}" if post.recv else ""
        return ", ".join(filter(None, (sent, received)))

    rows: list[tuple[str, str]] = []
    in_flight: dict[int, str] = {}
    at_the_end: list[str] = []  # what no compute hides
    notes: list[str] = []
    for action in schedule.program(rank):
        match action:
            case Post(step):
                in_flight[step] = transfer(action)
                at_the_end.append(f"[{step}] {in_flight[step]}")
            case Wait(step):
                notes.append(f"wait {step}")
                in_flight.pop(step, None)
            case Add():
                notes.append(f"add to {name(action)}")
            case Store():
                notes.append(f"store {name(action)}")
            case Compute():
                flying = [f"[{step}] {what}" for step, what in in_flight.items()]
                rows.append((" ".join([*notes, f"compute {name(action)}"]), _newest(flying)))
                notes, at_the_end = [], []
    if notes:
        rows.append((" ".join(notes), _newest(at_the_end)))
    width = max(len("compute stream"), *(len(left) for left, _ in rows))
    count = len(schedule.computed_by(rank))
    lines = [
        f"{schedule.kind}, {schedule.describe()}, rank {rank} of {schedule.ranks}: {count} {_WHAT[schedule.kind]} (* own)",
        f"  {'compute stream':{width}}  | in flight meanwhile",
        *(f"  {left:{width}}  | {right}" for left, right in rows),
    ]
    return "\n".join(lines) + "\n"
