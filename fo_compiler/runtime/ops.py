"""The ops that a rewritten graph calls.

    recv = fo_compiler::exchange(send, dst, src, group, label)   post a send and a receive together; returns at once
    data = fo_compiler::wait(recv, send)                         wait for both; `data` is `recv`, now filled
    done = fo_compiler::announce(tensor, records)                the first time: publish the records, compare ranks

`wait` takes the sent tensor too: it stays a live value of the graph until the transfer is done, so that no compiler
reuses its memory while it is being read. `wait` returns an alias of `recv`: what reads the data depends on the wait,
and no copy is made. Nothing is mutated, as far as the graph can see.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ..errors import TransferError
from ..records import GraphRecords, payload_key, publish_payload
from .agreement import decisions, groups_of
from .transport import Transfer, current_transport

_LIBRARY = torch.library.Library("fo_compiler", "DEF")
# A transfer is ordered by the graph, and takes any strides: what is sent is made contiguous below.
_LIBRARY.define(
    "exchange(Tensor send, int dst, int src, str group_name, str label) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.define("wait(Tensor(a) recv, Tensor sent) -> Tensor(a)", tags=(torch.Tag.flexible_layout,))
# Its result says that it ran; it only takes a tensor to know the device.
_LIBRARY.define("announce(Tensor anchor, str records) -> Tensor", tags=(torch.Tag.flexible_layout,))

# Address of the receive buffer's storage -> its transfer. Threads add and take items of their own: a dict needs no lock.
_pending: dict[int, tuple[Transfer, str]] = {}


def _exchange(send: Tensor, dst: int, src: int, group_name: str, label: str) -> Tensor:
    recv = torch.empty(send.shape, dtype=send.dtype, device=send.device)
    if not recv.numel():  # never without memory, so that the address of an empty buffer is its own, too
        recv = torch.empty(1, dtype=send.dtype, device=send.device)[:0].view(send.shape)
    try:
        transfer = current_transport().post(
            group_name,
            (send if send.is_contiguous() else send.contiguous(), dst) if dst >= 0 else None,
            (recv, src) if src >= 0 else None,
        )
    except RuntimeError as error:
        raise _failure("could not be started", label, error) from error
    _pending[_address(recv)] = (transfer, label)
    return recv


def _wait(recv: Tensor, sent: Tensor) -> Tensor:
    entry = _pending.pop(_address(recv), None)
    if entry is None:
        raise TransferError(
            f"waited for a transfer that is not pending (a tensor of shape {tuple(recv.shape)}): "
            "either it was awaited twice, or its exchange did not run."
        )
    transfer, label = entry
    try:
        transfer.wait()
    except RuntimeError as error:
        raise _failure("failed", label, error) from error
    return recv.detach()  # an alias, made with the least overhead


def _address(recv: Tensor) -> int:
    return recv.untyped_storage().data_ptr()


def _failure(what: str, label: str, cause: BaseException) -> TransferError:
    return TransferError(
        f"transfer {what}: {label}. Cause: {cause}. A peer died, was too late for the process group's "
        "timeout, or runs another program; look at the first error among the ranks."
    )


def _exchange_fake(send: Tensor, dst: int, src: int, group_name: str, label: str) -> Tensor:
    return torch.empty(send.shape, dtype=send.dtype, device=send.device)


def _announce(anchor: Tensor, records: str) -> Tensor:
    publish_payload(records)
    transport = current_transport()
    if transport.agreements.is_new(payload_key(records)):
        graph = GraphRecords.from_payload(records)
        if graph.agreement != "off":
            for group_name, of_group in groups_of(graph).items():
                transport.agree(group_name, decisions(of_group))
    return _announce_fake(anchor, records)


def _announce_fake(anchor: Tensor, records: str) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device=anchor.device)


def _alias(tensor: Tensor, *_: object) -> Tensor:
    alias: Tensor = torch.ops.aten.alias.default(tensor)  # an op may not return an input itself
    return alias


def pending_transfers() -> list[str]:
    """Labels of the transfers in flight, for tests and for reports: empty between steps."""
    return [label for _, label in list(_pending.values())]


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
