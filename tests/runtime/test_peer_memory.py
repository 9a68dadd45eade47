"""The copy-engine transport: its protocol explored exhaustively, and its calls against inboxes in memory of this process."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fo_compiler.runtime import peer_memory
from fo_compiler.runtime.peer_memory import SLOTS, CopyEngineTransport, PeerTransfers, free, full
from fo_compiler.schedule import FAMILIES, Kind, Post, build

Step = tuple[Any, ...]


@dataclass
class Recorder:
    """A rank's memory that records what its stream is given: signals, and copies between slots and values.

    A copy is a value here: `slot(...)` answers with a fake tensor that knows where it is.
    """

    rank: int
    stream: list[Step] = field(default_factory=list)

    def slot(self, rank: int, source: int, slot: int, like: Value) -> Place:
        return Place(self, (rank, source, slot))

    def put_signal(self, rank: int, channel: int) -> None:
        self.stream.append(("put", rank, channel))

    def wait_signal(self, rank: int, channel: int) -> None:
        self.stream.append(("wait", rank, channel))


@dataclass
class Place:
    memory: Recorder
    where: tuple[int, int, int]

    def copy_(self, chunk: Value, non_blocking: bool) -> None:
        self.memory.stream.append(("write", self.where, chunk.name))


@dataclass
class Value:
    """A message: its name says what has to arrive. It goes in `chunks` chunks."""

    memory: Recorder
    name: Any
    chunks: int = 1

    def view(self, _: int) -> Value:
        return self

    def element_size(self) -> int:
        return 1

    def split(self, _: int) -> list[Value]:
        return [Value(self.memory, (self.name, index)) for index in range(self.chunks)]

    def copy_(self, place: Place, non_blocking: bool) -> None:
        self.memory.stream.append(("read", place.where, self.name))


def streams(posts: list[list[tuple[int | None, int | None]]], chunks: int) -> list[list[Step]]:
    """What each rank's stream is given for its posts: (to whom, from whom). The n-th message of a pair is named so."""
    made = []
    for rank, program in enumerate(posts):
        memory, count = Recorder(rank), Counter[tuple[int, int]]()
        transfers: Any = PeerTransfers(memory, len(posts))
        for to, source in program:
            named = []
            for pair in ((rank, to), (source, rank)):
                named.append(None if None in pair else (*pair, count[pair]))  # type: ignore[index]
                count[pair] += 1  # type: ignore[index]
            send, recv = named
            transfers.post(
                send and (Value(memory, send, chunks), to),
                recv and (Value(memory, recv, chunks), source),
            )
        made.append(memory.stream)
    return made


def explore(programs: list[list[Step]]) -> int:
    """Run the streams in every order; returns the number of states. Raises AssertionError on a deadlock or a wrong value."""
    start = (tuple(0 for _ in programs), frozenset(), ())
    seen, frontier = {start}, [start]
    while frontier:
        position, signals, slots = frontier.pop()
        ready = False
        for rank, program in enumerate(programs):
            if position[rank] == len(program):
                continue
            after, memory = set(signals), dict(slots)
            kind, where, what = program[position[rank]]
            if kind == "put":
                if (where, rank, what) in after:
                    continue  # the last one was not taken yet
                after.add((where, rank, what))
            elif kind == "wait":
                if (rank, where, what) not in after:
                    continue
                after.remove((rank, where, what))
            elif kind == "write":
                assert where not in memory, f"rank {rank} writes {where} before it was read"
                memory[where] = what
            else:
                assert memory.pop(where, None) == what, f"rank {rank} expected {what} in {where}"
            ready = True
            moved = tuple(p + (r == rank) for r, p in enumerate(position))
            state = (moved, frozenset(after), tuple(sorted(memory.items())))
            if state not in seen:
                seen.add(state)
                frontier.append(state)
        done = all(p == len(program) for p, program in zip(position, programs, strict=True))
        assert ready or done, f"deadlock at {position} with signals {sorted(signals)}"
    return len(seen)


RING = {ranks: [[((r + 1) % ranks, (r - 1) % ranks)] for r in range(ranks)] for ranks in (2, 3)}


@pytest.mark.parametrize(
    ("ranks", "posts", "chunks"), [(2, 1, 1), (2, 3, 1), (2, 5, 1), (2, 1, 3), (2, 2, 2), (3, 1, 1), (3, 2, 1)]
)
def test_a_ring_never_waits_in_a_circle_and_reads_what_was_sent(ranks: int, posts: int, chunks: int) -> None:
    assert explore(streams([program * posts for program in RING[ranks]], chunks)) > 1


@pytest.mark.parametrize("broken", ["no wait for a free slot", "no wait for a full slot"])
def test_the_exploration_finds_a_protocol_that_is_broken(broken: str) -> None:
    slots = {channel(slot) for slot in range(SLOTS) for channel in ((free,) if "free" in broken else (full,))}
    programs = [
        [step for step in stream if not (step[0] == "wait" and step[2] in slots)]
        for stream in streams([program * 3 for program in RING[2]], 1)
    ]
    with pytest.raises(AssertionError):
        explore(programs)


