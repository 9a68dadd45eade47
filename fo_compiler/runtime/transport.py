"""Transports: how a posted step moves its tensors. One small interface, chosen by the thread that runs the graph.

- `C10dTransport`: point-to-point of the process group (gloo, NCCL, MPI): the default.
- `CopyEngineTransport` (runtime/peer_memory.py): symmetric memory within an NVLink domain.
- `LocalTransport` (runtime/local.py): the ranks are threads of one process; for tests.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_adapter import coalesces, group_store, group_timeout, prefixed, resolve_process_group
from .agreement import Agreements, Meeting


class Transfer(Protocol):
    """The transfers of one posted step, in flight."""

    def wait(self) -> None:
        """Block (or, on a device, make the current stream wait) until both directions are done."""


class Transport(Protocol):
    """Moves contiguous tensors between the ranks of a group. Peers are ranks of the group."""

    agreements: Agreements

    def rank_and_size(self, group_name: str) -> tuple[int, int]:
        """This rank's number in the group, and the number of ranks in it."""

    def meeting(self, group_name: str) -> Meeting | None:
        """Where the ranks of the group compare what they are about to run; None if there are no other ranks."""

    def begin(self, group_names: Iterable[str]) -> None:
        """A graph with transfers in these groups starts to run. All ranks of a group begin the same graphs in one order."""

    def prepare(self, group_name: str, like: Tensor) -> None:
        """Make what transfers in the group need on the device of `like`, before a kernel runs that waits for them."""

    def post(self, group_name: str, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> Transfer:
        """Start both directions together and return at once: (tensor, peer) each, or None."""


class _C10dTransfer:
    """Works of c10d: of the receive, and of the send or, where a thread posts it, its posting.

    It keeps the memory of both alive until the works are done, whatever the caller does. What is dropped before (its step has
    failed) is handed to the run: a message may still arrive, and must find its place, or gloo gives up the connection.
    """

    def __init__(self, run: _Run, works: list[dist.Work], received: Tensor | None, sending: _Posting | Tensor | None):
        self._run = run
        self._works = works
        self._memory = received.untyped_storage() if received is not None else None
        self._sending = sending

    def wait(self) -> None:
        if isinstance(self._sending, _Posting):
            self._works.append(self._sending.work())
            self._sending = self._sending.tensor
        while self._works:
            self._works[0].wait()
            del self._works[0]
        self._sending = self._memory = None

    def __del__(self) -> None:
        if self._sending is not None or self._memory is not None:
            self._run.abandoned.append((self._run.number, self._works, self._memory, self._sending))


class _Sender:
    """A thread that posts sends: where the receiver waits already, posting one copies the message into the socket.

    That is a millisecond for 2 MB, which the rank's own work need not wait for. One thread, so that messages keep their
    order; made when it is first needed, and again in a forked child.
    """

    def __init__(self) -> None:
        self._process = 0
        self._queue: queue.SimpleQueue[_Posting] = queue.SimpleQueue()

    def post(self, posting: _Posting) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_post_all, args=(self._queue,), name="fo_compiler sends", daemon=True).start()
        self._queue.put(posting)


class _Posting:
    """A send that the thread posts."""

    def __init__(self, group: dist.ProcessGroup, tensor: Tensor, peer: int, tag: int) -> None:
        self.tensor = tensor
        self._group, self._peer, self._tag = group, peer, tag
        self._work: dist.Work | None = None
        self._failure: BaseException | None = None
        self._posted = threading.Lock()
        self._posted.acquire()

    def run(self) -> None:
        try:
            self._work = self._group.send([self.tensor], self._peer, self._tag)
        except BaseException as failure:
            self._failure = failure
        finally:
            self._posted.release()

    def work(self) -> dist.Work:
        """The work of the send, once it is posted; raises what the posting raised."""
        with self._posted:
            if self._failure is not None:
                raise self._failure
            assert self._work is not None
            return self._work


def _post_all(postings: queue.SimpleQueue[_Posting]) -> None:
    while True:
        postings.get().run()


