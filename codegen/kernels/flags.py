"""Flags: how a kernel learns that a slice has arrived, and says that one is ready to leave.

A flag is an int32 in device memory, one a slice. It holds the *epoch* (number of the step) whose data is complete, and is never
reset: whoever waits for epoch e waits until flag - e >= 0, in wrapping arithmetic. The epoch itself is read from device memory,
so that a captured CUDA graph can be replayed: an `epoch.add_(1)` on the stream starts a step.

Semantics (PTX ISA, "Memory Consistency Model"):

- set   `st.release.sys`: all writes of the block (through its barrier) and all writes that it has acquired become visible to
        whoever acquires the flag, on this GPU, another GPU or the host.
- wait  `ld.acquire.sys` until the value has come, by every thread; then a barrier. No later read of the block comes before it.

The data must be read by ordinary loads or `cp.async` (the generic proxy). TMA reads through the async proxy, which an acquire
does not order: kernels that wait use no TMA for what they wait for.

A wait gives up after `polls` loads, so that a peer that died ends in an error rather than in a hang; a load takes about a
microsecond, so the default of 2^24 is some ten seconds (`whole_plan.polls_within` counts them from a group's time-out). What is
computed then is wrong, and the slice, with those that the same block awaits after it, is marked in `late`, which the host
checks (`fo_compiler/runtime/late_flags.py`).

The host side: a copy-engine transfer into the slice, then a set on the same stream.
"""

from __future__ import annotations

import torch
import triton.language as tl  # type: ignore[import-untyped]

from ...errors import KernelError
from ..launch import Launch
from .language import INTERPRETED, jit, jit_for_any_address

POLLS = 1 << 24


@jit
def load_flag(flag: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    """The value of a flag; what was released with it may be read by this thread from here on."""
    if PLAIN:  # the interpreter has no PTX, and one memory
        value = tl.load(flag, volatile=True)
    else:
        value = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [flag], dtype=tl.int32, is_pure=False, pack=1
        )
    return value


@jit
def wait_flag(flag: tl.tensor, epoch: tl.tensor, polls: tl.tensor, PLAIN: tl.constexpr) -> tl.tensor:
    """Wait until `flag` has reached `epoch`. The number of polls that are left: 0 = it never came."""
    while (load_flag(flag, PLAIN) - epoch < 0) & (polls > 0):
        polls -= 1
    tl.debug_barrier()
    return polls


@jit
def set_flag(flag: tl.tensor, epoch: tl.tensor, PLAIN: tl.constexpr) -> None:
    """Raise `flag` to `epoch` once all threads of the block are here; one of them stores."""
    tl.debug_barrier()
    if PLAIN:
        tl.store(flag, epoch)
    else:
        tl.inline_asm_elementwise(
            """{
                .reg .pred first;
                .reg .b32 thread;
                mov.b32 thread, %tid.x;
                setp.eq.b32 first, thread, 0;
                @first st.release.sys.global.b32 [$1], $2;
                mov.b32 $0, 0;
            }""",
            "=r,l,r",
            [flag, epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


# A step takes one flag of many, at any address, while a kernel runs that waits for it: nothing may have to be loaded then.
@jit_for_any_address("flags_ptr", "epoch_ptr", "late_ptr")
def wait_flags_kernel(
    flags_ptr: tl.tensor, epoch_ptr: tl.tensor, late_ptr: tl.tensor, polls: tl.tensor, PLAIN: tl.constexpr
) -> None:
    flag = tl.program_id(0)
    left = tl.cast(polls, tl.int32)  # a constant, where it is 1
    if wait_flag(flags_ptr + flag, tl.load(epoch_ptr), left, PLAIN) == 0:
        tl.store(late_ptr + flag, 1)


@jit_for_any_address("addresses_ptr", "epoch_ptr")
def set_flags_kernel(addresses_ptr: tl.tensor, epoch_ptr: tl.tensor, PLAIN: tl.constexpr) -> None:
    flag = tl.load(addresses_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    set_flag(flag, tl.load(epoch_ptr), PLAIN)


def wait_flags_launch(flags: torch.Tensor, epoch: torch.Tensor, late: torch.Tensor, polls: int = POLLS) -> Launch:
    """The launch of `wait_flags`."""
    check_int32(flags, "flags")
    check_int32(epoch, "epoch", 1)
    check_int32(late, "late", flags.numel())
    arguments = {"flags_ptr": flags, "epoch_ptr": epoch, "late_ptr": late, "polls": polls, "PLAIN": INTERPRETED}
    return Launch("wait_flags", wait_flags_kernel, (flags.numel(),), arguments, warps=1, stages=1)


def wait_flags(flags: torch.Tensor, epoch: torch.Tensor, late: torch.Tensor, *, polls: int = POLLS) -> None:
    """Hold the stream until every one of `flags` has reached `epoch`; mark those that never come in `late`.

    flags int32 [n], epoch int32 [1], late int32 [n]. One block a flag: the stream's kernel takes n of the GPU's block slots.
    Plain form: `while (flags - epoch < 0).any(): pass`. Raises KernelError for other dtypes or sizes.
    """
    wait_flags_launch(flags, epoch, late, polls).run()


def set_flags_launch(addresses: torch.Tensor, epoch: torch.Tensor) -> Launch:
    """The launch of `set_flags`."""
    if addresses.dtype != torch.int64:
        raise KernelError.wrong("addresses", "int64", addresses.dtype)
    check_int32(epoch, "epoch", 1)
    arguments = {"addresses_ptr": addresses, "epoch_ptr": epoch, "PLAIN": INTERPRETED}
    return Launch("set_flags", set_flags_kernel, (addresses.numel(),), arguments, warps=1, stages=1)


def set_flags(addresses: torch.Tensor, epoch: torch.Tensor) -> None:
    """Raise the flags at `addresses` (int64 [n], of flags here or mapped from a peer) to `epoch` (int32 [1]).

    Everything that ran before on the stream is visible to whoever then sees a flag. Raises KernelError for other dtypes.
    """
    set_flags_launch(addresses, epoch).run()


def check_int32(tensor: torch.Tensor, name: str, size: int | None = None) -> None:
    """Raises KernelError unless `tensor` is a contiguous int32 [size]."""
    fits = size is None or tensor.numel() == size
    if tensor.dtype != torch.int32 or not fits or not tensor.is_contiguous():
        expected = "a contiguous int32 tensor" + ("" if size is None else f" of {size}")
        raise KernelError.wrong(name, expected, f"{tensor.dtype} of shape {tuple(tensor.shape)}")
