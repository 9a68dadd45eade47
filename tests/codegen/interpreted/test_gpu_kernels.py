"""The checks of `make gpu-check` themselves, on the CPU: that they find right values right, and wrong ones wrong."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_kernels
from benchmarks.gpu_context import Context, Failed, Layer, Skipped

from .helpers import TILE


def context() -> Context:
    def timer(run: object) -> float:
        run()  # type: ignore[operator]
        return 10.0

    layers = (Layer("small", 32, 16, 16, ranks=2),)
    return Context(torch.device("cpu"), "sm_80", timer, layers, odd=(18, 20, 10), even=(16, 16, 16), tile=TILE)


def test_values_are_within_what_is_allowed() -> None:
    result = gpu_kernels.values(context())
    assert 0 < result["largest"] <= 1
    forms = {name.split()[0] for name in result["errors"]}
    assert forms == {"matmul_into", "all_gather_matmul", "matmul_reduce_scatter", "sum_partials"}


def test_what_fails_is_told_with_the_figures_of_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"a": 0.5, "c": 0.25}

    def broken() -> None:
        raise ValueError("no such tile\nand more")

    def checks(_: Context, found: dict[str, float]) -> list[tuple[str, object]]:
        return [("one", lambda: found.update(a=0.5)), ("two", broken), ("three", lambda: found.update(c=0.25))]

    monkeypatch.setattr(gpu_kernels, "_value_checks", checks)
    with pytest.raises(Failed, match=r"^two: ValueError: no such tile$") as failure:
        gpu_kernels.values(context())
    assert failure.value.figures == {"errors": figures}


@pytest.mark.parametrize("change", ["one wrong element", "one missing element"])
def test_a_wrong_value_is_not_allowed(change: str) -> None:
    exact = torch.ones(4, 4, dtype=torch.float64)
    result = exact.float()
    result[1, 2] = torch.nan if change == "one missing element" else 1.001
    assert gpu_kernels.error_ratio(exact.float(), exact, exact, 16, "16bit") == 0
    assert gpu_kernels.error_ratio(result, exact, exact, 16, "16bit") > 1


def test_speed_has_a_row_for_each_kernel_and_kind_beside_the_library() -> None:
    result = gpu_kernels.speed(context())
    rows = [row for row in result["rows"] if row["kind"] == "16bit"]
    assert [row["form"] for row in rows] == [
        "cublas", "cublas per slice", "matmul_into", "matmul_into per slice", "all_gather_matmul", "matmul_reduce_scatter",
    ]  # fmt: skip
    assert all(row["ratio"] == 1 and row["TFLOPS"] == round(2 * 32 * 16 * 16 / 10 / 1e6, 1) for row in rows)
    assert {row["kind"] for row in result["rows"]} == {"16bit", "tf32", "fp32"}


def test_late_flags_need_streams() -> None:
    with pytest.raises(Skipped, match="no streams"):
        gpu_kernels.late_flags(context())
