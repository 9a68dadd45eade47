"""The event loop under `simulate`: ranks that work, wait and post; links in order; ports that are shared.

It knows numbers only. `simulate` says what the model is and translates schedules into operations.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from .ir import Stream
from .machine import Machine
from .network import BYTES_PER_US_PER_GBPS, Fabric


class OpCode(IntEnum):
    BUSY = 0  # (_, duration_us, label, _)
    SEND = 1  # (_, bytes, label, step, link)
    RECV = 2  # (_, _, _, step, link)
    WAIT = 3  # (_, _, _, step)


Op = tuple[Any, ...]


@dataclass(frozen=True)
class Span:
    """Something that took time: a compute slice, or one end of a transfer (`peer` is its other end)."""

    rank: int
    stream: Stream
    label: str
    start_us: float
    end_us: float
    peer: int | None = None


class _Transfer:
    __slots__ = ("begin", "destination", "load_bytes", "ready", "receiver_step", "sender_step", "slice", "source")

    def __init__(
        self, source: int, destination: int, sender_step: int, receiver_step: int, slice_: str, load_bytes: float
    ) -> None:
        self.source, self.destination = source, destination
        self.sender_step, self.receiver_step = sender_step, receiver_step
        self.slice = slice_
        self.load_bytes = load_bytes  # its bytes, and the gap after it as bytes
        self.begin = 0.0
        self.ready = False  # latency has passed


class _Link:
    """An ordered pair of ranks: what was posted at either end, and the message whose bytes flow."""

    __slots__ = ("active", "gap_bytes", "last", "queue", "rate", "receives", "remaining", "sends", "version")

    def __init__(self, gap_bytes: float) -> None:
        self.gap_bytes = gap_bytes  # after each message, as bytes
        self.sends: deque[tuple[int, int, str, float]] = deque()  # (rank, step, slice, bytes)
        self.receives: deque[tuple[int, int]] = deque()  # (rank, step)
        self.queue: deque[_Transfer] = deque()  # both ends posted, bytes not yet flowing
        self.active: _Transfer | None = None
        self.remaining = 0.0  # bytes of the active transfer
        self.rate = 0.0  # bytes per microsecond
        self.last = 0.0  # when `remaining` was right
        self.version = 0  # of the end event that counts


_END_BUSY, _LATENCY_OVER, _END_TRANSFER = range(3)


class Engine:
    """Runs the operations of all ranks. With `one_rank`, rank 0 stands for all: links are its distances to its peers."""

    def __init__(
        self,
        programs: list[list[Op]],
        fabric: Fabric,
        machine: Machine,
        *,
        one_rank: bool = False,
        record: bool = False,
    ) -> None:
        ranks = len(programs)
        self.programs = programs
        self.fabric = fabric
        self.gap_us = machine.gap_us
        self.compute_slowdown = machine.compute_slowdown
        self.transfer_slowdown = machine.transfer_slowdown
        self.one_rank = one_rank
        self.record = record
        self.now = 0.0
        self.events: list[tuple[float, int, int, Any, int]] = []
        self.order = 0  # breaks ties, so that a run is deterministic
        self.position = [0] * ranks
        self.finish = [0.0] * ranks
        self.waiting: list[int | None] = [None] * ranks  # step
        self.outstanding: list[dict[int, int]] = [{} for _ in range(ranks)]  # step -> transfers not yet done
        self.in_flight = [0] * ranks
        self.busy = [False] * ranks  # as the rates of transfers know it: it lags while operations are performed
        self.working = [False] * ranks  # whether there is work that contention may stretch
        self.work = [0.0] * ranks  # what is left of the current operation, at full speed
        self.work_last = [0.0] * ranks
        self.work_version = [0] * ranks
        self.started: list[tuple[float, str]] = [(0.0, "")] * ranks
        self.links: dict[int, _Link] = {}
        self.flowing: list[set[int]] = [set() for _ in fabric.port_GBps]  # links by port
        self.load = [0] * len(fabric.port_GBps)  # number of links, counted as often as they use the port
        self.touching: list[set[int]] = [set() for _ in range(ranks)]  # links with bytes flowing, by rank
        self.spans: list[Span] = []

    def run(self) -> int | None:
        """Run to the end. Returns a rank that waits for ever, or None."""
        for rank in range(len(self.programs)):
            self._advance(rank)
        events = self.events
        while events:
            self.now, _, kind, what, version = heapq.heappop(events)
            if kind == _END_BUSY:
                if version == self.work_version[what]:
                    if self.record:
                        start, label = self.started[what]
                        self.spans.append(Span(what, Stream.COMPUTE, label, start, self.now))
                    self._advance(what)
            elif kind == _END_TRANSFER:
                if version == self.links[what].version:
                    self._end_transfer(what)
            else:
                self._latency_over(*what)
        return next(
            (r for r, ops in enumerate(self.programs) if self.position[r] < len(ops) or self.waiting[r] is not None),
            None,
        )

    def _push(self, time: float, kind: int, what: Any, version: int = 0) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, kind, what, version))

    def _advance(self, rank: int) -> None:
        """Perform operations of `rank` from now on, until one takes time or has to wait."""
        ops = self.programs[rank]
        position = self.position[rank]
        self.working[rank] = busy = False
        while position < len(ops):
            op = ops[position]
            position += 1
            code = op[0]
            if code == OpCode.BUSY:
                self.position[rank] = position
                busy = True
                self._start_busy(rank, op[1], op[2])
                break
            if code == OpCode.WAIT:
                if self.outstanding[rank].get(op[3], 0):
                    self.waiting[rank] = op[3]
                    break
            elif code == OpCode.SEND:
                self._post(rank, op[3], op[4], (op[2], op[1]))
            else:
                self._post(rank, op[3], op[4], None)
        self.position[rank] = position
        self.finish[rank] = self.now
        if busy != self.busy[rank]:
            self.busy[rank] = busy
            if self.transfer_slowdown != 1.0:
                for link in sorted(self.touching[rank]):
                    self._reprice(link)

    def _start_busy(self, rank: int, duration: float, label: str) -> None:
        self.working[rank] = True
        self.started[rank] = (self.now, label)
        self.work[rank] = duration
        self.work_last[rank] = self.now
        self._schedule_busy(rank, self.in_flight[rank] > 0)

    def _schedule_busy(self, rank: int, slowed: bool) -> None:
        self.work_version[rank] += 1
        duration = self.work[rank] * (self.compute_slowdown if slowed else 1.0)
        self._push(self.now + duration, _END_BUSY, rank, self.work_version[rank])

    def _change_in_flight(self, rank: int, by: int) -> None:
        before = self.in_flight[rank]
        self.in_flight[rank] = before + by
        if self.compute_slowdown != 1.0 and self.working[rank] and (before > 0) != (before + by > 0):
            speed = 1.0 / self.compute_slowdown if before > 0 else 1.0
            self.work[rank] -= (self.now - self.work_last[rank]) * speed
            self.work_last[rank] = self.now
            self._schedule_busy(rank, before + by > 0)

    def _post(self, rank: int, step: int, link_id: int, sent: tuple[str, float] | None) -> None:
        link = self.links.get(link_id)
        if link is None:
            alone = self.fabric.alone_GBps[link_id] * BYTES_PER_US_PER_GBPS
            link = self.links[link_id] = _Link(self.gap_us * alone)
        steps = self.outstanding[rank]
        steps[step] = steps.get(step, 0) + 1
        if sent is not None:
            link.sends.append((rank, step, *sent))
        else:
            link.receives.append((rank, step))
        if not (link.sends and link.receives):
            return
        source, sender_step, slice_, size_bytes = link.sends.popleft()
        destination, receiver_step = link.receives.popleft()
        load_bytes = size_bytes + link.gap_bytes
        transfer = _Transfer(source, destination, sender_step, receiver_step, slice_, load_bytes)
        transfer.begin = self.now
        self._change_in_flight(source, 1)
        if destination != source:
            self._change_in_flight(destination, 1)
        link.queue.append(transfer)
        latency = self.fabric.latency_us[link_id]
        if latency > 0:
            self._push(self.now + latency, _LATENCY_OVER, (link_id, transfer))
        else:
            self._latency_over(link_id, transfer)

    def _latency_over(self, link_id: int, transfer: _Transfer) -> None:
        transfer.ready = True
        link = self.links[link_id]
        if link.active is None and link.queue[0] is transfer:
            link.queue.popleft()
            ports = self.fabric.ports[link_id]
            for port in ports:
                self.load[port] += 1
                self.flowing[port].add(link_id)
            self.touching[transfer.source].add(link_id)
            self.touching[transfer.destination].add(link_id)
            self._activate(link_id, link, transfer)
            self._reprice_sharers(link_id)

    def _activate(self, link_id: int, link: _Link, transfer: _Transfer) -> None:
        link.active = transfer
        link.remaining = transfer.load_bytes
        link.rate = 0.0
        link.last = self.now
        self._reprice(link_id)

    def _reprice_sharers(self, link_id: int) -> None:
        """The load of this link's ports changed: so did the rate of everybody who uses them."""
        ports = self.fabric.ports[link_id]
        sharers: set[int] = set()
        for port in ports:
            if len(self.flowing[port]) > 1 or link_id not in self.flowing[port]:
                sharers |= self.flowing[port]
        sharers.discard(link_id)
        for other in sorted(sharers):
            self._reprice(other)

    def _reprice(self, link_id: int) -> None:
        link = self.links[link_id]
        transfer = link.active
        if transfer is None:
            return
        fabric = self.fabric
        GBps = fabric.bandwidth_GBps[link_id]
        for port in fabric.ports[link_id]:
            share = fabric.port_GBps[port] / self.load[port]
            if share < GBps:
                GBps = share
        rate = GBps * BYTES_PER_US_PER_GBPS
        if self.transfer_slowdown != 1.0 and (self.busy[transfer.source] or self.busy[transfer.destination]):
            rate /= self.transfer_slowdown
        if rate == link.rate:
            return
        link.remaining -= link.rate * (self.now - link.last)
        link.last = self.now
        link.rate = rate
        link.version += 1
        self._push(self.now + max(link.remaining, 0.0) / rate, _END_TRANSFER, link_id, link.version)

    def _end_transfer(self, link_id: int) -> None:
        link = self.links[link_id]
        transfer = link.active
        assert transfer is not None
        link.active = None
        link.version += 1
        if self.record:
            self._record(transfer)
        if link.queue and link.queue[0].ready:
            self._activate(link_id, link, link.queue.popleft())
        else:
            for port in self.fabric.ports[link_id]:
                self.load[port] -= 1
                self.flowing[port].discard(link_id)
            self.touching[transfer.source].discard(link_id)
            self.touching[transfer.destination].discard(link_id)
            self._reprice_sharers(link_id)
        self._change_in_flight(transfer.source, -1)
        if transfer.destination != transfer.source:
            self._change_in_flight(transfer.destination, -1)
        self._done(transfer.source, transfer.sender_step)
        self._done(transfer.destination, transfer.receiver_step)

    def _done(self, rank: int, step: int) -> None:
        steps = self.outstanding[rank]
        steps[step] -= 1
        if steps[step] == 0:
            del steps[step]
            if self.waiting[rank] == step:
                self.waiting[rank] = None
                self._advance(rank)

    def _record(self, transfer: _Transfer) -> None:
        source, destination = transfer.source, transfer.destination
        self.spans.append(
            Span(
                source,
                Stream.COMM,
                f"send {transfer.slice} -> {destination}",
                transfer.begin,
                self.now,
                destination,
            )
        )
        self.spans.append(
            Span(
                destination,
                Stream.COMM,
                f"recv {transfer.slice} <- {source}",
                transfer.begin,
                self.now,
                source,
            )
        )
