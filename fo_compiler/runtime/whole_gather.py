"""An all-gather and its matmul as one op: the transfers of all steps, and one kernel that takes slices as they arrive.

    out = fo_compiler::gather_matmul(own, b, order, posts, group, labels)

    own     this rank's slices [rows, K], in the order of their parts
    b       [K, N]
    order, posts, labels    the plan (`whole_plan.py`)
    out     [slices * rows, N], slice by slice

    communication     [transfer 0][flag][transfer 1][flag] ...
    caller's stream   [own tiles | tiles of slice 1, which wait for its flag | ...                ][join]

On CUDA with the copy engine it is `codegen/kernels/whole_gather.py`: the flag of a slice is raised on the communication stream
behind the transfer that brought it. Anywhere else it is the same program slice by slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import streams
from .transport import Transport, current_transport
from .whole_plan import Beside, Flags, Plan, Step, in_one_kernel_here, kept, launch_arguments, transfer

_LIBRARY = torch.library.Library("fo_compiler", "FRAGMENT")
_LIBRARY.define(
    "gather_matmul(Tensor[] own, Tensor b, int[] order, int[] posts, str group_name, str[] labels, *, "
    "str transport='c10d') -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)


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
    return (in_one_kernel if in_one_kernel_here(b, transport) else slice_by_slice)(plan, own, b, way)


def slice_by_slice(plan: Plan, own: Sequence[Tensor], b: Tensor, way: Transport) -> Tensor:
    """The plain form, and what the kernel is compared with."""
    held = {slice_: part.contiguous() for slice_, part in zip(plan.own_slices, own, strict=True)}
    rows, cols = own[0].shape[0], b.shape[1]
    out = b.new_empty(len(plan.order), rows, cols)
    steps = iter(plan.steps)

    def advance(step: Step) -> None:
        buffer = torch.empty_like(own[0], memory_format=torch.contiguous_format)
        transfer(step, held.get(step.sent), buffer, plan, way)
        if step.source >= 0:
            held[step.received] = buffer

    for slice_, _ in plan.order:
        while slice_ not in held:
            advance(next(steps))
        torch.mm(held[slice_], b, out=out[slice_])
    for step in steps:  # what only leaves
        advance(step)
    return out.view(-1, cols)


class _Flags(Flags):
    """A flag a slice, and the order of the slices where the kernel reads it."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        brings = {step.received: step.label for step in plan.steps if step.source >= 0}
        super().__init__([brings.get(slice_) for slice_ in range(len(plan.order))], plan.group_name, device)
        self.order = torch.tensor(plan.order, dtype=torch.int32).to(device)


def in_one_kernel(
    plan: Plan, own: Sequence[Tensor], b: Tensor, way: Transport, beside: Beside = streams.beside, **launched: Any
) -> Tensor:
    """One persistent kernel, while the transfers run `beside` it: on the communication stream.

    `launched` are arguments of the kernel's launch. Raises TransferError where an earlier step of the region gave up.
    """
    from ..codegen.kernels.whole_gather import all_gather_matmul

    flags = kept(plan, b.device, lambda: _Flags(plan, b.device))
    flags.late.check()
    rows, depth = own[0].shape
    mine = own[0].contiguous()[None] if len(own) == 1 else torch.stack(list(own))
    gathered = b.new_empty(len(plan.order), rows, depth)
    out = b.new_empty(len(plan.order), rows, b.shape[1])
    held = dict(zip(plan.own_slices, mine, strict=True))
    held.update((step.received, gathered[step.received]) for step in plan.steps if step.source >= 0)
    flags.epoch.add_(1)

    def transfers() -> None:
        for step in plan.steps:
            transfer(step, held.get(step.sent), gathered[max(step.received, 0)], plan, way)
            if step.source >= 0:
                flags.set(step.received)

    launched = {**launch_arguments(b.device), "polls": flags.polls, **launched}
    with beside(b.device, transfers):
        all_gather_matmul(mine, gathered, b, out, flags.order, flags.flags, flags.epoch, flags.late.marks, **launched)
        flags.late.watch()
    return out.view(-1, b.shape[1])


def _fake(own: Sequence[Tensor], b: Tensor, order: Sequence[int], *_: object, **__: object) -> Tensor:
    return b.new_empty(len(order) // 2 * own[0].shape[0], b.shape[1])


_LIBRARY.impl("gather_matmul", _gather_matmul, "CompositeExplicitAutograd")
torch.library.register_fake("fo_compiler::gather_matmul", _fake, lib=_LIBRARY)

gather_matmul = torch.ops.fo_compiler.gather_matmul.default
