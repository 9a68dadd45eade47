"""An all-gather and its matmul as one op: the transfers of all steps, and one kernel that takes slices as they arrive.

    out = fo_compiler::gather_matmul(own, b, order, posts, group, labels)

    own     this rank's slices [rows, K], in the order of their parts
    b       [K, N]
    order   (slice, own part or -1) of each slice, in the order in which they are computed
    posts   (slice sent, to, slice received, from) of each step, -1 where there is none
    labels  of each step, for errors and profiles
    out     [slices * rows, N], slice by slice

    communication     [transfer 0][flag][transfer 1][flag] ...
    caller's stream   [own tiles | tiles of slice 1, which wait for its flag | ...                ][join]

On CUDA with the copy engine it is `codegen/kernels/whole_gather.py`: the flag of a slice is raised on the communication stream
behind the transfer that brought it. Anywhere else it is the same program slice by slice.

The kernel holds multiprocessors while it waits. Signals of the copy engine and flags are kernels, so some are left to them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import streams
from .failures import transfer_failure
from .late_flags import LateFlags
from .profile import transfer_range
from .transport import Transport, current_transport

_LIBRARY = torch.library.Library("fo_compiler", "FRAGMENT")
_LIBRARY.define(
    "gather_matmul(Tensor[] own, Tensor b, int[] order, int[] posts, str group_name, str[] labels, *, "
    "str transport='c10d') -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEFT_FREE = 8  # multiprocessors for signals and flags, a block each
_of_thread = threading.local()


@dataclass(frozen=True)
class Step:
    """The transfers of one step: slices and peers, -1 where there is none."""

    sent: int
    to: int
    received: int
    source: int
    label: str


@dataclass(frozen=True)
class Plan:
    """A region as the op's arguments say it."""

    order: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]
    group_name: str

    @staticmethod
    def of(order: Sequence[int], posts: Sequence[int], group_name: str, labels: Sequence[str]) -> Plan:
        steps = zip(posts[::4], posts[1::4], posts[2::4], posts[3::4], labels, strict=True)
        return Plan(tuple(zip(order[::2], order[1::2], strict=True)), tuple(Step(*s) for s in steps), group_name)

    def own(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        return {slice_: parts[part] for slice_, part in self.order if part >= 0}


def _gather_matmul(
    own: Sequence[Tensor],
    b: Tensor,
    order: Sequence[int],
    posts: Sequence[int],
    group_name: str,
    labels: Sequence[str],
    *,
    transport: str = "c10d",
) -> Tensor:
    plan, way = Plan.of(order, posts, group_name, labels), current_transport(transport)
    if b.is_cuda and transport == "copy_engine" and b.dtype in DTYPES:
        return in_one_kernel(plan, own, b, way)
    return slice_by_slice(plan, own, b, way)


def slice_by_slice(plan: Plan, own: Sequence[Tensor], b: Tensor, way: Transport) -> Tensor:
    """The plain form, and what the kernel is compared with."""
    held = {slice_: part.contiguous() for slice_, part in plan.own(own).items()}
    rows, cols = own[0].shape[0], b.shape[1]
    out = b.new_empty(len(plan.order), rows, cols)
    steps = iter(plan.steps)

    def advance(step: Step) -> None:
        buffer = torch.empty_like(own[0], memory_format=torch.contiguous_format)
        _transfer(step, held, buffer, plan.group_name, way)
        if step.source >= 0:
            held[step.received] = buffer

    for slice_, _ in plan.order:
        while slice_ not in held:
            advance(next(steps))
        torch.mm(held[slice_], b, out=out[slice_])
    for step in steps:  # what only leaves
        advance(step)
    return out.view(-1, cols)


def _transfer(step: Step, held: dict[int, Tensor], buffer: Tensor, group_name: str, way: Transport) -> None:
    """One step, to its end on the current stream."""
    outgoing = (held[step.sent], step.to) if step.to >= 0 else None
    incoming = (buffer, step.source) if step.source >= 0 else None
    try:
        with transfer_range("post", step.label, buffer):
            way.post(group_name, outgoing, incoming).wait()
    except RuntimeError as error:
        raise transfer_failure("failed", step.label, group_name, error) from error


class _Flags:
    """Flags of a region on the stream of one caller, whose steps follow each other: made once, never reset."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        count = len(plan.order)
        brings = {step.received: step.label for step in plan.steps if step.source >= 0}
        self.flags = torch.zeros(count, dtype=torch.int32, device=device)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.order = torch.tensor(plan.order, dtype=torch.int32).to(device)
        self.addresses = torch.tensor([self.flags[s].data_ptr() for s in range(count)]).to(device)
        self.late = LateFlags([brings.get(s) for s in range(count)], plan.group_name, device)


def _flags_of(plan: Plan, device: torch.device) -> _Flags:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    kept: dict[Any, _Flags] = _of_thread.__dict__.setdefault("flags", {})
    key = plan, str(device), stream
    if key not in kept:
        kept[key] = _Flags(plan, device)
    return kept[key]


def raise_flag(flags: _Flags, slice_: int) -> None:
    """Say that a slice is there, behind what the current stream holds."""
    from ..codegen.kernels.flags import set_flags

    set_flags(flags.addresses[slice_ : slice_ + 1], flags.epoch)


def in_one_kernel(
    plan: Plan,
    own: Sequence[Tensor],
    b: Tensor,
    way: Transport,
    beside: Callable[[torch.device, Callable[[], None]], AbstractContextManager[None]] = streams.beside,
    **launched: Any,
) -> Tensor:
    """One persistent kernel, while the transfers run `beside` it: on the communication stream.

    `launched` are arguments of the kernel's launch. Raises TransferError where an earlier step of the region gave up.
    """
    from ..codegen.kernels.whole_gather import all_gather_matmul

    flags = _flags_of(plan, b.device)
    flags.late.check()
    rows, depth = own[0].shape
    mine = own[0].contiguous()[None] if len(own) == 1 else torch.stack(list(own))
    gathered = b.new_empty(len(plan.order), rows, depth)
    out = b.new_empty(len(plan.order), rows, b.shape[1])
    held = plan.own(list(mine))
    held.update((step.received, gathered[step.received]) for step in plan.steps if step.source >= 0)
    flags.epoch.add_(1)

    def transfers() -> None:
        for step in plan.steps:
            _transfer(step, held, gathered[max(step.received, 0)], plan.group_name, way)
            if step.source >= 0:
                raise_flag(flags, step.received)

    if b.is_cuda:
        free = torch.cuda.get_device_properties(b.device).multi_processor_count - LEFT_FREE
        launched = {"programs": max(1, free), "allow_tf32": torch.backends.cuda.matmul.allow_tf32, **launched}
    with beside(b.device, transfers):
        all_gather_matmul(mine, gathered, b, out, flags.order, flags.flags, flags.epoch, flags.late.marks, **launched)
        flags.late.watch()
    return out.view(-1, b.shape[1])


def _fake(own: Sequence[Tensor], b: Tensor, order: Sequence[int], *_: object, **__: object) -> Tensor:
    return b.new_empty(len(order) // 2 * own[0].shape[0], b.shape[1])


_LIBRARY.impl("gather_matmul", _gather_matmul, "CompositeExplicitAutograd")
torch.library.register_fake("fo_compiler::gather_matmul", _fake, lib=_LIBRARY)

gather_matmul = torch.ops.fo_compiler.gather_matmul.default
