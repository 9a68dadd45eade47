"""A world whose ranks are threads of one process: the second transport, for tests and for checking a rewrite.

Nothing is copied before the receiver waits, so that a buffer which is reused while it is in flight gives wrong values
here, as it would on a network.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from .agreement import Agreements, compare
from .transport import Transfer, use_transport

T = TypeVar("T")


@dataclass
class _Message:
    tensor: Tensor
    taken: bool = False


@dataclass
class LocalWorld:
    """`ranks` threads that talk to each other.

    `groups` names process groups as the graphs do: for each name the lists of global ranks that form a group under it.
    Without it, one group "0" holds all ranks. A wait that lasts longer than `timeout_s` raises RuntimeError.
    """

    ranks: int
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        self.groups = self.groups or {"0": [list(range(self.ranks))]}
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.sent: dict[tuple[Any, ...], list[_Message]] = defaultdict(list)
        self.receives: dict[tuple[Any, ...], int] = defaultdict(int)
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

    def agree(self, group_name: str, decisions: list[list[str]]) -> None:
        rank, size = self.rank_and_size(group_name)
        members = tuple(self.world.members(group_name, self.global_rank))
        board = self.world.boards[group_name, members]

        def wait(key: str) -> bool:
            with self.world.changed:
                return self.world.changed.wait_for(lambda: board.check([key]), self.world.timeout_s)

        compare(board, self.agreements.next_number(group_name), rank, size, decisions, wait)

    def post(self, group_name: str, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> Transfer:
        world = self.world
        members = world.members(group_name, self.global_rank)
        message: _Message | None = None
        incoming: tuple[Any, ...] = ()
        turn = 0
        with world.changed:
            if send is not None:
                message = _Message(send[0])
                world.sent[group_name, self.global_rank, members[send[1]]].append(message)
                world.changed.notify_all()
            if recv is not None:
                incoming = (group_name, members[recv[1]], self.global_rank)
                turn = world.receives[incoming]
                world.receives[incoming] += 1
        return _LocalTransfer(world, message, recv and recv[0], incoming, turn)

    def meet(self, group_name: str, value: T) -> list[T]:
        """Every rank of the group brings a value and gets all of them, in rank order: a plain collective."""
        world = self.world
        members = world.members(group_name, self.global_rank)
        key = (group_name, tuple(members), self._meetings[group_name])
        self._meetings[group_name] += 1
        with world.changed:
            world.meetings[key][self.global_rank] = value
            world.changed.notify_all()
            world.wait_until(lambda: len(world.meetings[key]) == len(members), f"collective in group {group_name!r}")
            return [world.meetings[key][member] for member in members]


@dataclass
class _LocalTransfer:
    world: LocalWorld
    message: _Message | None
    buffer: Tensor | None
    incoming: tuple[Any, ...]
    turn: int

    def wait(self) -> None:
        world = self.world
        with world.changed:
            if self.buffer is not None:
                world.wait_until(lambda: len(world.sent[self.incoming]) > self.turn, f"receive {self.incoming}")
                arrived = world.sent[self.incoming][self.turn]
                if arrived.tensor.shape != self.buffer.shape or arrived.tensor.dtype != self.buffer.dtype:
                    raise RuntimeError(
                        f"receive {self.incoming}: expected {self.buffer.shape}, got {arrived.tensor.shape}"
                    )
                self.buffer.copy_(arrived.tensor)
                arrived.taken = True
                world.changed.notify_all()
            message = self.message
            if message is not None:
                world.wait_until(lambda: message.taken, "send")
