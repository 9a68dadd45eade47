"""What the ops of whole regions have in common: the plan that their arguments say, the transfers of a step, flags.

    order   (slice, own part or -1) of each slice, in the order in which they are computed
    posts   (slice sent, to, slice received, from) of each step, -1 where there is none
    labels  of each step, for errors and profiles

`whole_gather.py`: slices arrive and are multiplied. `whole_scatter.py`: slices are multiplied and leave. Where that is a kernel,
it holds multiprocessors while it waits. Signals of the copy engine and flags are kernels, so some are left to them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import TransferError
from ..torch_adapter import allows_tf32, group_timeout, resolve_process_group
from .failures import transfer_failure
from .late_flags import LateFlags
from .profile import transfer_range
from .transport import Transport

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEFT_FREE = 8  # multiprocessors for signals and flags, a block each
POLLS_A_SECOND = 1 << 20  # of a flag in the device's own memory, at least: a load takes half a microsecond or more
MOST_POLLS = 2**31 - 1
Beside = Callable[[torch.device, Callable[[], None]], AbstractContextManager[None]]
T = TypeVar("T")
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
    """A region as its op's arguments say it."""

    order: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]
    group_name: str

    @staticmethod
    def of(order: Sequence[int], posts: Sequence[int], group_name: str, labels: Sequence[str]) -> Plan:
        steps = zip(posts[::4], posts[1::4], posts[2::4], posts[3::4], labels, strict=True)
        return Plan(tuple(zip(order[::2], order[1::2], strict=True)), tuple(Step(*s) for s in steps), group_name)

    @property
    def own_slices(self) -> list[int]:
        """This rank's slices, in the order of their parts."""
        return [slice_ for part, slice_ in sorted((part, slice_) for slice_, part in self.order if part >= 0)]

    def steps_into(self, slice_: int) -> list[int]:
        """The steps that receive for a slice."""
        return [index for index, step in enumerate(self.steps) if step.source >= 0 and step.received == slice_]


def transfer(step: Step, outgoing: Tensor | None, incoming: Tensor, plan: Plan, way: Transport) -> None:
    """One step, to its end on the current stream. `incoming` is not touched where nothing is received."""
    send = (outgoing, step.to) if outgoing is not None and step.to >= 0 else None
    receive = (incoming, step.source) if step.source >= 0 else None
    try:
        with transfer_range("post", step.label, incoming):
            way.post(plan.group_name, send, receive).wait()
    except RuntimeError as error:
        raise transfer_failure("failed", step.label, plan.group_name, error) from error


class Flags:
    """Flags of a region on the stream of one caller, whose steps follow each other: made once, never reset.

    `labels[i]`: the transfer that flag i stands for, or None. A wait gives up after `polls` loads, about the group's time-out.
    """

    def __init__(self, labels: Sequence[str | None], group_name: str, device: torch.device) -> None:
        self.flags = torch.zeros(len(labels), dtype=torch.int32, device=device)
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.addresses = torch.tensor([flag.data_ptr() for flag in self.flags]).to(device)
        self.late = LateFlags(labels, group_name, device)
        self.polls = polls_within(group_name) if device.type == "cuda" else 1 << 24

    def set(self, index: int) -> None:
        """Raise a flag behind what the current stream holds."""
        from ..codegen.kernels.flags import set_flags

        set_flags(self.addresses[index : index + 1], self.epoch)

    def wait(self, index: int) -> None:
        """Hold the current stream until a flag is up."""
        from ..codegen.kernels.flags import wait_flags

        marks = self.late.marks[index : index + 1]
        wait_flags(self.flags[index : index + 1], self.epoch, marks, polls=self.polls)


def polls_within(group_name: str) -> int:
    """Loads of a flag in the time that an operation of the group may take."""
    seconds = group_timeout(resolve_process_group(group_name)).total_seconds()
    return max(1, min(int(seconds * POLLS_A_SECOND), MOST_POLLS))


def kept(key: object, device: torch.device, make: Callable[[], T]) -> T:
    """What `make` made for this key on the caller's stream, in this thread, the first time.

    Raises TransferError where that would be while a CUDA graph is captured: it copies from the host, and loads kernels.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    made: dict[Any, T] = _of_thread.__dict__.setdefault("kept", {})
    where = key, str(device), stream
    if where not in made:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise TransferError(
                "a region in one kernel is captured in a CUDA graph before it ever ran on this stream: run the model once in "
                "the same thread and on the same stream first, `with torch.cuda.stream(s)`, then capture it with "
                "`torch.cuda.graph(graph, stream=s)`."
            )
        made[where] = make()
    return made[where]


def launch_arguments(device: torch.device) -> dict[str, Any]:
    """How a kernel that waits is launched on a device."""
    if device.type != "cuda":
        return {}
    free = torch.cuda.get_device_properties(device).multi_processor_count - LEFT_FREE
    return {"programs": max(1, free), "allow_tf32": allows_tf32()}


def in_one_kernel_here(b: Tensor, transport: str) -> bool:
    """Whether a region is a kernel here: anywhere else it is the same program slice by slice. Flags are PTX: not on ROCm."""
    return b.is_cuda and torch.version.hip is None and transport == "copy_engine" and b.dtype in DTYPES
