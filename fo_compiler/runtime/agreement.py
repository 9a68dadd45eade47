"""Ranks that came to different decisions must not hang: they compare before a graph first runs.

A compile sends nothing, so ranks may differ unnoticed: another option, another machine file, another shape, code from a
cache that the others do not have. The first time that a compiled graph runs in a process, its decisions for each
process group are compared through the group's store: a few small keys, once a graph, in bounded time.

Each rank numbers the graphs that it runs first in a group; no rank goes on before all have agreed, so all ranks of a
group share one history. The keys of a group:

    <number>/here/<rank>  the decisions of a rank that has come
    <number>/first        those of the rank that came first; every other rank compares its own with them
    <number>/differ       set by a rank whose decisions are others
    <number>/count        how many ranks came
    <number>/end          why nobody waits any longer: "all" came, or what went wrong on the rank that says so
    failed/<rank>         the failure of a rank, in a line

The store also answers, when a transfer fails, what the other ranks are at: `situation`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import AgreementError, DecisionsDifferError
from ..records import GraphRecords, Record, payload_key

Decisions = list[list[str]]
ALL = "all"
LOOK_S = 5.0  # how long a rank that has failed may look at a store that may be gone, too


class Board(Protocol):
    """What ranks of one group share: a few keys. `torch.distributed.Store` has these methods."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one process group meet, and how long they wait for each other."""

    group_name: str
    board: Board
    rank: int
    ranks: int
    timeout_s: float

    def who(self, key: str) -> list[int]:
        """The ranks for which `key` + their number is set."""
        return [rank for rank in range(self.ranks) if self.board.check([f"{key}/{rank}"])]

    def wait(self, key: str) -> str | None:
        """The value of a key as soon as it is set; None if that takes longer than the time-out."""
        deadline, pause = time.monotonic() + self.timeout_s, 0.001
        while not self.board.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return self.board.get(key).decode()


class Meetings(Protocol):
    """The part of a transport that ranks need to agree."""

    def meeting(self, group_name: str) -> Meeting | None: ...


class Agreements:
    """Which graphs have been agreed on in which group: one a process, or one a rank of a local world."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[str, ...]] = {}  # key of a graph -> groups of its transfers, once all agreed
        self._refused: dict[tuple[str, str], AgreementError] = {}  # group, decisions -> what came of it
        self._history: dict[str, list[Decisions]] = defaultdict(list)  # group -> graphs by number, from 1
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def before_run(self, meetings: Meetings, payload: str) -> tuple[str, ...]:
        """The groups in which a graph that is about to run has transfers.

        Compares ranks if it is the first time; raises AgreementError.
        """
        key = payload_key(payload)
        groups = self._groups.get(key)
        if groups is None:
            graph = GraphRecords.from_payload(payload)
            by_group = groups_of(graph)
            if graph.agreement != "off":
                for group_name, records in by_group.items():
                    self.agree(meetings, group_name, decisions(records))
            groups = tuple(name for name, records in by_group.items() if any(record.rewritten for record in records))
            self._groups[key] = groups
        return groups

    def agreed(self, payload: str) -> tuple[str, ...] | None:
        """What `before_run` has returned for a graph; None if it has not been asked."""
        return self._groups.get(payload_key(payload))

    def agree(self, meetings: Meetings, group_name: str, mine: Decisions) -> None:
        """Compare decisions with the other ranks, unless they have been; raises AgreementError on all ranks."""
        with self._locks[group_name]:
            history, refused = self._history[group_name], self._refused.get((group_name, json.dumps(mine)))
            if refused is not None:
                raise refused
            if mine in history:
                return
            meeting = meetings.meeting(group_name)
            if meeting is None:  # there are no other ranks
                return
            try:
                compare(meeting, len(history) + 1, mine, history)
            except AgreementError as error:
                self._refused[group_name, json.dumps(mine)] = error
                raise
            finally:
                history.append(mine)

    def report_failure(self, meetings: Meetings, group_name: str, what: str) -> str:
        """Tell the ranks of all groups that this one has failed; returns what is known of the others in `group_name`.

        Takes no longer than a few seconds, also where the store is gone.
        """

        def look() -> str:
            found = ""
            for name, history in list(self._history.items()) or [(group_name, [])]:
                meeting = meetings.meeting(name)
                if meeting is None:
                    continue
                if name == group_name:
                    found = situation(meeting, len(history), history)
                line = f"rank {meeting.rank} failed: {what}"
                meeting.board.set(f"failed/{meeting.rank}", line)
                meeting.board.compare_set(f"{len(history) + 1}/end", "", line)
            return found

        return bounded(look, LOOK_S) or "Nothing is known of the other ranks: the store of the group does not answer."


def bounded(look: Callable[[], str], seconds: float) -> str | None:
    """What `look` finds within so many seconds, or None: a store may hang, or be gone with the rank that had it."""
    found: list[str] = []

    def body() -> None:
        try:
            found.append(look())
        except Exception:  # of each kind of store; a failure is being reported already
            return

    thread = threading.Thread(target=body, name="fo_compiler looks at the store", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def groups_of(graph: GraphRecords) -> dict[str, list[Record]]:
    """The records of each process group of more than one rank."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in graph.records:
        if record.group and record.group_size > 1:
            groups[record.group].append(record)
    return groups


