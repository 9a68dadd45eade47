"""Transfers by copy engine into memory of the peer that this rank has mapped (symmetric memory, within an NVLink domain).

Each rank has an inbox: two slots for each source, mapped by all ranks of the group, made once for a group and reused.
Transfer n between a pair uses slot n mod 2, and two signals order it, on the stream of the transfer:

    sender     wait `free`   copy into the slot   signal `full`
    receiver                                      wait `full`   copy out of the slot   signal `free`

So the next transfer of a pair may be under way while the last one is copied out, and a slot is never written before it is
read. A message that is longer than a slot goes in chunks; a chunk is sent and received before the next one, so that ranks
that all send to each other never wait in a circle. Both signals are tokens that a wait takes away (a wait is put back to 0
by whoever waited), so a captured CUDA graph can be replayed. The host waits for nothing.

The copies are `cudaMemcpyAsync` from memory to memory, for which the copy engines of the device serve the peer's side; a
signal is a kernel of one block for a microsecond, or as long as it has to wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from ..torch_adapter import SymmetricMemory, resolve_process_group
from .transport import C10dTransport, Transfer

SLOTS = 2
SLOT_BYTES = 8 << 20  # of the group's memory every rank holds ranks * SLOTS * SLOT_BYTES


class PeerMemory(Protocol):
    """Inboxes and signals of a group; all calls work on the current stream."""

    rank: int

    def slot(self, rank: int, source: int, slot: int, like: Tensor) -> Tensor:
        """The slot for `source` in the inbox of `rank`, with shape and dtype of `like`."""

    def put_signal(self, rank: int, channel: int) -> None:
        """Set the signal of this rank at `rank`, once that is taken."""

    def wait_signal(self, rank: int, channel: int) -> None:
        """Wait until the signal of `rank` is set here, and take it."""


def full(slot: int) -> int:
    """Channel of the signal that a slot holds a message."""
    return 2 * slot


def free(slot: int) -> int:
    """Channel of the signal that a slot may be written."""
    return 2 * slot + 1


@dataclass
class PeerTransfers:
    """The transfers of one rank in a group. A new one tells every peer that all slots are free."""

    memory: PeerMemory
    ranks: int
    slot_bytes: int = SLOT_BYTES
    sent: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))  # by peer: chunks so far
    received: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    is_loaded: bool = False

    def __post_init__(self) -> None:
        for peer in range(self.ranks):
            for slot in range(SLOTS):
                if peer != self.memory.rank:
                    self.memory.put_signal(peer, free(slot))

    def load(self) -> None:
        """Load the kernels of both signals, by one of this rank to itself: loading may have to wait for kernels that run."""
        if not self.is_loaded:
            self.memory.put_signal(self.memory.rank, full(0))
            self.memory.wait_signal(self.memory.rank, full(0))
            self.is_loaded = True

    def post(self, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> None:
        """Give the current stream both directions of a step."""
        outgoing = self._chunks(send[0]) if send is not None else []
        incoming = self._chunks(recv[0]) if recv is not None else []
        for index in range(max(len(outgoing), len(incoming))):
            if send is not None and index < len(outgoing):
                self._send(outgoing[index], send[1])
            if recv is not None and index < len(incoming):
                self._receive(incoming[index], recv[1])

    def _chunks(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.view(-1).split(max(1, self.slot_bytes // tensor.element_size())))

    def _send(self, chunk: Tensor, peer: int) -> None:
        slot = self.sent[peer] % SLOTS
        self.sent[peer] += 1
        self.memory.wait_signal(peer, free(slot))
        self.memory.slot(peer, self.memory.rank, slot, chunk).copy_(chunk, non_blocking=True)
        self.memory.put_signal(peer, full(slot))

    def _receive(self, chunk: Tensor, peer: int) -> None:
        slot = self.received[peer] % SLOTS
        self.received[peer] += 1
        self.memory.wait_signal(peer, full(slot))
        chunk.copy_(self.memory.slot(self.memory.rank, peer, slot, chunk), non_blocking=True)
        self.memory.put_signal(peer, free(slot))


class _OnStream:
    """A transfer that the current stream has been given: whatever that stream does next comes behind it."""

    def wait(self) -> None:
        pass


class CopyEngineTransport(C10dTransport):
    """Transfers through symmetric memory; meetings, and all that is no transfer, as with c10d.

    `make_memory(group_name, like, ranks)` makes the memory of a group when it first transfers: a rendezvous of all ranks.
    """

    def __init__(self, make_memory: Callable[[str, Tensor, int], PeerMemory] | None = None) -> None:
        super().__init__()
        self._make_memory = make_memory or _symmetric_memory
        # By group, not by its name: a name that is used again is another group, of other processes.
        self._groups: WeakKeyDictionary[object, PeerTransfers] = WeakKeyDictionary()

    def prepare(self, group_name: str, like: Tensor) -> None:
        self._of(group_name, like).load()

    def post(self, group_name: str, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> Transfer:
        given = send or recv
        if given is not None:
            self._of(group_name, given[0]).post(send, recv)
        return _OnStream()

    def _of(self, group_name: str, like: Tensor) -> PeerTransfers:
        group = self._group(group_name)
        transfers = self._groups.get(group)
        if transfers is None:
            ranks = self.rank_and_size(group_name)[1]
            transfers = self._groups[group] = PeerTransfers(self._make_memory(group_name, like, ranks), ranks)
        return transfers

    def _group(self, group_name: str) -> object:
        return resolve_process_group(group_name)


def _symmetric_memory(group_name: str, like: Tensor, ranks: int) -> PeerMemory:
    return SymmetricMemory(group_name, like.device, ranks, SLOTS, SLOT_BYTES)
