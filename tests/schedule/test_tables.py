"""The evidence of docs/scheduling.md is what the scheduler computes today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schedule_tables", ROOT / "benchmarks" / "schedule_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["paper", "rule", "sockets", "slices"])
def test_a_table_of_the_page_is_up_to_date(tables: ModuleType, name: str) -> None:
    page = (ROOT / "docs" / "scheduling.md").read_text()
    assert f"<!-- table {name} -->\n{tables.markdown(tables.tables([2, 4])[name]())}\n<!-- end -->" in page


@pytest.mark.slow
def test_the_chosen_schedule_is_near_the_bound_where_a_ring_is_far(tables: ModuleType) -> None:
    head, *rows = tables.groups_table(tables.Kind.ALL_GATHER, [8])
    by_machine = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    for name, row in by_machine.items():
        assert float(row["ms"]) <= 1.01 * float(row["bound"]), name
        assert float(row["ms"]) <= float(row["serial"])
    for name in ("two nodes", "one slow link"):
        assert float(by_machine[name]["ring"]) > 2 * float(by_machine[name]["bound"])


@pytest.mark.slow
def test_the_rows_of_small_groups_are_those_of_the_page(tables: ModuleType) -> None:
    page = (ROOT / "docs" / "scheduling.md").read_text()
    for line in tables.markdown(tables.groups_table(tables.Kind.REDUCE_SCATTER, [2, 4])).splitlines():
        assert line in page
