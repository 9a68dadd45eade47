"""The ops that a rewritten graph calls.

    recv = fo_compiler::exchange(send, dst, src, group, label)   post a send and a receive together; returns at once
                                 [, shape=...]                   what is received is like what is sent, but for this shape
    data = fo_compiler::wait(recv, send)                         wait for both; `data` is `recv`, now filled
    done = fo_compiler::announce(tensor, records)                the first time: publish the records, compare ranks

`wait` takes the sent tensor too: it stays a live value of the graph until the transfer is done, so that no compiler
reuses its memory while it is being read. `wait` returns an alias of `recv`: what reads the data depends on the wait,
and no copy is made. Nothing is mutated, as far as the graph can see.

On a device with streams the graph says on which one a transfer runs (`runtime/streams.py`, `passes/streams.py`): `stream`
is where it is launched, `after` are the events that it runs behind, `event` is the one that it records.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ..errors import TransferError
from ..records import is_recording, publish_payload
from . import streams
from .failures import transfer_failure
from .late_flags import check_late_flags
from .profile import transfer_range
from .transport import Transfer, current_transport

_LIBRARY = torch.library.Library("fo_compiler", "DEF")
# A transfer is ordered by the graph, and takes any strides: what is sent is made contiguous below.
_LIBRARY.define(
    "exchange(Tensor send, int dst, int src, str group_name, str label, *, "
    "SymInt[]? shape=None, int stream=0, int[] after=[], int event=-1, str transport='c10d') -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.define("wait(Tensor(a) recv, Tensor sent, *, int[] after=[]) -> Tensor(a)", tags=(torch.Tag.flexible_layout,))
# Its result says that it ran; it only takes a tensor to know the device.
_LIBRARY.define("announce(Tensor anchor, str records) -> Tensor", tags=(torch.Tag.flexible_layout,))


class _InFlight(NamedTuple):
    """A transfer, until it is awaited, or its receive buffer is no more: then the step has failed half-way."""

    transfer: Transfer
    label: str
    group_name: str
    buffer: weakref.ref[Tensor]  # takes this out of the table


# Address of the receive buffer's storage -> its transfer. Threads add and take items of their own: a dict needs no lock.
_pending: dict[int, _InFlight] = {}


@dataclass
class _Launched:
    """A transfer that a side stream has been given: its event says when it is done, and the host waits for nothing."""

    sent: Tensor  # alive until the event is waited for; it may be a contiguous copy
    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream(self.sent.device).wait_event(self.event)


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
    recv = torch.empty(shape, dtype=send.dtype, device=send.device)
    if not recv.numel():  # never without memory, so that the address of an empty buffer is its own, too
        recv = torch.empty(1, dtype=send.dtype, device=send.device)[:0].view(shape)
    sent = send if send.is_contiguous() else send.contiguous()
    outgoing, incoming = (sent, dst) if dst >= 0 else None, (recv, src) if src >= 0 else None
    way = current_transport(transport)
    transfer: Transfer
    try:
        with transfer_range("post", label, recv):
            if event == streams.NO_EVENT:
                transfer = way.post(group_name, outgoing, incoming)
            else:
                with streams.launch(send.device, stream, after, event):
                    way.post(group_name, outgoing, incoming).wait()  # the side stream waits
                transfer = _Launched(sent, streams.recorded(send.device, event))
    except RuntimeError as error:
        raise transfer_failure("could not be started", label, group_name, error) from error
    address = _address(recv)
    buffer = weakref.ref(recv, lambda _: _drop(address))
    _pending[address] = _InFlight(transfer, label, group_name, buffer)
    return recv


def _drop(address: int) -> None:
    """Forget a transfer whose buffer is no more; a side stream that still writes to it comes before what is next there."""
    entry = _pending.pop(address, None)
    if entry is not None and isinstance(entry.transfer, _Launched):
        entry.transfer.wait()


def _wait(recv: Tensor, sent: Tensor, *, after: Sequence[int] = ()) -> Tensor:
    entry = _pending.pop(_address(recv), None)
    if entry is None:
        raise TransferError(
            f"waited for a transfer that is not pending (a tensor of shape {tuple(recv.shape)}): "
            "either it was awaited twice, or its exchange did not run."
        )
    try:
        with transfer_range("wait", entry.label, recv):
            if after:
                streams.join(recv.device, after)
            else:
                entry.transfer.wait()
    except RuntimeError as error:
        raise transfer_failure("failed", entry.label, entry.group_name, error) from error
    return recv.detach()  # an alias, made with the least overhead


def _address(recv: Tensor) -> int:
    return recv.untyped_storage().data_ptr()


def _exchange_fake(send: Tensor, *_: object, shape: Sequence[int] | None = None, **__: object) -> Tensor:
    return torch.empty(send.shape if shape is None else shape, dtype=send.dtype, device=send.device)


def _announce(anchor: Tensor, records: str) -> Tensor:
    check_late_flags()
    transport = current_transport()
    if is_recording() or not transport.agreements.is_settled(records):
        publish_payload(records)
        transport.begin(transport.agreements.before_run(transport, records))
    return _announce_fake(anchor, records)


def _announce_fake(anchor: Tensor, records: str) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device=anchor.device)


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
