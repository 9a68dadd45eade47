"""`fo-compiler cross`: what is written, what is printed, and what a wrong model is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fo_compiler.cli import main
from fo_compiler.codegen.example_models import find_example
from fo_compiler.errors import CommandError


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", "expected mlp, module:function or file.py:function, got 'llama'"),
        ("no_such_module:f", "could not be loaded: No module named 'no_such_module'"),
        ("no_such_file.py:f", "could not be loaded"),
        ("json:no_such_function", "could not be loaded"),
        ("math:pi", "to be a function of the number of ranks"),
    ],
)
def test_a_wrong_model_says_what_was_expected(name: str, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        find_example(name)


def test_a_function_of_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text("def model(ranks):\n    return ranks\n")
    assert find_example(f"{tmp_path}/made.py:model")(3) == 3


def test_a_rank_outside_of_the_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert main(["cross", "--target", "sm_90", "--ranks", "2", "--rank", "2", "mlp"]) == 2
    assert "--rank: expected 0 to 1, got 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "0", "mlp"], "--ranks: expected at least 1, got 0"),
        (["json:dumps"], "expected json:dumps to return (model, [inputs]), got str"),
    ],
)
def test_mistakes_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert main(["cross", "--target", "sm_90", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_programs_and_kernels_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("FO_REWRITE", "always")
    arguments = ["--target", "sm_90", "--forward", "--only-graph", "--json", "--out", str(tmp_path)]
    assert main(["cross", *arguments, "mlp"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["target"] == "sm_90"
    assert [record["rewritten"] for record in printed["collectives"]] == [True, True]
    assert printed["kernels"]
    assert "fo_compiler.exchange" in (tmp_path / "inference.py").read_text()
    assert "side 1" in (tmp_path / "inference.launches.txt").read_text()
    for row in printed["kernels"]:
        name = row["kernel"].replace("/", ".")
        assert ".target sm_90a" in (tmp_path / "kernels" / "inference" / f"{name}.ptx").read_text()
        assert (tmp_path / "kernels" / "inference" / f"{name}.cubin").stat().st_size > 0
