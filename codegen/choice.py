"""Which kernels a rewritten region gets: the library's matmul slice by slice, or one kernel for the whole region.

    choice = choose_kernel(schedule, machine, [Matmul(8192, 8192, 7168, "bf16")], slice_bytes, copy_engine=True)
    if choice.form == FUSED: ...

Pure Python on the machine model of `fo_compiler/schedule`: equal arguments give equal choices on all ranks.

    library   each slice is a kernel: a launch, whole waves of thread blocks (the last one partly idle), and where transfers take
              multiprocessors it is slower under them. An arrived sum is added by a kernel of its own.
    fused     one launch; tiles of the next slice fill the wave of the last, so a slice costs its share of the whole matmul. Our
              kernel is `time_ratio` times as slow as the library. Transfers are the copy engine's and take no multiprocessors.
              An arrived sum is read once, where the tile is written anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..schedule.ir import Kind, Schedule
from ..schedule.machine import Machine
from ..schedule.matmul import dtype_name
from ..schedule.simulate import RegionCost, simulate

LIBRARY, FUSED = "library", "fused"

# Time of our kernel over the library's for the same uncut matmul, by dtype. A guess, until `make gpu-check` has measured it: the
# `ratio` of all_gather_matmul and matmul_reduce_scatter in benchmarks/results/gpu_check_*.json.
TIME_RATIO = {"bf16": 1.15, "fp16": 1.15, "fp8": 1.3, "tf32": 1.2, "fp32": 1.3}
_FUSED_KINDS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_OUT)


@dataclass(frozen=True)
class Matmul:
    """A matmul of a region, uncut: [m, k] @ [k, n] on one rank, cut along `cut`; a batch counts as rows."""

    m: int
    k: int
    n: int
    dtype: str
    cut: str = "m"


@dataclass(frozen=True)
class KernelChoice:
    """`fused_us` is None where the whole-region kernel cannot be used; `reason` says why, or gives both times."""

    form: str
    library_us: float
    fused_us: float | None
    reason: str


def choose_kernel(
    schedule: Schedule,
    machine: Machine,
    matmuls: Sequence[Matmul],
    slice_bytes: float,
    *,
    copy_engine: bool,
    time_ratio: float | None = None,
) -> KernelChoice:
    """The library, unless the whole-region kernel is predicted to be faster by more than the machine's margin.

    - `slice_bytes`: bytes of one slice of the schedule on the wire
    - `copy_engine`: whether the region's transfers run without multiprocessors and can raise flags
    - `time_ratio`: of our kernel to the library's; None = `TIME_RATIO`

    Raises MachineError for a dtype or group that the machine does not know.
    """
    library = library_us(schedule, machine, matmuls, slice_bytes)
    obstacle = why_not_fused(schedule, matmuls, copy_engine)
    if obstacle:
        return KernelChoice(LIBRARY, library, None, f"a kernel a slice: {obstacle}")
    ratio = TIME_RATIO[dtype_name(matmuls[0].dtype)] if time_ratio is None else time_ratio
    fused = fused_us(schedule, machine, matmuls[0], slice_bytes, ratio)
    gain = 1 - fused / library if library > 0 else 0.0
    times = f"predicted {fused / 1e3:.4g} ms in one kernel, {library / 1e3:.4g} ms slice by slice"
    if gain > machine.margin:
        return KernelChoice(FUSED, library, fused, f"one kernel for the region: {times}")
    return KernelChoice(
        LIBRARY, library, fused, f"a kernel a slice: {times}, gain {gain:.1%} is within {machine.margin:.0%}"
    )


def why_not_fused(schedule: Schedule, matmuls: Sequence[Matmul], copy_engine: bool) -> str | None:
    """What keeps a region from the whole-region kernels; None where nothing does."""
    if schedule.kind not in _FUSED_KINDS:
        return f"no whole-region kernel for {schedule.kind}"
    if not copy_engine:
        return "its transfers need multiprocessors, which a kernel that waits for them would hold"
    if len(matmuls) != 1:
        return f"{len(matmuls)} matmuls share the slices, and the kernel has one"
    if matmuls[0].cut != "m":
        return f"the matmul is cut along {matmuls[0].cut}, and the kernel takes slices of rows"
    if dtype_name(matmuls[0].dtype) not in TIME_RATIO:
        return f"no kernel for {matmuls[0].dtype}"
    return None


def library_us(schedule: Schedule, machine: Machine, matmuls: Sequence[Matmul], slice_bytes: float) -> float:
    """Time of the region with one library matmul a slice."""
    slices = len(schedule.computed_by(0))
    compute_us = 0.0
    for matmul in matmuls:
        sizes = {"m": matmul.m, "k": matmul.k, "n": matmul.n}
        sizes[matmul.cut] = -(-sizes[matmul.cut] // slices)
        compute_us += machine.matmul_us(sizes["m"], sizes["k"], sizes["n"], matmul.dtype)
    add_us = machine.add_us(slice_bytes) if schedule.kind.reduces else 0.0
    return simulate(schedule, machine, RegionCost(compute_us, slice_bytes, add_us)).makespan_us


def fused_us(schedule: Schedule, machine: Machine, matmul: Matmul, slice_bytes: float, time_ratio: float) -> float:
    """Time of the region in one kernel: its share of the whole matmul for each slice, and a single launch."""
    whole_us = machine.matmul_us(matmul.m, matmul.k, matmul.n, matmul.dtype) - machine.launch_us
    compute_us = time_ratio * whole_us / len(schedule.computed_by(0))
    add_us = slice_bytes / (machine.matmul.memory_GBps * 1e3) if schedule.kind.reduces else 0.0
    undisturbed = replace(machine, compute_slowdown=1.0)
    return machine.launch_us + simulate(schedule, undisturbed, RegionCost(compute_us, slice_bytes, add_us)).makespan_us
