"""Transports: how a posted step moves its tensors. One small interface, chosen by the thread that runs the graph.

- `C10dTransport`: point-to-point of the process group (gloo, NCCL, MPI): the default.
- `LocalTransport` (runtime/local.py): the ranks are threads of one process; for tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from ..torch_adapter import group_store, group_timeout, prefixed, resolve_process_group
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


class C10dTransport:
    """Point-to-point transfers of the process group's own backend."""

    def __init__(self) -> None:
        self.agreements = Agreements()

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
        # Batched, because NCCL deadlocks on a send and a receive that are not grouped.
        ops = [
            dist.P2POp(op, tensor, group=group, tag=MESSAGE_TAG, group_peer=peer)
            for op, (tensor, peer) in _directions(send, recv)
        ]
        return _C10dTransfer(dist.batch_isend_irecv(ops), send and send[0])


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
