"""A matmul and its reduce-scatter as one op: one kernel, and the transfers of all steps, each behind the flag of its slice.

    out = fo_compiler::matmul_scatter(a, b, dtype, order, posts, group, labels)

    a       all slices [S, rows, K] or [S, outer, inner, K], any strides
    b       [K, N]
    dtype   of the sums, here and as they travel
    order, posts, labels    the plan (`whole_plan.py`). What a step receives is a partial sum of the slice that is named there
    out     this rank's slices [parts * rows, N], in the order of their parts

    caller's stream   [tiles of slice 0 | tiles of slice 1 | ... | own tiles, which wait for what is added ][join]
    communication     [wait for flag 0][transfer 0][flag] ... [wait for flag 1][transfer 1][flag] ...

On CUDA with the copy engine it is `codegen/kernels/whole_scatter.py`. The kernel raises the flag of a slice when it is done. The
communication stream waits for that (a kernel of one block), transfers, and raises the flag of what arrived. The kernel adds that
to its own product in float32, and rounds once. Anywhere else it is the same program slice by slice.

Kernel and transfers wait for each other, so nothing that either needs may have to wait for the kernel's end:
- the kernel is launched first: where streams share a queue of the device, a wait in front of it would hold it up for good
- memory and kernels of the transfers are made before: to load a kernel may take an idle device (CUDA's lazy loading)
- the tables of addresses are made on the device: no copy from the host, so a captured graph can be replayed
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from . import streams
from .transport import Transport, current_transport
from .whole_plan import Beside, Flags, Plan, in_one_kernel_here, kept, launch_arguments, transfer

_LIBRARY = torch.library.Library("fo_compiler", "FRAGMENT")
_LIBRARY.define(
    "matmul_scatter(Tensor a, Tensor b, ScalarType dtype, int[] order, int[] posts, str group_name, str[] labels, *, "
    "str transport='c10d') -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)


def _matmul_scatter(
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    order: Sequence[int],
    posts: Sequence[int],
    group_name: str,
    labels: Sequence[str],
    *,
    transport: str = "c10d",
) -> Tensor:
    plan, way = Plan.of(order, posts, group_name, labels), current_transport(transport)
    return (in_one_kernel if in_one_kernel_here(b, transport) else slice_by_slice)(plan, a, b, dtype, way)


def slice_by_slice(plan: Plan, a: Tensor, b: Tensor, dtype: torch.dtype, way: Transport) -> Tensor:
    """The plain form, and what the kernel is compared with: 16-bit sums are added in float32."""
    wide = torch.promote_types(dtype, torch.float32)
    arrived: dict[int, list[Tensor]] = {slice_: [] for slice_, _ in plan.order}
    done: dict[int, Tensor] = {}
    slices = iter(plan.order)

    def compute() -> None:
        slice_, _ = next(slices)
        total = torch.mm(a[slice_].flatten(0, -2), b).to(wide)
        for partial_sum in arrived[slice_]:
            total = total + partial_sum.to(wide)
        done[slice_] = total.to(dtype)

    for step in plan.steps:
        while step.to >= 0 and step.sent not in done:
            compute()
        buffer = b.new_empty(a[0].numel() // a.shape[-1], b.shape[1], dtype=dtype)
        transfer(step, done.get(step.sent), buffer, plan, way)
        if step.source >= 0:
            arrived[step.received].append(buffer)
    while len(done) < len(plan.order):  # the own ones, which stay
        compute()
    return torch.cat([done[slice_] for slice_ in plan.own_slices])


_KERNEL_FIRST: Beside = partial(streams.beside, body_first=False)


class _Flags(Flags):
    """A flag a slice for the kernel to raise, then one for each partial sum that arrives; and the kernel's tables.

    Partial sums are numbered as the kernel adds them. The tables hold offsets in bytes: of own slices in what is kept, of all
    else in what moves, which is first the slices that leave, then what arrives.
    """

    def __init__(self, plan: Plan, slice_bytes: int, device: torch.device) -> None:
        slices, own = len(plan.order), plan.own_slices
        leaves = {step.sent: step.label for step in plan.steps if step.to >= 0}
        arrivals = {slice_: plan.steps_into(slice_) for slice_, _ in plan.order}
        self.arrivals = [step for steps in arrivals.values() for step in steps]
        self.moving = {slice_: place for place, slice_ in enumerate(leaves)}
        super().__init__(
            [
                *(label and f"{label} (its slice was not computed)" for label in map(leaves.get, range(slices))),
                *(plan.steps[step].label for step in self.arrivals),
            ],
            plan.group_name,
            device,
        )
        flags, first = self.addresses.tolist(), 0
        groups: list[tuple[int, ...]] = []
        for slice_, steps in arrivals.items():
            place, flag = (own.index(slice_), 0) if slice_ in own else (self.moving[slice_], flags[slice_])
            groups.append((slice_, place * slice_bytes, flag, first, len(steps)))
            first += len(steps)
        adds = [((len(leaves) + i) * slice_bytes, flags[slices + i]) for i in range(len(self.arrivals))]
        kept = [(0, int(slice_ in own), 0, 0, 0) for slice_ in arrivals] + [(0, 0)] * len(adds)
        moving = [(0, int(slice_ not in own), 0, 0, 0) for slice_ in arrivals] + [(1, 0)] * len(adds)
        self._table, self._kept, self._moving = (
            torch.tensor([number for row in rows for number in row]).to(device)
            for rows in ([*groups, *adds], kept, moving)
        )
        self.counters = torch.zeros(slices, dtype=torch.int32, device=device)
        # At epoch 0 every flag is up: this only loads the kernels.
        self.set(0)
        self.wait(0)

    @property
    def late_arrivals(self) -> Tensor:
        return self.late.marks[len(self.counters) :]

    def tables(self, out: Tensor, moving: Tensor) -> tuple[Tensor, Tensor | None]:
        """`groups` and `adds` of the kernel, for where things lie in this step: `scatter_tables`, without the host."""
        table = torch.add(self._table, self._kept, alpha=out.data_ptr())
        table = torch.add(table, self._moving, alpha=moving.data_ptr())
        groups, adds = table.split([5 * len(self.counters), 2 * len(self.arrivals)])
        return groups.view(-1, 5), adds.view(-1, 2) if self.arrivals else None


def in_one_kernel(
    plan: Plan,
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    way: Transport,
    beside: Beside = _KERNEL_FIRST,
    **launched: Any,
) -> Tensor:
    """One persistent kernel, while the transfers run `beside` it: on the communication stream.

    `launched` are arguments of the kernel's launch. Raises TransferError where an earlier step of the region gave up.
    """
    from ..codegen.kernels.whole_scatter import matmul_reduce_scatter

    block = (*a.shape[1:-1], b.shape[1])
    slice_bytes = prod(block) * dtype.itemsize
    flags = kept((plan, slice_bytes), b.device, lambda: _Flags(plan, slice_bytes, b.device))
    flags.late.check()
    out = b.new_empty(len(plan.own_slices), *block, dtype=dtype)
    moving = b.new_empty(len(flags.moving) + len(flags.arrivals), *block, dtype=dtype)
    leaving, arriving = moving.flatten(1, -2).split([len(flags.moving), len(flags.arrivals)])
    groups, adds = flags.tables(out, moving)
    way.prepare(plan.group_name, moving)
    flags.epoch.add_(1)

    def transfers() -> None:
        for index, step in enumerate(plan.steps):
            if step.to >= 0:
                flags.wait(step.sent)
            outgoing = leaving[flags.moving[step.sent]] if step.to >= 0 else None
            arrival = flags.arrivals.index(index) if step.source >= 0 else 0
            transfer(step, outgoing, arriving[arrival], plan, way)
            if step.source >= 0:
                flags.set(len(plan.order) + arrival)

    launched = {**launch_arguments(b.device), "polls": flags.polls, "aligned": slice_bytes % 16 == 0, **launched}
    with beside(b.device, transfers):
        matmul_reduce_scatter(
            a, b, out[0], groups, adds, flags.counters, flags.epoch, flags.late_arrivals, **launched
        )  # fmt: skip
        flags.late.watch()  # of the kernel: transfers with a peer that died may never end
    flags.late.watch()
    return out.view(-1, b.shape[1])


def _fake(a: Tensor, b: Tensor, dtype: torch.dtype, order: Sequence[int], *_: object, **__: object) -> Tensor:
    parts = sum(part >= 0 for part in order[1::2])
    return b.new_empty(parts * prod(a.shape[1:-1]), b.shape[1], dtype=dtype)


_LIBRARY.impl("matmul_scatter", _matmul_scatter, "CompositeExplicitAutograd")
torch.library.register_fake("fo_compiler::matmul_scatter", _fake, lib=_LIBRARY)

matmul_scatter = torch.ops.fo_compiler.matmul_scatter.default