def test_sending_all_chunks_before_receiving_any_would_deadlock() -> None:
    programs = []
    for stream in streams(RING[2], 4):
        setup, rest = stream[:SLOTS], stream[SLOTS:]
        steps = [rest[i : i + 3] for i in range(0, len(rest), 3)]
        programs.append([*setup, *chain(*steps[0::2], *steps[1::2])])
    with pytest.raises(AssertionError, match="deadlock"):
        explore(programs)


@given(
    st.sampled_from([(kind, family) for kind in Kind for family in FAMILIES[kind]]),
    st.integers(2, 5),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(0, 2**16),
)
def test_every_schedule_gets_through(case: tuple[Kind, str], ranks: int, m: int, chunks: int, seed: int) -> None:
    """One order of the streams each, drawn at random: what has no deadlock in one has none in any, for such programs."""
    try:
        schedule = build(*case, ranks, m)
    except ValueError:
        return
    posts = [
        [
            (post.send and post.send.peer, post.recv and post.recv.peer)
            for post in schedule.program(rank)
            if isinstance(post, Post)
        ]
        for rank in range(ranks)
    ]
    run_once(streams(posts, chunks), seed)


def run_once(programs: list[list[Step]], seed: int) -> None:
    order = torch.Generator().manual_seed(seed)
    position, signals, memory = [0] * len(programs), set(), {}
    while any(p < len(program) for p, program in zip(position, programs, strict=True)):
        for rank in torch.randperm(len(programs), generator=order).tolist():
            if position[rank] == len(programs[rank]):
                continue
            kind, where, what = programs[rank][position[rank]]
            key = (where, rank, what) if kind == "put" else (rank, where, what)
            if (kind == "put" and key in signals) or (kind == "wait" and key not in signals):
                continue
            if kind == "put":
                signals.add(key)
            elif kind == "wait":
                signals.remove(key)
            elif kind == "write":
                assert where not in memory
                memory[where] = what
            else:
                assert memory.pop(where) == what
            position[rank] += 1
            break
        else:
            raise AssertionError(f"deadlock at {position}")
    assert not memory


class Inboxes:
    """The memory of all ranks, in this process. Signals are not looked at: whoever posts first has sent first."""

    def __init__(self, ranks: int, slot_bytes: int) -> None:
        self.bytes = torch.zeros(ranks, ranks, SLOTS, slot_bytes, dtype=torch.uint8)

    def of(self, rank: int) -> Inbox:
        return Inbox(self, rank)


@dataclass
class Inbox:
    world: Inboxes
    rank: int

    def slot(self, rank: int, source: int, slot: int, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        return self.world.bytes[rank, source, slot, :size].view(like.dtype).view(like.shape)

    def put_signal(self, rank: int, channel: int) -> None: ...
    def wait_signal(self, rank: int, channel: int) -> None: ...


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_messages_of_any_size_arrive_in_chunks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inboxes = Inboxes(2, slot_bytes=16)
    sender, receiver = (PeerTransfers(inboxes.of(rank), 2, slot_bytes=16) for rank in range(2))
    for chunk in torch.randn(shape).to(dtype).view(-1).split(16 // dtype.itemsize * SLOTS):
        received = torch.empty_like(chunk)  # as many as fit the slots at a time: here nobody waits
        sender.post((chunk, 1), None)
        receiver.post(None, (received, 0))
        assert torch.equal(received, chunk)


@pytest.mark.slow
def test_the_memory_of_a_group_is_made_once_and_nothing_is_kept_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(group_name: str, like: Tensor, ranks: int) -> Any:
        made.append(group_name)
        return Inboxes(ranks, peer_memory.SLOT_BYTES).of(0)

    transport = CopyEngineTransport(make)
    groups = {"0": Group(), "1": Group()}
    monkeypatch.setattr(transport, "rank_and_size", lambda name: (0, 2))
    monkeypatch.setattr(transport, "_group", groups.__getitem__)
    before = sum(type(o) is Tensor for o in gc.get_objects())
    for _ in range(5):
        transport.post("0", (torch.ones(3), 1), (torch.empty(3), 1)).wait()
    gc.collect()
    assert made == ["0"]
    assert sum(type(o) is Tensor for o in gc.get_objects()) <= before + 1  # the inboxes
    groups["0"] = Group()  # of other processes, under the same name
    transport.post("0", (torch.ones(3), 1), (torch.empty(3), 1)).wait()
    transport.post("1", (torch.ones(3), 1), None).wait()
    assert made == ["0", "0", "1"]
    gc.collect()
    assert sum(type(o) is Tensor for o in gc.get_objects()) <= before + 2  # the inboxes of the groups that there are


class Group:
    """A process group."""


def test_what_a_waiting_kernel_needs_is_made_and_loaded_once_before_it_runs() -> None:
    """Both signals by one of the rank to itself, which is taken again: the protocol goes on as if nothing had been."""
    memories: list[Recorder] = []

    def make(group_name: str, like: Tensor, ranks: int) -> Any:
        memories.append(Recorder(0))
        return memories[-1]

    transport = CopyEngineTransport(make)
    transport.rank_and_size = lambda name: (0, 3)  # type: ignore[method-assign]
    transport._group = lambda name: Group  # type: ignore[method-assign]
    for _ in range(2):
        transport.prepare("0", torch.ones(1))
    (memory,) = memories
    assert memory.stream[-2:] == [("put", 0, full(0)), ("wait", 0, full(0))]
    assert len(memory.stream) == 2 * SLOTS + 2
