"""How the transfers of a rewritten region travel: c10d, or the copy engines within an NVLink domain.

The copy engine takes no multiprocessors from the matmuls (a NCCL transfer is a kernel), and copies what arrives once more.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import torch

from ..options import Options
from ..schedule import Schedule
from ..schedule.machine import Machine
from ..torch_adapter import group_members, without_peer_memory
from .decide import machine_of, slice_bytes_of
from .predict import predicted_us
from .regions import Region
from .separability import tensor_of

C10D, COPY_ENGINE = "c10d", "copy_engine"


def choose_transport(region: Region, schedule: Schedule, options: Options) -> tuple[str, str]:
    """The transport of a region, and why. Nothing is sent: each rank looks at what it knows, and the ranks compare later.

    Has to be called before the rewrite, which takes the region's nodes apart.
    """
    device = tensor_of(region.site.value).device
    if device.type != "cuda":
        return C10D, ""
    if options.transport != "auto":
        return options.transport, f"option transport={options.transport!r}"
    missing = without_peer_memory(device) or _not_connected(group_members().get(region.site.group_name, []))
    if missing:
        return C10D, f"transfers by c10d: {missing}"
    machine = machine_of(options, device.type)
    slice_bytes = slice_bytes_of(region) / region.slices_per_rank
    c10d, engine = (predicted_us(region, schedule, m) for m in (machine, with_copy_engine(machine, slice_bytes)))
    if c10d is None or engine is None:
        return C10D, "transfers by c10d: no prediction of the copy engine"
    name = COPY_ENGINE if engine < c10d else C10D
    return name, f"transfers by {name}: {engine:.4g} us by copy engine, {c10d:.4g} us by c10d"


def with_copy_engine(machine: Machine, slice_bytes: float) -> Machine:
    """`machine` with transfers that leave compute alone, and read and write `slice_bytes` of memory once more each."""
    copied_us = 2 * slice_bytes / (machine.matmul.memory_GBps * 1e3)
    return replace(machine, compute_slowdown=1.0, transfer_slowdown=1.0, gap_us=machine.gap_us + copied_us)


def _not_connected(ranks: list[int]) -> str:
    """Why the GPUs of these global ranks do not map each other's memory; empty if they do.

    Ranks are taken to be numbered host by host, and a rank's GPU to be that of its number on the host, as torchrun has it.
    """
    per_host = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not per_host.isdecimal() or int(per_host) < 1:
        return "the ranks are not known to be on one host (LOCAL_WORLD_SIZE is not set; torchrun does)"
    if len({rank // int(per_host) for rank in ranks}) != 1:
        return f"ranks {ranks} are on several hosts"
    devices = [rank % int(per_host) for rank in ranks]
    if max(devices) >= torch.cuda.device_count():
        return f"this process sees {torch.cuda.device_count()} GPUs, and not those of ranks {ranks}"
    for one, other in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"GPU {one} cannot map the memory of GPU {other}"
        if not has_atomics_between(one, other):
            return f"GPU {one} has no atomic operations on the memory of GPU {other} (no NVLink between them)"
    return ""


_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of cuda.h


def has_atomics_between(one: int, other: int) -> bool:
    """Whether `one` can change a number in the memory of `other` in one go, as signals do: over NVLink, and not over PCIe.

    torch does not ask the driver for it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value, devices = ctypes.c_int(0), (ctypes.c_int(), ctypes.c_int())
    calls: tuple[Callable[[], int], ...] = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(devices[0]), one),
        lambda: driver.cuDeviceGet(ctypes.byref(devices[1]), other),
        lambda: driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, *devices),
    )
    return all(call() == 0 for call in calls) and value.value == 1
