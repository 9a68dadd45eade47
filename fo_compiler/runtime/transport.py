"""Transports: how a posted step moves its tensors. One small interface, chosen by the thread that runs the graph.

- `C10dTransport`: point-to-point of the process group (gloo, NCCL, MPI): the default.
- `LocalTransport` (runtime/local.py): the ranks are threads of one process; for tests.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_adapter import coalesces, group_store, group_timeout, prefixed, resolve_process_group
from .agreement import Agreements, compare

# Messages of ours carry this tag, so that they never meet a user's own send or receive (NCCL has no tags).
MESSAGE_TAG = 0xF0


class Transfer(Protocol):
    """The transfers of one posted step, in flight."""

    def wait(self) -> None:
        """Block (or, on a device, make the current stream wait) until both directions are done."""


class Transport(Protocol):
    """Moves contiguous tensors between the ranks of a group. Peers are ranks of the group."""

    agreements: Agreements

    def agree(self, group_name: str, decisions: list[list[str]]) -> None:
        """Compare decisions about a graph with the other ranks; raises AgreementError on all of them if they differ."""

    def rank_and_size(self, group_name: str) -> tuple[int, int]:
        """This rank's number in the group, and the number of ranks in it."""

    def post(self, group_name: str, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> Transfer:
        """Start both directions together and return at once: (tensor, peer) each, or None."""


class _C10dTransfer:
    def __init__(self, works: list[dist.Work], sent: Tensor | None) -> None:
        self._works = works
        self._sent = sent  # alive until the work is done, whatever the caller does

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._sent = None


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
    """A transfer whose send is posted by the thread."""

    def __init__(self, group: dist.ProcessGroup, send: tuple[Tensor, int], received: list[dist.Work]) -> None:
        self._group = group
        self._send: tuple[Tensor, int] | None = send  # alive until the work is done, whatever the caller does
        self._works = received
        self._failure: BaseException | None = None
        self._posted = threading.Lock()
        self._posted.acquire()

    def run(self) -> None:
        assert self._send is not None
        try:
            self._works.append(self._group.send([self._send[0]], self._send[1], MESSAGE_TAG))
        except BaseException as failure:
            self._failure = failure
        finally:
            self._posted.release()

    def wait(self) -> None:
        with self._posted:
            if self._failure is not None:
                raise self._failure
            for work in self._works:
                work.wait()
            self._send = None


def _post_all(postings: queue.SimpleQueue[_Posting]) -> None:
    while True:
        postings.get().run()


class C10dTransport:
    """Point-to-point transfers of the process group's own backend."""

    def __init__(self) -> None:
        self.agreements = Agreements()
        self._sender = _Sender()

    def agree(self, group_name: str, decisions: list[list[str]]) -> None:
        group = resolve_process_group(group_name)
        number = self.agreements.next_number(group_name)
        store = group_store(group)
        if store is None:
            return  # the fake backend: there are no other ranks
        board = prefixed(store, f"fo_compiler/{group_name}")
        timeout = group_timeout(group)

        def wait(key: str) -> bool:
            try:
                board.wait([key], timeout)
            except RuntimeError:  # a time-out (each kind of store has its own), or the store is gone
                return False
            return True

        compare(board, number, group.rank(), group.size(), decisions, wait)

    def rank_and_size(self, group_name: str) -> tuple[int, int]:
        group = resolve_process_group(group_name)
        return group.rank(), group.size()

    def post(self, group_name: str, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> Transfer:
        group = resolve_process_group(group_name)
        if not coalesces(group, (send or recv or _NOTHING)[0].device):
            # Straight to the process group, in half the time of the functions that check and batch.
            received = [group.recv([recv[0]], recv[1], MESSAGE_TAG)] if recv is not None else []
            if send is None:
                return _C10dTransfer(received, None)
            posting = _Posting(group, send, received)
            self._sender.post(posting)
            return posting
        # Batched, because NCCL deadlocks on a send and a receive that are not grouped.
        ops = [
            dist.P2POp(op, tensor, group=group, tag=MESSAGE_TAG, group_peer=peer)
            for op, (tensor, peer) in _directions(send, recv)
        ]
        return _C10dTransfer(dist.batch_isend_irecv(ops), send and send[0])


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


def current_transport() -> Transport:
    """The transport of this thread: c10d, unless `use_transport` says otherwise."""
    return getattr(_of_thread, "transport", _default)


@contextmanager
def use_transport(transport: Transport) -> Iterator[None]:
    """Use `transport` in this thread, inside the block."""
    before = getattr(_of_thread, "transport", _default)
    _of_thread.transport = transport
    try:
        yield
    finally:
        _of_thread.transport = before
