"""`fo-compiler calibrate`: the fits on made-up measurements, and the command on one and on two real ranks."""

from __future__ import annotations

import contextlib
import io
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fo_compiler.calibration import (
    Calibration,
    Calibrator,
    LinkFit,
    _quick_size,
    fit_link,
    network_of,
    noise_of,
    slowdowns,
)
from fo_compiler.cli import main
from fo_compiler.commands.calibrate import figures, report
from fo_compiler.schedule import COLLECTIVES
from fo_compiler.schedule.choose import collective_us
from fo_compiler.schedule.machine import Machine
from fo_compiler.schedule.matmul import MatmulPoint, Measured
from fo_compiler.schedule.network import Matrix, Uniform
from fo_compiler.torch_adapter import fake_process_group
from fo_compiler.trials import Trial
from tests.distributed.harness import World

FIGURES = {
    "machine", "network", "full_duplex", "latency_us", "bandwidth_GBps", "fit_error", "worst_fit_error", "post_us",
    "compute_slowdown", "transfer_slowdown", "margin", "collectives", "regions", "memory_GBps", "matmuls",
}  # fmt: skip


def link(GBps: float) -> LinkFit:
    return LinkFit(10.0, GBps, 0.01, 0.02)


def test_a_fit_finds_the_latency_and_bandwidth_that_made_the_samples() -> None:
    fit = fit_link([(size, 50 + size / 1250) for size in (1e3, 1e5, 1e6, 4e6)])
    assert fit.latency_us == pytest.approx(50)
    assert fit.bandwidth_GBps == pytest.approx(1.25)
    assert fit.worst_error == pytest.approx(0, abs=1e-9)


def test_the_error_of_a_fit_is_a_share_of_what_was_measured() -> None:
    fit = fit_link([(1e3, 51.0), (1e6, 1000.0), (2e6, 1600.0)])
    assert 0 < fit.median_error <= fit.worst_error < 0.2


def test_the_noise_of_a_measurement_is_half_of_what_lies_between_its_quartiles() -> None:
    assert noise_of([100.0, 90.0, 110.0, 100.0, 1000.0]) == pytest.approx(0.05), "one that was disturbed does not count"
    assert noise_of([100.0] * 5) == noise_of([100.0]) == 0.0


@pytest.mark.parametrize(
    ("noise", "margin"), [([], 0.05), ([0.01, 0.01, 3.0], 0.05), ([0.1, 0.2, 0.3], 0.2), ([2.0], 0.5)]
)
def test_a_prediction_has_to_gain_what_a_measurement_is_off_by(noise: list[float], margin: float) -> None:
    with fake_process_group(0, 2):
        calibrator = Calibrator()
        calibrator._gathered = lambda value: [value, value / 2]
        calibrator._noise = noise
        assert calibrator.margin() == margin


def test_what_disturbs_the_machine_for_a_while_is_in_a_few_turns_of_each_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = count()
    busy = range(20, 36)  # two turns of eight measurements, of the five that count

    def timed_us(self: Calibrator, run: object, times: int = 1) -> float:
        return 10.0 * times * (3.0 if next(calls) in busy else 1.0)

    monkeypatch.setattr(Calibrator, "_timed_us", timed_us)
    with fake_process_group(0, 2):
        assert Calibrator(repeats=5)._each_us([(print, 1 + i) for i in range(8)]) == [10.0] * 8


def test_a_latency_is_never_below_zero() -> None:
    fit = fit_link([(1e3, 0.5), (1e6, 1000.0), (2e6, 2100.0)])
    assert fit.latency_us == 0
    assert fit.bandwidth_GBps > 0


def test_one_size_is_too_few_for_a_fit() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit_link([(1e6, 1000.0), (1e6, 1001.0)])


def test_links_that_are_alike_make_a_uniform_network() -> None:
    pairs = {(a, b): link(1 + 0.02 * a) for a in range(3) for b in range(3) if a != b}
    network = network_of(pairs, 3, full_duplex=False)
    assert network == Uniform(10.0, 1.02, full_duplex=False)


def test_one_slow_link_makes_a_matrix() -> None:
    pairs = {(a, b): link(0.1 if (a, b) == (2, 0) else 1.0) for a in range(3) for b in range(3) if a != b}
    network = network_of(pairs, 3, full_duplex=True)
    assert isinstance(network, Matrix)
    assert network.bandwidth_GBps[2][0] == 0.1
    assert network.bandwidth_GBps[0][2] == 1.0


