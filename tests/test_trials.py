"""Regions tried out in a calibration: what is compiled, what is predicted for it, and what a prediction then has to gain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fo_compiler.calibration import COLLECTIVES, Calibrator
from fo_compiler.errors import MachineError
from fo_compiler.schedule import FAMILIES, Kind
from fo_compiler.schedule.choose import Region, choose
from fo_compiler.schedule.machine import CollectiveTime, simple_machine
from fo_compiler.schedule.matmul import Roofline
from fo_compiler.torch_adapter import fake_process_group
from fo_compiler.trials import COLUMNS, PROGRAMS, ROWS, Trial, _Case, try_regions, with_margins

MACHINE = simple_machine(
    bandwidth_GBps=1.0,
    matmul=Roofline({"fp32": 0.1}, memory_GBps=10.0, units=1),
    margin=0.1,
    collectives=tuple(CollectiveTime(kind.value, 2, 100.0, 1.0) for kind in COLLECTIVES),
)


def test_a_region_of_every_collective_is_tried() -> None:
    assert set(PROGRAMS) == set(COLLECTIVES)


@pytest.mark.parametrize(("predicted", "measured", "shortfall"), [(0.3, 0.1, 0.2), (0.1, 0.3, 0.0), (0.2, -0.2, 0.4)])
def test_the_shortfall_is_what_was_predicted_and_not_gained(
    predicted: float, measured: float, shortfall: float
) -> None:
    assert Trial(predicted, measured).shortfall == pytest.approx(shortfall)


def test_a_prediction_has_to_gain_what_it_was_off_by_with_this_collective_and_number_of_ranks() -> None:
    trials = dict.fromkeys(PROGRAMS, Trial(0.2, 0.2)) | {
        Kind.REDUCE_SCATTER: Trial(0.5, 0.2),
        Kind.ALL_GATHER: Trial(0.25, 0.2),
    }
    machine = with_margins(MACHINE, trials)
    assert machine.least_gain(None, 2, Kind.REDUCE_SCATTER) == pytest.approx(0.3)
    assert machine.least_gain(None, 2, Kind.ALL_GATHER) == 0.1, "no less than times differ from run to run"
    assert machine.least_gain(None, 2, Kind.CHAIN) == pytest.approx(0.3), "both of its collectives count"
    assert machine.least_gain(None, 2, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER) == pytest.approx(0.3)
    assert machine.least_gain(None, 4, Kind.REDUCE_SCATTER) == 0.1
    assert machine.least_gain(0.02, 2, Kind.REDUCE_SCATTER) == 0.02, "what is asked for wins"
    measured = {collective.kind: collective.margin for collective in machine.collectives}
    both = replace(MACHINE, collectives=(CollectiveTime("all_gather", 2, 1.0, 1.0, measured["reduce_scatter"]),))
    assert both.least_gain(None, 2, Kind.ALL_GATHER_OUT) == pytest.approx(0.3), "seen from its other side"


def test_a_region_that_gains_less_than_the_margin_of_its_collective_is_left_alone() -> None:
    region = Region(lambda m: 1000.0 / m, slice_bytes=1e6)
    choice = choose(Kind.ALL_GATHER, MACHINE, 2, region)
    assert choice.best is not None
    gain = 1 - choice.best.predicted_us / choice.plain_us
    assert choice.rewrite
    assert gain > 0.1
    doubtful = with_margins(MACHINE, dict.fromkeys(PROGRAMS, Trial(gain + 0.01, 0.0)))
    refused = choose(Kind.ALL_GATHER, doubtful, 2, region)
    assert not refused.rewrite
    assert f"less than the margin of {gain + 0.01:.0%}" in refused.reason


def test_a_shortfall_of_everything_leaves_a_margin_that_a_machine_can_have() -> None:
    machine = with_margins(MACHINE, dict.fromkeys(PROGRAMS, Trial(0.4, -3.0)))
    assert machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("margin", [-0.1, 1.0])
def test_the_margin_of_a_collective_is_a_share(margin: float) -> None:
    with pytest.raises(MachineError, match="margin: expected a share of at least 0 and below 1"):
        CollectiveTime("all_gather", 2, 1.0, 1.0, margin)


@pytest.mark.parametrize("kind", list(PROGRAMS))
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_matmul_is_of_the_whole_and_what_travels_is_as_wide_as_asked_for(kind: Kind, ranks: int) -> None:
    case = _Case(kind, ranks, width=256, columns=64)
    m, k, n = case.sizes
    assert m == ranks * ROWS
    assert (k, n) == ((256, 64) if kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) else (64, 256))


def test_an_all_reduce_is_joined_at_its_end() -> None:
    joined = _Case(Kind.ALL_REDUCE, 2, 256, 64).choice(MACHINE, torch.float32)
    free = replace(MACHINE, matmul=replace(MACHINE.matmul, memory_GBps=1e9))
    assert joined.best is not None
    unjoined = _Case(Kind.ALL_REDUCE, 2, 256, 64).choice(free, torch.float32).best
    assert unjoined is not None
    copied_us, added_us = 2 * 2 * ROWS * 256 * 4 / 1e4, 3 * ROWS * 256 * 4 / 1e4
    assert joined.best.predicted_us - unjoined.predicted_us == pytest.approx(copied_us + added_us, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(PROGRAMS))
def test_one_way_is_left_alone_and_the_other_rewritten_with_the_schedule_that_is_predicted(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes how long is made up: 10 ms where it is left alone, 6 where it is rewritten."""
    from fo_compiler.records import record

    seen = []

    def slowest_us(self: Calibrator, runs: list[object], repeats: int) -> list[float]:
        assert len(runs) == 2
        seen.append(repeats)
        return [10e3, 6e3]

    monkeypatch.setattr(Calibrator, "slowest_us", slowest_us)
    with fake_process_group(0, 2), record() as report:
        found, notes = try_regions(Calibrator(repeats=5), MACHINE, 65_536, torch.float32, [kind])
    assert notes == []
    assert seen == [15]
    assert found[kind].measured == pytest.approx(0.4)
    plain, ours = report.records
    assert (plain.rewritten, plain.reason) == (False, "option rewrite='never'")
    assert ours.rewritten
    assert ours.schedule == next(iter(FAMILIES[kind]))
    width = 65_536 // ROWS // 4
    cases = [_Case(kind, 2, width, columns).choice(MACHINE, torch.float32) for columns in COLUMNS]
    chosen = min(cases, key=lambda choice: abs(choice.plain_us - 2 * choice.communication_us))
    assert chosen.best is not None
    assert found[kind].predicted == pytest.approx(1 - chosen.best.predicted_us / chosen.plain_us)
    assert f"{chosen.plain_us / 1e3:.4g} ms" in ours.reason, "predicted here as in the compile"
    assert f"{chosen.best.predicted_us / 1e3:.4g} ms" in ours.reason


@pytest.mark.slow
def test_what_does_not_compile_is_noted_and_the_others_are_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (str(tmp_path / "no_compiler"),))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "nothing_compiled_yet"))
    monkeypatch.setattr(Calibrator, "slowest_us", lambda self, runs, repeats: [10e3, 9e3])
    with fake_process_group(0, 2):  # a sum is a kernel, which has to be compiled; a gather and its matmuls have none
        found, (note,) = try_regions(
            Calibrator(), MACHINE, 65_536, torch.float32, [Kind.REDUCE_SCATTER, Kind.ALL_GATHER]
        )
    assert set(found) == {Kind.ALL_GATHER}
    assert note.startswith("reduce_scatter: no region was tried out, as it did not compile: ")
    assert "no_compiler" in note
    measured = {collective.kind: collective.margin for collective in with_margins(MACHINE, found).collectives}
    assert measured["reduce_scatter"] == 0.0
