"""A race checker for plans of streams: is every access ordered, is memory reused too early, does every stream join?

A plan is data: the launches in the order in which the host issues them, each with its stream, the events that it runs
behind, the event that it records, and the buffers that it reads, writes or only holds (it names them, so that they live
until then). Launches on one stream run in order; between streams only events do.

Buffers are memory of the caller's stream: a buffer comes into being where it is first named, and behind the launch that
names it last its memory goes to whoever asks next *on the caller's stream*.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from ..errors import RewriteError
from ..runtime.streams import CALLER, NO_EVENT


@dataclass(frozen=True)
class Launch:
    """One launch. `after` may hold CALLER: all that the caller's stream holds when this is issued."""

    name: str
    stream: int = CALLER
    after: tuple[int, ...] = ()
    event: int = NO_EVENT
    reads: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset()
    holds: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return self.reads | self.writes | self.holds


Plan = tuple[Launch, ...]
_Clock = Counter[int]  # stream -> how many of its launches are known to be over


@dataclass(frozen=True)
class _Access:
    launch: Launch
    position: int  # on its stream
    writes: bool

    def is_over(self, clock: _Clock) -> bool:
        return clock[self.launch.stream] >= self.position


def find_races(plan: Plan) -> list[str]:
    """What is wrong with a plan, a sentence each; empty where nothing is.

    - an access is not ordered behind an earlier one of the same buffer, and one of the two writes
    - a buffer is named for the last time while a side stream may still use it
    - a side stream writes to a buffer before its memory is free on the caller's stream
    - an event is waited for before it is recorded
    - a side stream starts without the caller's stream (a CUDA graph would not capture it), or is not joined in the end
    """
    found: list[str] = []
    clocks: dict[int, _Clock] = defaultdict(Counter)
    events: dict[int, _Clock] = {}
    accesses: dict[str, list[_Access]] = defaultdict(list)
    born: dict[str, int] = {}  # buffer -> launches on the caller's stream before it came into being
    last = {buffer: index for index, launch in enumerate(plan) for buffer in launch.names}
    for index, launch in enumerate(plan):
        clock, caller = clocks[launch.stream], clocks[CALLER]
        for event in launch.after:
            if event != CALLER and event not in events:
                found.append(f"{launch.name} waits for event {event}, which is not recorded yet")
            clock |= caller if event == CALLER else events.get(event, Counter())
        if launch.stream != CALLER and not clock[launch.stream] and not launch.after:
            found.append(f"stream {launch.stream} starts with {launch.name} and is not forked from the caller's stream")
        clock[launch.stream] += 1
        clocks[launch.stream] = clock
        if launch.event != NO_EVENT:
            events[launch.event] = clock.copy()
        for buffer in sorted(launch.names):
            born.setdefault(buffer, caller[CALLER] - (launch.stream == CALLER))
        for buffer in sorted(launch.reads | launch.writes):
            access = _Access(launch, clock[launch.stream], buffer in launch.writes)
            if clock[CALLER] < born[buffer]:
                found.append(f"{launch.name} uses {buffer} before its memory is free on the caller's stream")
            found += [
                f"{launch.name} {_verb(access)} {buffer} while {other.launch.name} may still {_verb(other)[:-1]} it"
                for other in accesses[buffer]
                if (access.writes or other.writes) and not other.is_over(clock)
            ]
            accesses[buffer].append(access)
        for buffer in sorted(name for name in launch.names if last[name] == index):
            found += [
                f"{buffer} is named last by {launch.name}, while {access.launch.name} may still use it"
                for access in accesses[buffer]
                if not access.is_over(clocks[CALLER])
            ]
    for stream, clock in clocks.items():
        if clocks[CALLER][stream] < clock[stream]:
            found.append(f"stream {stream} is not joined before the graph ends")
    return found


def check_plan(plan: Plan) -> None:
    """Raise RewriteError, with all that is wrong, unless the plan is free of races."""
    if found := find_races(plan):
        raise RewriteError("the streams of a rewritten graph race: " + "; ".join(found))


def _verb(access: _Access) -> str:
    return "writes" if access.writes else "reads"
