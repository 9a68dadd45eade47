"""Ranks that came to different decisions must not hang: they compare before a graph first runs.

A compile sends nothing, so ranks may differ unnoticed: another option, another machine file, another shape, code from a
cache that the others do not have. The first time that a compiled graph runs in a process, its decisions for each
process group are compared through the group's store: a few small keys, once a graph, in bounded time.

Each rank numbers the graphs that it runs first in a group. Under the number:

    first      the decisions of the rank that came first; every other rank compares its own with them
    <rank>     the decisions of a rank that differs from the first
    count      how many ranks came; the last one sets `done`, which all wait for
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from ..errors import AgreementError
from ..records import GraphRecords, Record


class Board(Protocol):
    """What ranks of one group share: a few keys. `torch.distributed.Store` has these methods."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


class Agreements:
    """Which graphs have been compared, and how many in each group: one a process, or one a rank of a local world."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._graphs: dict[str, int] = defaultdict(int)

    def is_new(self, key: str) -> bool:
        """Whether a graph is about to run for the first time; says so once."""
        with self._lock:
            if key in self._seen:
                return False
            self._seen.add(key)
            return True

    def next_number(self, group_name: str) -> int:
        with self._lock:
            self._graphs[group_name] += 1
            return self._graphs[group_name]


def groups_of(graph: GraphRecords) -> dict[str, list[Record]]:
    """The records of each process group of more than one rank."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in graph.records:
        if record.group and record.group_size > 1:
            groups[record.group].append(record)
    return groups


def decisions(records: Sequence[Record]) -> list[list[str]]:
    """What has to be equal on all ranks of a group, one row a collective."""
    return [
        [
            f"{record.graph} {record.collective}",
            f"tensor {record.tensor or 'unknown'}",
            f"schedule {record.schedule or 'left alone'}",
            f"matmuls {', '.join(record.region) or 'none'}",
        ]
        for record in records
    ]


def compare(board: Board, number: int, rank: int, ranks: int, mine: list[list[str]], wait: Waiter) -> None:
    """Compare decisions with all ranks of a group; raises AgreementError on every rank if one differs or stays away."""
    text = json.dumps(mine)
    first = board.compare_set(f"{number}/first", "", text).decode()
    if first != text:
        board.set(f"{number}/{rank}", text)
    board.set(f"{number}/here/{rank}", "1")
    if board.add(f"{number}/count", 1) == ranks:
        board.set(f"{number}/done", "1")
    elif not wait(f"{number}/done"):
        missing = [r for r in range(ranks) if not board.check([f"{number}/here/{r}"])]
        raise AgreementError(
            f"ranks {missing} of the group did not come to run graph {number} of this group in time; rank {rank} "
            f"waits with {_brief(mine)}. They run an older graph (another shape, a recompile on some ranks only), still "
            "compile, or are gone. Make shapes, options and recompiles the same on all ranks."
        )
    others = {r: board.get(f"{number}/{r}").decode() for r in range(ranks) if board.check([f"{number}/{r}"])}
    if others:
        raise AgreementError(_differences(first, others, ranks))


class Waiter(Protocol):
    """Wait for a key in bounded time; says whether it came."""

    def __call__(self, key: str) -> bool: ...


def _brief(rows: list[list[str]]) -> str:
    name, *rest = rows[0]
    more = f" and {len(rows) - 1} more collectives" if len(rows) > 1 else ""
    return f"{name} ({', '.join(rest)}){more}"


def _differences(first: str, others: dict[int, str], ranks: int) -> str:
    agreeing = [rank for rank in range(ranks) if rank not in others]
    reference: list[list[str]] = json.loads(first)
    lines = [
        f"ranks of the group decided differently, so none of them runs this graph. Ranks {agreeing}, and the others:"
    ]
    for rank, text in others.items():
        rows: list[list[str]] = json.loads(text)
        if len(rows) != len(reference):
            lines.append(f"  rank {rank}: {len(rows)} collectives, the others have {len(reference)}")
        differing = [(want, got) for want, got in zip(reference, rows, strict=False) if want != got]
        for want, got in differing[:3]:
            changed = [f"{g} (others: {w})" for w, g in zip(want, got, strict=True) if w != g]
            lines.append(f"  rank {rank}: {got[0]}: {'; '.join(changed)}")
        if len(differing) > 3:
            lines.append(f"  rank {rank}: and {len(differing) - 3} more")
    lines.append(
        "Give all ranks the same options, machine file and shapes, and clear a compile cache that is not shared."
    )
    return "\n".join(lines)
