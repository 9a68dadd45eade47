"""A world whose ranks are threads of one process: the second transport, for tests and for checking a rewrite.

A message is copied when its receiver waits for it, or while it waits for another one: never before, so that a buffer which
is reused while it is in flight gives wrong values here, as it would on a network.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from .agreement import Agreements, Meeting
from .transport import use_transport

T = TypeVar("T")
Link = tuple[str, int, int]  # group, source, destination: global ranks


@dataclass
class LocalWorld:
    """`ranks` threads that talk to each other.

    `groups` names process groups as the graphs do: for each name the lists of global ranks that form a group under it.
    Without it, one group "0" holds all ranks. A wait that lasts longer than `timeout_s` raises RuntimeError. `delay(rank,
    where)` is called on each `post`, `wait` and `meet`, to move the threads against each other (`random_delays`).
    """

    ranks: int
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    timeout_s: float = 60.0
    delay: Callable[[int, str], None] = lambda rank, where: None

    def __post_init__(self) -> None:
        self.groups = self.groups or {"0": [list(range(self.ranks))]}
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.arrived: dict[tuple[Link, int], _Message] = {}  # by turn on its link, until it is taken
        self.expected: dict[int, dict[tuple[Link, int], Tensor]] = defaultdict(dict)  # by rank: where to copy it
        self._turns: dict[tuple[str, Link], int] = defaultdict(int)
        self.boards: dict[tuple[Any, ...], _LocalBoard] = defaultdict(lambda: _LocalBoard(self.changed))
        self.meetings: dict[tuple[Any, ...], dict[int, Any]] = defaultdict(dict)

    def transport(self, rank: int) -> LocalTransport:
        return LocalTransport(self, rank)

    def members(self, group_name: str, rank: int) -> Sequence[int]:
        return next(ranks for ranks in self.groups[group_name] if rank in ranks)

    def run(self, program: Callable[[int], T]) -> list[T]:
        """Run `program(rank)` in all threads; the results by rank. The first error of any rank is raised."""

        def body(rank: int) -> T:
            try:
                with use_transport(self.transport(rank)):
                    return program(rank)
            except BaseException as error:
                with self.changed:
                    self.failure = self.failure or error
                    self.changed.notify_all()
                raise

        with ThreadPoolExecutor(self.ranks) as pool:
            futures = [pool.submit(body, rank) for rank in range(self.ranks)]
            for future in futures:
                future.exception()
        if self.failure is not None:
            raise self.failure
        return [future.result() for future in futures]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Block until `condition` holds; call with `changed` held."""
        if not self.changed.wait_for(lambda: condition() or self.failure is not None, self.timeout_s):
            raise RuntimeError(f"{what}: nothing came within {self.timeout_s} s")
        if not condition():
            raise RuntimeError(f"{what}: another rank failed: {self.failure}")

    def turn(self, end: str, link: Link) -> tuple[Link, int]:
        """The place of the next message on a link, on one end of it; call with `changed` held."""
        self._turns[end, link] += 1
        return link, self._turns[end, link]

    def take(self, rank: int, place: tuple[Link, int]) -> None:
        """Copy a message that has arrived to where `rank` expects it; call with `changed` held."""
        message, buffer = self.arrived[place], self.expected[rank][place]
        if message.tensor.shape != buffer.shape or message.tensor.dtype != buffer.dtype:
            raise RuntimeError(f"receive {place[0]}: expected {buffer.shape}, got {message.tensor.shape}")
        buffer.copy_(message.tensor)
        message.taken = True
        del self.arrived[place], self.expected[rank][place]
        self.changed.notify_all()


def random_delays(seed: int, ranks: int, at_most_s: float = 0.001) -> Callable[[int, str], None]:
    """A `delay` of a LocalWorld that sleeps now and then: the same times for the same seed."""
    generators = [random.Random(f"{seed} {rank}") for rank in range(ranks)]

    def delay(rank: int, where: str) -> None:
        draw = generators[rank].random()
        if draw < 0.5:
            time.sleep(at_most_s * draw * 2)

    return delay


