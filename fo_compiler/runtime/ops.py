"""The ops that a rewritten graph calls.

    recv = fo_compiler::exchange(send, dst, src, group, label)   post a send and a receive together; returns at once
                                 [, shape=...]                   what is received is like what is sent, but for this shape
    data = fo_compiler::wait(recv, send)                         wait for both; `data` is `recv`, now filled
    done = fo_compiler::announce(tensor, records)                the first time: publish the records, compare ranks

`wait` takes the sent tensor too: it stays a live value of the graph until the transfer is done, so that no compiler
reuses its memory while it is being read. `wait` returns an alias of `recv`: what reads the data depends on the wait,
and no copy is made. Nothing is mutated, as far as the graph can see.

Inductor's Python programs call them without torch's dispatcher, as `exchange.direct` and so on (`call_directly`). A rank that
comes from its compute has cold caches: the way through the dispatcher to a Python function takes it 0.05 ms more then.

On a device with streams the graph says on which one a transfer runs (`runtime/streams.py`, `passes/streams.py`): `stream`
is where it is launched, `after` are the events that it runs behind, `event` is the one that it records.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ..errors import TransferError
from ..records import is_recording, publish_payload
from ..torch_adapter import emits_direct_call, empty, profiling
from . import streams
from .failures import transfer_failure
from .late_flags import check_late_flags
from .profile import transfer_range
from .transport import Transfer, Transport, current_transport

_LIBRARY = torch.library.Library("fo_compiler", "DEF")
# A transfer is ordered by the graph, and takes any strides: what is sent is made contiguous below.
_LIBRARY.define(
    "exchange(Tensor send, int dst, int src, str group_name, str label, *, "
    "SymInt[]? shape=None, int stream=0, int[] after=[], int event=-1, str transport='c10d') -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.define("wait(Tensor(a) recv, Tensor sent, *, int[] after=[]) -> Tensor(a)", tags=(torch.Tag.flexible_layout,))
# It takes a tensor to know the device, and returns one without elements: Inductor keeps no order behind an op that has no result.
_LIBRARY.define("announce(Tensor anchor, str records) -> Tensor", tags=(torch.Tag.flexible_layout,))
# The device is said, as this may be imported inside of torch.device("meta").
_ANNOUNCED = torch.empty(0, dtype=torch.uint8, device="cpu")


class _InFlight(weakref.ref[Tensor]):
    """A transfer, until it is awaited, or its receive buffer is no more: then the step has failed half-way.

    It is the reference to that buffer itself, so that there is one object to make for each transfer.
    """

    __slots__ = ("address", "group_name", "label", "transfer")
    address: int
    transfer: Transfer
    label: str
    group_name: str


# Address of the receive buffer's storage, which is that of the buffer unless it is empty -> its transfer. Threads add and take
# items of their own: a dict needs no lock.
_pending: dict[int, _InFlight] = {}


@dataclass
class _Launched:
    """A transfer that a side stream has been given: its event says when it is done, and the host waits for nothing."""

    sent: Tensor | None  # alive until the event is waited for; it may be a contiguous copy
    device: torch.device
    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


def _exchange(
    send: Tensor,
    dst: int,
    src: int,
    group_name: str,
    label: str,
    *,
    shape: Sequence[int] | None = None,
    stream: int = streams.CALLER,
    after: Sequence[int] = (),
    event: int = streams.NO_EVENT,
    transport: str = "c10d",
) -> Tensor:
    shape = send.shape if shape is None else shape
    recv = empty(shape, send)
    if 0 in shape:  # never without memory, so that the address of an empty buffer is its own, too
        recv = empty((1,), send)[:0].view(shape)
    sent = send if send.is_contiguous() else send.contiguous()
    outgoing, incoming = (sent, dst) if dst >= 0 else None, (recv, src) if src >= 0 else None
    way = current_transport(transport)
    transfer: Transfer
    try:
        # Not asked within the range: with cold caches a context that does nothing takes 0.01 ms.
        if event == streams.NO_EVENT and not profiling():
            transfer = way.post(group_name, outgoing, incoming)
        else:
            with transfer_range("post", label, recv):
                transfer = _post(way, group_name, outgoing, incoming, send.device, stream, after, event)
    except RuntimeError as error:
        raise transfer_failure("could not be started", label, group_name, error) from error
    entry = _InFlight(recv, _drop)
    address = recv.data_ptr() or recv.untyped_storage().data_ptr()
    entry.address, entry.transfer, entry.label, entry.group_name = address, transfer, label, group_name
    _pending[address] = entry
    return recv


def _post(
    way: Transport,
    group_name: str,
    outgoing: tuple[Tensor, int] | None,
    incoming: tuple[Tensor, int] | None,
    device: torch.device,
    stream: int,
    after: Sequence[int],
    event: int,
) -> Transfer:
    if event == streams.NO_EVENT:
        return way.post(group_name, outgoing, incoming)
    with streams.launch(device, stream, after, event):
        way.post(group_name, outgoing, incoming).wait()  # the side stream waits
    return _Launched(outgoing and outgoing[0], device, streams.recorded(device, event))


def _drop(entry: _InFlight) -> None:
    """Forget a transfer whose buffer is no more; a side stream that still writes to it comes before what is next there."""
    if _pending.pop(entry.address, None) is not None and isinstance(entry.transfer, _Launched):
        entry.transfer.wait()


def _wait(recv: Tensor, sent: Tensor, *, after: Sequence[int] = ()) -> Tensor:
    return _await(recv, sent, after=after).detach()  # the cheapest alias: an op may not return an input itself


def _await(recv: Tensor, sent: Tensor, *, after: Sequence[int] = ()) -> Tensor:
    """Wait for the transfer of a receive buffer, and return the buffer."""
    entry = _pending.pop(recv.data_ptr(), None) or _pending.pop(recv.untyped_storage().data_ptr(), None)
    if entry is None:
        raise TransferError(
            f"waited for a transfer that is not pending (a tensor of shape {tuple(recv.shape)}): "
            "either it was awaited twice, or its exchange did not run."
        )
    try:
        if after or profiling():
            with transfer_range("wait", entry.label, recv):
                if after:
                    streams.join(recv.device, after)
                else:
                    entry.transfer.wait()
        else:
            entry.transfer.wait()
    except RuntimeError as error:
        raise transfer_failure("failed", entry.label, entry.group_name, error) from error
    return recv


def _exchange_fake(send: Tensor, *_: object, shape: Sequence[int] | None = None, **__: object) -> Tensor:
    return torch.empty(send.shape if shape is None else shape, dtype=send.dtype, device=send.device)


def _announce(anchor: Tensor, records: str) -> Tensor:
    check_late_flags()
    transport = current_transport()
    groups = None if is_recording() else transport.agreements.agreed(records)
    if groups is None:
        publish_payload(records)
        groups = transport.agreements.before_run(transport, records)
    if groups:
        transport.begin(groups)
    return _ANNOUNCED if anchor.is_cpu else _announce_fake(anchor, records)


def _announce_fake(anchor: Tensor, records: str) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=anchor.device)


def _alias(tensor: Tensor, *_: object, **__: object) -> Tensor:
    alias: Tensor = torch.ops.aten.alias.default(tensor)  # an op may not return an input itself
    return alias


def pending_transfers() -> list[str]:
    """Labels of the transfers in flight, for tests and for reports: empty between steps."""
    return [entry.label for entry in list(_pending.values())]


_LIBRARY.impl("exchange", _exchange, "CompositeExplicitAutograd")
_LIBRARY.impl("wait", _wait, "CompositeExplicitAutograd")
_LIBRARY.impl("announce", _announce, "CompositeExplicitAutograd")
torch.library.register_fake("fo_compiler::exchange", _exchange_fake, lib=_LIBRARY)
torch.library.register_fake("fo_compiler::wait", _alias, lib=_LIBRARY)
torch.library.register_fake("fo_compiler::announce", _announce_fake, lib=_LIBRARY)

exchange = torch.ops.fo_compiler.exchange.default
wait = torch.ops.fo_compiler.wait.default
announce = torch.ops.fo_compiler.announce.default
has_side_effect(announce)  # nobody reads its result
# What a program of Inductor calls in their place: see `call_directly`.
_DIRECT: dict[torch._ops.OpOverload, Callable[..., Any]] = {exchange: _exchange, wait: _await, announce: _announce}
for _op, _function in _DIRECT.items():
    _op._overloadpacket.direct = _function  # type: ignore[attr-defined]


def call_directly() -> None:
    """From now on, Inductor's Python programs call the ops of this module as the Python functions that they are."""
    for op in _DIRECT:
        emits_direct_call(op)
