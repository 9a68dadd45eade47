"""The choice between a kernel a slice and one for the region, on machines of a few numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.codegen.choice import FUSED, LIBRARY, Matmul, choose_kernel, fused_us, library_us
from fo_compiler.schedule import Kind, build
from fo_compiler.schedule.machine import Machine, simple_machine
from fo_compiler.schedule.matmul import Roofline
from fo_compiler.schedule.presets import find_machine

# 100 compute units at 1 TFLOPS in all; a tile of 128 x 128 with K = 1024 takes 100 x 2 x 128^2 x 1024 / 1e6 us.
UNITS = 100


def machine(**changes: float) -> Machine:
    matmul = Roofline({"bf16": 1.0}, memory_GBps=1e9, units=UNITS, efficiency=1.0, ramp_k=0)
    return simple_machine(bandwidth_GBps=1e6, matmul=matmul, **changes)


def rows(tiles_in_all: int) -> Matmul:
    """As many tiles, all in one column."""
    return Matmul(128 * tiles_in_all, 1024, 128, "bf16")


def test_a_slice_of_half_a_wave_is_free_in_one_kernel() -> None:
    schedule = build(Kind.ALL_GATHER, "ring", 4, 1)
    matmul = rows(2 * UNITS)  # half a wave a slice: 4 waves slice by slice, 2 in one kernel
    choice = choose_kernel(schedule, machine(), [matmul], 1.0, copy_engine=True, time_ratio=1.0)
    assert choice.form == FUSED
    assert choice.fused_us == pytest.approx(choice.library_us / 2, rel=1e-6)
    assert "one kernel for the region: predicted" in choice.reason


def test_slices_of_whole_waves_stay_with_the_library() -> None:
    schedule = build(Kind.ALL_GATHER, "ring", 4, 1)
    choice = choose_kernel(schedule, machine(), [rows(4 * UNITS)], 1.0, copy_engine=True, time_ratio=1.0)
    assert choice.form == LIBRARY
    assert choice.fused_us == pytest.approx(choice.library_us)
    assert "gain 0.0% is within 5%" in choice.reason


def test_launches_and_a_slowdown_under_transfers_count_against_a_kernel_a_slice() -> None:
    schedule, matmul = build(Kind.ALL_GATHER, "ring", 4, 1), rows(4 * UNITS)
    assert fused_us(schedule, machine(launch_us=5.0), matmul, 1.0, 1.0) == pytest.approx(
        library_us(schedule, machine(launch_us=5.0), [matmul], 1.0) - 3 * 5.0
    )
    slow = machine(compute_slowdown=1.5, latency_us=3000.0)  # a slice takes 3355 us
    assert fused_us(schedule, slow, matmul, 1.0, 1.0) < library_us(schedule, slow, [matmul], 1.0)


def test_a_sum_that_arrived_is_read_once_in_one_kernel_and_added_by_a_kernel_slice_by_slice() -> None:
    schedule, matmul = build(Kind.REDUCE_SCATTER, "direct", 4, 1), rows(4 * UNITS)
    narrow = replace(machine(), matmul=Roofline({"bf16": 1.0}, 1.0, UNITS, efficiency=1.0, ramp_k=0))
    slice_bytes = 1e6  # 1000 us at 1 GB/s
    fused = fused_us(schedule, narrow, matmul, slice_bytes, 1.0)
    assert library_us(schedule, narrow, [matmul], slice_bytes) - fused >= 3 * 2 * 1000.0


@pytest.mark.parametrize(
    ("kind", "matmuls", "copy_engine", "reason"),
    [
        (Kind.ALL_GATHER, [rows(8)], False, "transfers need multiprocessors"),
        (Kind.ALL_GATHER, [rows(8), rows(8)], True, "2 matmuls share the slices"),
        (Kind.ALL_GATHER, [Matmul(128, 512, 128, "bf16", cut="k")], True, "cut along k"),
        (Kind.ALL_REDUCE, [rows(8)], True, "no whole-region kernel for all_reduce"),
    ],
)
def test_what_keeps_a_region_from_one_kernel_is_said(
    kind: Kind, matmuls: list[Matmul], copy_engine: bool, reason: str
) -> None:
    choice = choose_kernel(build(kind, "ring", 4, 1), machine(), matmuls, 1.0, copy_engine=copy_engine)
    assert choice.form == LIBRARY
    assert choice.fused_us is None
    assert reason in choice.reason


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([Kind.ALL_GATHER, Kind.REDUCE_SCATTER]),
    ranks=st.integers(2, 8),
    m=st.integers(1, 3),
    size=st.integers(1, 64),
    ratio=st.floats(1.0, 3.0),
)
def test_one_kernel_is_chosen_only_where_it_is_predicted_faster_and_never_beats_the_whole_matmul(
    kind: Kind, ranks: int, m: int, size: int, ratio: float
) -> None:
    h100 = find_machine("h100-nvlink")
    schedule, matmul = build(kind, "ring", ranks, m), Matmul(128 * size * ranks * m, 4096, 2048, "bf16")
    choice = choose_kernel(schedule, h100, [matmul], 2.0 * 128 * size * 2048, copy_engine=True, time_ratio=ratio)
    assert choice.fused_us is not None
    assert choice.fused_us >= ratio * h100.matmul.time_us(matmul.m, matmul.k, matmul.n, "bf16") * (1 - 1e-9)
    assert (choice.form == FUSED) == (choice.fused_us < choice.library_us * 0.95)