@pytest.mark.parametrize(("compute", "transfer"), [(1.0, 1.0), (1.5, 1.0), (1.0, 3.0), (1.6, 2.5)])
def test_slowdowns_are_those_that_made_the_times(compute: float, transfer: float) -> None:
    # 100 us of compute under a transfer of 400: it takes 100 c, in which the transfer does 100 c / d.
    computed = 100 * compute
    total = computed + 400 - computed / transfer
    assert slowdowns(100, 400, computed, total) == pytest.approx((compute, transfer))


def test_a_transfer_that_stands_still_under_compute_is_slowed_a_lot() -> None:
    compute, transfer = slowdowns(100, 400, 100, 500)
    assert (compute, transfer) == (1.0, 50.0)


def test_slowdowns_are_at_least_one_whatever_the_noise() -> None:
    assert slowdowns(100, 400, 90, 380) == (1.0, 1.0)


@pytest.mark.parametrize(("us", "largest"), [(1_000.0, 8_388_608), (70_000.0, 2_097_152)])
def test_links_are_asked_for_large_messages_where_they_are_fast(us: float, largest: int) -> None:
    with fake_process_group(0, 2):
        calibrator = Calibrator()
        calibrator.slowest_us = lambda runs, repeats=None: [us]
        assert max(calibrator.link_sizes()) == largest


def test_whole_regions_send_what_the_slowest_link_carries_soon() -> None:
    sizes = (4_096, 524_288, 8_388_608)
    links = {(0, 1): link(10.0), (1, 0): link(0.05)}
    assert _quick_size(links, sizes) == 524_288
    assert _quick_size({(0, 1): link(1.0)}, sizes) == 8_388_608
    assert _quick_size({(0, 1): link(1e-5)}, sizes) == 4_096


def test_the_report_shows_links_matmuls_and_how_to_use_the_file() -> None:
    machine = Machine(
        "mine", "here", Uniform(10.0, 1.0), Measured((MatmulPoint(64, 64, 64, "fp32", 20.0),), 8.0), post_us=30.0
    )
    calibration = Calibration(
        machine,
        {(0, 1): link(1.0), (1, 0): link(1.1)},
        ("a note",),
        {"all_reduce": link(0.9)},
        {"all_reduce": Trial(0.3, 0.1)},
    )
    text = report(calibration, Path("mine.json"))
    for part in (
        "0 -> 1",
        "all_reduce",
        "64 x 64 x 64",
        "30.0 us",
        "30%, 10%",
        "a note",
        'options={"machine": "mine.json"}',
    ):
        assert part in text
    assert set(figures(calibration, Path("mine.json"))) == FIGURES


def test_a_single_process_is_told_to_use_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["calibrate"]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_no_repeats_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--repeats", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "none" / "m.json", tmp_path):
        assert main(["calibrate", "--out", str(path)]) == 2
        assert f"--out: expected a file in a directory that exists, got {str(path)!r}" in capsys.readouterr().err


def calibrate_here(path: str) -> dict[str, Any] | None:
    """Run the command on this rank; rank 0 returns what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["calibrate", "--out", path, "--repeats", "1", "--json"])
    assert status == 0
    return json.loads(out.getvalue()) if dist.get_rank() == 0 else None


@pytest.mark.slow
def test_two_ranks_write_a_machine_that_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    world = World(2, str(tmp_path))
    try:
        printed, nothing = world.run(calibrate_here, str(path))
    finally:
        world.close()
    assert nothing is None
    assert set(printed) == FIGURES
    assert len(printed["bandwidth_GBps"]) == 2
    machine = Machine.load(path)
    assert {measured.kind for measured in machine.collectives} == set(printed["collectives"])
    for kind in COLLECTIVES:  # gloo has them all
        measured_us = machine.collective_us(kind, 2, 1e6)
        assert measured_us is not None
        assert collective_us(kind, machine, 2, 1e6) == measured_us > 0
        assert machine.collective_us(kind, 3, 1e6) is None
    assert set(printed["regions"]) == set(printed["collectives"]), "a region of each was tried out"
    for measured in machine.collectives:
        region = printed["regions"][measured.kind]
        assert measured.margin == pytest.approx(max(0, region["predicted_gain"] - region["measured_gain"]), abs=1e-4)
    assert machine.name == "two"
    assert machine.matmul_us(300, 300, 300, "torch.float32") > 0
    assert machine.fabric(2).transfer_us(0, 1, 1e6) > 0
    assert torch.isfinite(torch.tensor(machine.post_us))