@dataclass
class _Message:
    tensor: Tensor
    taken: bool = False


class _LocalBoard:
    """The keys that the ranks of one group share, as in a torch.distributed.Store."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.values: dict[str, str] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.changed:
            if self.values.get(key, "") == expected:
                self.set(key, desired)
            return self.values[key].encode()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            return self.values[key].encode()

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            total = int(self.values.get(key, "0")) + amount
            self.set(key, str(total))
            return total

    def check(self, keys: list[str]) -> bool:
        with self.changed:
            return all(key in self.values for key in keys)


@dataclass
class LocalTransport:
    """One rank's end of a LocalWorld."""

    world: LocalWorld
    global_rank: int

    def __post_init__(self) -> None:
        self.agreements = Agreements()
        self._meetings: dict[str, int] = defaultdict(int)

    def rank_and_size(self, group_name: str) -> tuple[int, int]:
        members = self.world.members(group_name, self.global_rank)
        return members.index(self.global_rank), len(members)

    def meeting(self, group_name: str) -> Meeting | None:
        rank, size = self.rank_and_size(group_name)
        members = tuple(self.world.members(group_name, self.global_rank))
        with self.world.changed:
            board = self.world.boards[group_name, members]
        return Meeting(group_name, board, rank, size, self.world.timeout_s)

    def begin(self, group_names: Iterable[str]) -> None:
        """Links keep the order of their messages, also from one graph to the next."""

    def prepare(self, group_name: str, like: Tensor) -> None:
        """Links are made as they are used."""

    def post(self, group_name: str, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> _LocalTransfer:
        world, me = self.world, self.global_rank
        members = world.members(group_name, me)
        message: _Message | None = None
        incoming: tuple[Link, int] | None = None
        world.delay(me, "post")
        with world.changed:
            if recv is not None:
                incoming = world.turn("received", (group_name, members[recv[1]], me))
                world.expected[me][incoming] = recv[0]
            if send is not None:
                message = _Message(send[0])
                world.arrived[world.turn("sent", (group_name, me, members[send[1]]))] = message
                world.changed.notify_all()
        return _LocalTransfer(world, me, message, incoming)

    def meet(self, group_name: str, value: T) -> list[T]:
        """Every rank of the group brings a value and gets all of them, in rank order: a plain collective."""
        world = self.world
        members = world.members(group_name, self.global_rank)
        key = (group_name, tuple(members), self._meetings[group_name])
        self._meetings[group_name] += 1
        world.delay(self.global_rank, "meet")
        with world.changed:
            world.meetings[key][self.global_rank] = value
            world.changed.notify_all()
            world.wait_until(lambda: len(world.meetings[key]) == len(members), f"collective in group {group_name!r}")
            return [world.meetings[key][member] for member in members]


@dataclass
class _LocalTransfer:
    world: LocalWorld
    rank: int
    message: _Message | None
    incoming: tuple[Link, int] | None

    def wait(self) -> None:
        world, expected = self.world, self.world.expected[self.rank]
        world.delay(self.rank, "wait")
        with world.changed:
            if self.incoming in expected and self.incoming in world.arrived:
                world.take(self.rank, self.incoming)
            if not self._received():
                world.wait_until(
                    lambda: self._progress(self._received), f"receive {self.incoming and self.incoming[0]}"
                )
            if not self._sent():
                world.wait_until(lambda: self._progress(self._sent), "send")

    def _received(self) -> bool:
        return self.incoming not in self.world.expected[self.rank]

    def _sent(self) -> bool:
        return self.message is None or self.message.taken

    def _progress(self, done: Callable[[], bool]) -> bool:
        """While a rank waits, all that it expects arrives: the rank that it waits for may be waiting for that."""
        world = self.world
        for place in [place for place in world.expected[self.rank] if place in world.arrived]:
            world.take(self.rank, place)
        return done()
