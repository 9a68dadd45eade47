"""`make gpu-check` where there is no GPU, and what it does with checks that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_context import Context, Skipped

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


def test_every_check_is_a_function() -> None:
    import importlib

    for place in gpu_check.CHECKS.values():
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def passes(_: Context) -> dict[str, Any]:
    return {"figure": 3}


def fails(_: Context) -> dict[str, Any]:
    raise AssertionError("values differ")


def lacks(_: Context) -> dict[str, Any]:
    raise Skipped("needs 2 GPUs")


def test_a_check_that_fails_is_reported_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "CHECKS", {n: f"{__name__}:{n}" for n in ("fails", "lacks", "passes")})
    monkeypatch.setattr(gpu_check, "context_of", lambda autotune: context())
    assert gpu_check.main([]) == 1
    results = gpu_check.run_checks(["fails", "lacks", "passes"], context)
    assert [r["status"] for r in results.values()] == ["failed", "skipped", "passed"]
    assert results["fails"]["reason"] == "AssertionError: values differ"
    assert results["passes"]["figure"] == 3
    assert gpu_check.main(["--only", "passes"]) == 0
