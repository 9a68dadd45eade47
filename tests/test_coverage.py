"""docs/coverage.md: each kind of graph computes the same when rewritten, and the page says what is rewritten."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.coverage import ELSEWHERE, Row, fake_world, row_of
from tests.graph_kinds import KINDS, PEERS, GraphKind, prove

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "coverage.md").read_text()


@pytest.fixture(scope="module", autouse=True)
def _fake_world() -> Iterator[None]:
    with fake_world():
        yield


def assert_on_page(row: Row) -> None:
    if f"with torch {torch.__version__.split('+')[0]}." in PAGE:  # another torch has another stock pass
        assert str(row) in PAGE, "docs/coverage.md is stale: run `python benchmarks/coverage.py --write docs`"


@cache
def has_row_scales() -> bool:
    """Whether the CPU multiplies fp8 with a scale a row: torch 2.11 does so with one a tensor only."""
    a, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one.t(), out_dtype=torch.float32)
    except RuntimeError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.row != PEERS], ids=str)
def test_values_and_records(kind: GraphKind) -> None:
    if "row scales" in kind.name and not has_row_scales():
        pytest.skip("this torch's CPU has no fp8 product with a scale a row to compare with")
    assert_on_page(row_of(kind, prove(kind)))


def test_the_page_has_all_kinds_and_no_others() -> None:
    names = re.findall(r"^\| ([^|*]+: [^|]+) \| .* \| [CP] \|$", PAGE, re.MULTILINE)
    assert names == [str(kind) for kind in KINDS]


def test_each_test_that_the_page_names_exists() -> None:
    named = [f"tests/{path}::{test}" for _, path, test in ELSEWHERE]
    assert all(f"`{test}`" in PAGE for test in named), "docs/coverage.md is stale"
    named += [
        f"{path}::test_values_and_records" for path in re.findall(r"`(tests/\S+)` \([CP]\)", PAGE.replace("\n", " "))
    ]
    assert len(named) == len(ELSEWHERE) + 2
    for test in named:
        path, _, name = test.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), test