def decisions(records: Sequence[Record]) -> Decisions:
    """What has to be equal on all ranks of a group, one row a collective.

    No names of nodes: what one rank computes besides, or with another group, gives the same nodes other names there.
    """
    return [
        [
            f"{record.graph} {record.collective.partition(' ')[0]} {number}",
            f"tensor {record.tensor or 'unknown'}",
            f"schedule {record.schedule or 'left alone'}",
            f"{len(record.region)} matmuls",
        ]
        for number, record in enumerate(records, 1)
    ]


def compare(meeting: Meeting, number: int, mine: Decisions, history: Sequence[Decisions]) -> None:
    """Compare decisions with all ranks of a group, about a graph that `history` does not have.

    Raises DecisionsDifferError on every rank if one differs, AgreementError on those that came if one stays away.
    """
    try:
        _compare(meeting, number, mine, history)
    except AgreementError:
        raise
    except RuntimeError as error:  # of each kind of store
        raise AgreementError(
            f"{_about(meeting, number, mine)} cannot be compared with the other ranks: the store of the process group "
            f"failed ({_line(error)}). The rank that holds the store may be gone: look at the first error among the ranks."
        ) from error


def _compare(meeting: Meeting, number: int, mine: Decisions, history: Sequence[Decisions]) -> None:
    board, rank = meeting.board, meeting.rank
    text = json.dumps(mine)
    if board.compare_set(f"{number}/first", "", text).decode() != text:
        board.set(f"{number}/differ", "1")
    board.set(f"{number}/here/{rank}", text)
    if board.add(f"{number}/count", 1) == meeting.ranks:
        board.compare_set(f"{number}/end", "", ALL)
    end = meeting.wait(f"{number}/end")
    if end is None:
        end = f"rank {rank} waited {meeting.timeout_s:g} s, the time-out of the group"
        end = board.compare_set(f"{number}/end", "", end).decode()
    if end != ALL:
        present = meeting.who(f"{number}/here")
        missing = sorted(set(range(meeting.ranks)) - set(present))
        raise AgreementError(
            f"{_about(meeting, number, mine)} does not run: {end}. "
            + (f"Ranks {missing} of the group did not come to run it. " if missing else "")
            + _against(mine, history)
            + " They run an older graph (another shape, a recompile on some ranks only), still compile, or are gone. "
            "Make shapes, options and recompiles the same on all ranks."
        )
    if board.check([f"{number}/differ"]):
        by_rank = [board.get(f"{number}/here/{r}").decode() for r in range(meeting.ranks)]
        raise DecisionsDifferError(f"{_about(meeting, number, mine)} does not run: {_differences(by_rank)}")


def situation(meeting: Meeting, number: int, history: Sequence[Decisions]) -> str:
    """What the store says of the other ranks, to one that has come as far as graph `number` and cannot go on."""
    lines = []
    following = f"{number + 1}/here"
    waiting = [rank for rank in meeting.who(following) if rank != meeting.rank]
    if waiting:
        theirs: Decisions = json.loads(meeting.board.get(f"{following}/{waiting[0]}"))
        lines.append(
            f"Ranks {waiting} wait to run graph {number + 1} of the group, {_brief(theirs)}, to which this rank has not "
            f"come. {_against(theirs, history)}"
        )
    for rank in meeting.who("failed"):
        if rank != meeting.rank:
            lines.append(f"Before that, {meeting.board.get(f'failed/{rank}').decode()}.")
    return " ".join(lines) or "No other rank has reported a failure or waits to run another graph."


def _about(meeting: Meeting, number: int, mine: Decisions) -> str:
    return f"rank {meeting.rank} of group {meeting.group_name!r}: graph {number} of the group, {_brief(mine)},"


def _brief(rows: Decisions) -> str:
    name, *rest = rows[0]
    more = f" and {len(rows) - 1} more collectives" if len(rows) > 1 else ""
    return f"{name} ({', '.join(rest)}){more}"


def _against(rows: Decisions, history: Sequence[Decisions]) -> str:
    """How a graph differs from the one of the group's history that is closest to it."""
    if not history:
        return "It is the first graph of the group."
    number, closest = min(enumerate(history, 1), key=lambda item: len(list(_changes(item[1], rows))))
    changes = list(_changes(closest, rows))
    if not changes:
        return f"It decides as graph {number} of the group."
    more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
    return f"From graph {number}, the closest that all ranks know, it differs in: {'; '.join(changes[:3])}{more}."


def _changes(reference: Decisions, rows: Decisions) -> Iterable[str]:
    """What differs, a line a collective."""
    if len(rows) != len(reference):
        yield f"{len(rows)} collectives, not {len(reference)}"
    for want, got in zip(reference, rows, strict=False):
        if want != got:
            yield f"{got[0]}: {', '.join(f'{g} (not {w})' for w, g in zip(want, got, strict=True) if w != g)}"


def _differences(by_rank: Sequence[str]) -> str:
    usual, _ = Counter(by_rank).most_common(1)[0]
    agreeing = [rank for rank, text in enumerate(by_rank) if text == usual]
    lines = [f"ranks of the group decided differently. Ranks {agreeing} agree; against them:"]
    for rank, text in enumerate(by_rank):
        changes = list(_changes(json.loads(usual), json.loads(text)))
        lines += [f"  rank {rank}: {change}" for change in changes[:3]]
        if len(changes) > 3:
            lines.append(f"  rank {rank}: and {len(changes) - 3} more")
    lines.append(
        "Give all ranks the same options, machine file and shapes, and clear a compile cache that is not shared."
    )
    return "\n".join(lines)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
