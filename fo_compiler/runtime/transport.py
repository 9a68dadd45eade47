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
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_adapter import (
    coalesces,
    group_store,
    group_timeout,
    has_name,
    point_to_point,
    prefixed,
    resolve_process_group,
)
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


# What is no larger is sent by the thread that posts it. Where the receiver waits already, gloo copies a message into the socket
# when it is posted, at 0.35 ms a MB (two ranks, loopback). One that is handed over cannot begin while the rank runs Python, or a
# kernel that holds the GIL (Inductor's own on CPUs): with messages of 0.4 MB the demo's step took 110 ms inline, 117 to 313 so.
INLINE_BYTES = 512 * 1024


class _Sender:
    """A thread that posts large sends, so that the rank's own work need not wait for the copy into the socket.

    One thread, so that messages keep their order; made when it is first needed, and again in a forked child.
    """

    def __init__(self) -> None:
        self._process = 0
        self._queue: queue.SimpleQueue[_Posting] = queue.SimpleQueue()
        self._newest: threading.Lock | None = None  # held until the newest send is posted

    @property
    def is_busy(self) -> bool:
        """Whether sends wait to be posted: others must not overtake them, for what is needed first is posted first."""
        return self._newest is not None and self._newest.locked() and self._process == os.getpid()

    def post(self, posting: _Posting) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_post_all, args=(self._queue,), name="fo_compiler sends", daemon=True).start()
        self._newest = posting.unposted
        self._queue.put(posting)


class _Posting:
    """A send that the thread posts."""

    def __init__(self, backend: Any, tensor: Tensor, peer: int, tag: int) -> None:
        self.tensor = tensor
        self._backend, self._peer, self._tag = backend, peer, tag
        self._work: dist.Work | None = None
        self._failure: BaseException | None = None
        self.unposted = threading.Lock()
        self.unposted.acquire()

    def run(self) -> None:
        try:
            self._work = self._backend.send([self.tensor], self._peer, self._tag)
        except BaseException as failure:
            self._failure = failure
        finally:
            self.unposted.release()

    def work(self) -> dist.Work:
        """The work of the send, once it is posted; raises what the posting raised."""
        with self.unposted:
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


class _End(NamedTuple):
    """How messages of a group are posted for one type of device."""

    group: ref[dist.ProcessGroup]
    backend: Any  # None where a send and a receive have to be posted as one


class C10dTransport:
    """Point-to-point transfers of the process group's own backend."""

    def __init__(self) -> None:
        self.agreements = Agreements()
        self._sender = _Sender()
        self._runs: defaultdict[str, _Run] = defaultdict(_Run)
        # By name of the group and type of device: to ask each time is half as dear as to receive. None outlives its group.
        self._ends: dict[tuple[str, str], _End] = {}

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
        run = self._runs[group_name]
        if run.thread not in (0, threading.get_ident()):
            raise RuntimeError(
                f"another thread has begun to run a graph of group {group_name!r} before this one was done; run the graphs "
                "of a group from one thread at a time, in the same order on all ranks"
            )
        group, backend = self._end(group_name, (send or recv or _NOTHING)[0])
        if backend is None:
            # Batched, because NCCL deadlocks on a send and a receive that are not grouped.
            ops = [
                dist.P2POp(op, tensor, group=group, group_peer=peer) for op, (tensor, peer) in _directions(send, recv)
            ]
            return _C10dTransfer(run, dist.batch_isend_irecv(ops), recv and recv[0], send and send[0])
        # Straight to the backend, in a third of the time of the functions that check, dispatch and batch.
        # The receive first: gloo tells the peer of it on the connection that the send will fill. Behind the send, 0.5 MB took
        # 24 ms instead of 17 (two ranks, 250 Mbit/s). Only where ranks share cores over loopback is that order the better one.
        works = [backend.recv([recv[0]], recv[1], run.receive_tag(recv[1]))] if recv is not None else []
        if send is None:
            return _C10dTransfer(run, works, recv and recv[0], None)
        tensor, peer = send
        if tensor.nbytes > INLINE_BYTES or self._sender.is_busy:
            posting = _Posting(backend, tensor, peer, run.send_tag(peer))
            self._sender.post(posting)
            return _C10dTransfer(run, works, recv and recv[0], posting)
        # Before the send, which may fail: it has the memory of the receive.
        transfer = _C10dTransfer(run, works, recv and recv[0], tensor)
        works.append(backend.send([tensor], peer, run.send_tag(peer)))
        return transfer

    def _end(self, group_name: str, like: Tensor) -> tuple[dist.ProcessGroup, Any]:
        key = group_name, "cpu" if like.is_cpu else like.device.type
        end = self._ends.get(key)
        group = end and end.group()
        if end is None or group is None or not has_name(group, group_name):
            group = resolve_process_group(group_name)
            backend = None if coalesces(group, like.device) else point_to_point(group, like.device)
            end = self._ends[key] = _End(ref(group, lambda gone: self._forget(key, gone)), backend)
        return group, end.backend

    def _forget(self, key: tuple[str, str], gone: ref[dist.ProcessGroup]) -> None:
        if key in self._ends and self._ends[key].group is gone:
            del self._ends[key]


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
_chosen: list[Transport] = []  # of all threads; while there is none, no thread needs to be asked, which is slow


def current_transport(name: str = "c10d") -> Transport:
    """The transport of this name, `c10d` or `copy_engine`; or what `use_transport` says, for all names."""
    chosen: Transport | None = getattr(_of_thread, "transport", None) if _chosen else None
    return chosen or (_default if name == "c10d" else _copy_engine())


@lru_cache(maxsize=1)
def _copy_engine() -> Transport:
    from .peer_memory import CopyEngineTransport

    return CopyEngineTransport()


@contextmanager
def use_transport(transport: Transport) -> Iterator[None]:
    """Use `transport` in this thread, inside the block."""
    before = getattr(_of_thread, "transport", None)
    _chosen.append(transport)
    _of_thread.transport = transport
    try:
        yield
    finally:
        _of_thread.transport = before
        _chosen.remove(transport)
