"""`make gpu-check` where there is no GPU, and what it does with checks that fail."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_context import Context, Failed, Skipped

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def context() -> Context:
    return Context(torch.device("cpu"), "sm_90", timer=lambda run: 1.0)


@needs_no_gpu
def test_without_a_gpu_every_check_is_skipped_by_name_and_the_status_is_0(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    assert gpu_check.main(["--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for name in gpu_check.CHECKS:
        assert f"{name:24} skipped  no CUDA device" in printed
    report = json.loads(out.read_text())
    assert set(report["checks"]) == set(gpu_check.CHECKS)
    assert report["machine"]["gpus"] == []


@needs_no_gpu
def test_without_a_gpu_or_a_file_the_report_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--only", "copy_engine"]) == 0
    line, _, report = capsys.readouterr().out.partition("\n")
    assert line.split() == ["copy_engine", "skipped", "no", "CUDA", "device"]
    assert json.loads(report)["checks"]["copy_engine"]["reason"] == "no CUDA device"


def test_every_check_is_a_function() -> None:
    import importlib

    for check in gpu_check.CHECKS.values():
        module, _, name = check.place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
        assert 0 < check.seconds < gpu_check.SECONDS == 8 * 60


def passes(_: Context) -> dict[str, Any]:
    return {"figure": 3}


def fails(_: Context) -> dict[str, Any]:
    raise AssertionError("values differ")


def fails_in_part(_: Context) -> dict[str, Any]:
    raise Failed(["one differs", "two differs"], {"figure": 4})


def lacks(_: Context) -> dict[str, Any]:
    raise Skipped("needs 2 GPUs")


@pytest.fixture
def _checks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("fails", "fails_in_part", "lacks", "passes")
    monkeypatch.setattr(gpu_check, "CHECKS", {n: gpu_check.Check(f"{__name__}:{n}", 20) for n in names})
    monkeypatch.setattr(gpu_check, "context_of", lambda autotune: context())


@pytest.mark.usefixtures("_checks")
def test_a_check_that_fails_is_reported_and_the_others_still_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    assert gpu_check.main(["--out", str(out)]) == 1
    results = json.loads(out.read_text())["checks"]
    assert [r["status"] for r in results.values()] == ["failed", "failed", "skipped", "passed"]
    assert results["fails"]["reason"] == "AssertionError: values differ"
    assert results["fails_in_part"]["reason"] == "one differs; two differs"
    assert results["fails_in_part"]["figure"] == 4
    assert results["passes"]["figure"] == 3
    assert gpu_check.main(["--only", "passes"]) == 0


@pytest.mark.usefixtures("_checks")
def test_a_check_gets_no_more_than_its_time_and_what_is_left_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits, reports = [100.0], dict[str, float](), list[int]()
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now[0])

    def run(name: str, seconds: float) -> dict[str, Any]:
        limits[name] = seconds
        now[0] += seconds
        return {"status": "failed", "reason": "not done"}

    names = ["fails", "lacks", "passes"]
    results = gpu_check.run_checks(names, run, lambda so_far: reports.append(len(so_far)), seconds=30)
    assert limits == {"fails": 20, "lacks": 10}
    assert results["passes"]["status"] == "skipped"
    assert results["passes"]["reason"] == "no time left of 30 s: run it with --only passes"
    assert reports == [1, 2, 3]  # what there is is kept, whatever comes next


@pytest.mark.slow
@needs_no_gpu
def test_the_process_of_a_check_leaves_its_result() -> None:
    result = gpu_check.run_apart("kernel_speed", 120)
    assert (result["status"], result["reason"]) == ("skipped", "no CUDA device")
    assert result["machine"]["gpus"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import os; os._exit(7)", "its process ended with status 7, and left no result"),
        ("import os, time; os.fork(); time.sleep(60)", "not done after"),
    ],
)
def test_a_process_that_dies_or_hangs_is_a_failure_and_nothing_of_it_is_left(
    script: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, held = os.pipe()  # it ends when all who hold it have ended
    popen = subprocess.Popen

    def start(command: list[str], **kwargs: Any) -> Any:
        return popen([sys.executable, "-c", script], pass_fds=(held,), **kwargs)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", start)
    result = gpu_check.run_apart("kernel_speed", 1.5)
    os.close(held)
    assert result["status"] == "failed"
    assert reason in result["reason"]
    assert select.select([alive], [], [], 10)[0]
    assert os.read(alive, 1) == b""
    os.close(alive)
