"""`fo-compiler env`: what a bug report needs."""

from __future__ import annotations

import json

import pytest
import torch

import fo_compiler
from fo_compiler.cli import main
from fo_compiler.schedule.presets import PRESETS


def test_the_report_has_versions_devices_and_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["fo-compiler"] == fo_compiler.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["distributed"]["gloo"] is True
    assert report["machines"]["presets"].split(", ") == list(PRESETS)
    assert "cpu" in report["devices"]


def test_an_option_names_the_variable_that_set_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FO_SCHEDULE", "ring")
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (schedule,) = [line for line in lines if line.split()[:1] == ["schedule"]]
    assert "'ring'" in schedule
    assert "FO_SCHEDULE" in schedule
    assert sum("set by" in line for line in lines) == 1


def test_a_wrong_variable_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FO_MARGIN", "much")
    assert main(["env"]) == 2
    assert "FO_MARGIN" in capsys.readouterr().err
    monkeypatch.delenv("FO_MARGIN")
    monkeypatch.setenv("FO_MACHINE", "h100-nvlnk")
    assert main(["env"]) == 2
    assert "Did you mean 'h100-nvlink'" in capsys.readouterr().err