class _Run:
    """The messages of one group in one run of a graph, and the tag that each of them carries.

    A message is the k-th from a rank to another in the r-th run, on both ends. A step that failed half-way leaves
    messages that nobody took: they must never be taken for those of a later step. The tag also keeps them from a user's
    own sends and receives. NCCL has no tags.
    """

    def __init__(self) -> None:
        self.number = 0
        self.thread = 0
        self.abandoned: list[tuple[Any, ...]] = []  # transfers that nobody awaited, by the number of their run
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def begin(self) -> None:
        self.number += 1
        if self.abandoned:  # messages keep their order: what has not come before the last run's will not come
            self.abandoned = [item for item in self.abandoned if item[0] > self.number - 3]
        self.thread = threading.get_ident()
        self._sent.clear()
        self._received.clear()

    def send_tag(self, peer: int) -> int:
        return self._tag(self._sent, peer)

    def receive_tag(self, peer: int) -> int:
        return self._tag(self._received, peer)

    def _tag(self, counts: dict[int, int], peer: int) -> int:
        count = counts[peer] = counts.get(peer, -1) + 1
        return 1 << 30 | (self.number & 0x3FFF) << 16 | count & 0xFFFF


class C10dTransport:
    """Point-to-point transfers of the process group's own backend."""

    def __init__(self) -> None:
        self.agreements = Agreements()
        self._sender = _Sender()
        self._runs: defaultdict[str, _Run] = defaultdict(_Run)
        # By group and type of device: to ask is half as dear as to receive.
        self._coalescing: WeakKeyDictionary[dist.ProcessGroup, dict[str, bool]] = WeakKeyDictionary()

    def meeting(self, group_name: str) -> Meeting | None:
        group = resolve_process_group(group_name)
        store = group_store(group)
        if store is None:
            return None  # the fake backend: there are no other ranks
        board = prefixed(store, f"fo_compiler/{group_name}")
        return Meeting(group_name, board, group.rank(), group.size(), group_timeout(group).total_seconds())

    def rank_and_size(self, group_name: str) -> tuple[int, int]:
        group = resolve_process_group(group_name)
        return group.rank(), group.size()

    def begin(self, group_names: Iterable[str]) -> None:
        for group_name in group_names:
            self._runs[group_name].begin()

    def prepare(self, group_name: str, like: Tensor) -> None:
        """The process group is there."""

    def post(self, group_name: str, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> Transfer:
        group, run = resolve_process_group(group_name), self._runs[group_name]
        if run.thread not in (0, threading.get_ident()):
            raise RuntimeError(
                f"another thread has begun to run a graph of group {group_name!r} before this one was done; run the graphs "
                "of a group from one thread at a time, in the same order on all ranks"
            )
        if not self._coalesces(group, (send or recv or _NOTHING)[0].device):
            # Straight to the process group, in half the time of the functions that check and batch.
            received = [group.recv([recv[0]], recv[1], run.receive_tag(recv[1]))] if recv is not None else []
            if send is None:
                return _C10dTransfer(run, received, recv and recv[0], None)
            posting = _Posting(group, *send, run.send_tag(send[1]))
            self._sender.post(posting)
            return _C10dTransfer(run, received, recv and recv[0], posting)
        # Batched, because NCCL deadlocks on a send and a receive that are not grouped.
        ops = [dist.P2POp(op, tensor, group=group, group_peer=peer) for op, (tensor, peer) in _directions(send, recv)]
        return _C10dTransfer(run, dist.batch_isend_irecv(ops), recv and recv[0], send and send[0])

    def _coalesces(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        by_device = self._coalescing.setdefault(group, {})
        if device.type not in by_device:
            by_device[device.type] = coalesces(group, device)
        return by_device[device.type]


_NOTHING = (torch.empty(0), -1)


def _directions(
    send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None
) -> Iterator[tuple[Callable[..., Any], tuple[Tensor, int]]]:
    if send is not None:
        yield dist.isend, send
    if recv is not None:
        yield dist.irecv, recv


_default: Transport = C10dTransport()
_of_thread = threading.local()


def current_transport(name: str = "c10d") -> Transport:
    """The transport of this name, `c10d` or `copy_engine`; or what `use_transport` says, for all names."""
    chosen: Transport | None = getattr(_of_thread, "transport", None)
    return chosen or (_default if name == "c10d" else _copy_engine())


@lru_cache(maxsize=1)
def _copy_engine() -> Transport:
    from .peer_memory import CopyEngineTransport

    return CopyEngineTransport()


@contextmanager
def use_transport(transport: Transport) -> Iterator[None]:
    """Use `transport` in this thread, inside the block."""
    before = getattr(_of_thread, "transport", None)
    _of_thread.transport = transport
    try:
        yield
    finally:
        _of_thread.transport = before
