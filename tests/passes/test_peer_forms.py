"""The forms that tests of peers have: PyTorch's micro-pipeline tensor parallelism, vLLM's fusions around collectives.

Written anew, from what those tests cover: two and three dims, every gather and scatter dim, several consumers, a
scattered result that is kept, scaled matmuls (in tests/test_coverage.py), an all-reduce before a norm. Each is rewritten,
forward and backward, and the values are right.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.coverage import fake_world, row_of
from fo_compiler.options import Options
from tests.graph_kinds import KINDS, PEERS, GraphKind, prove
from tests.test_coverage import assert_on_page

FORMS = [kind for kind in KINDS if kind.row == PEERS]


@pytest.fixture(scope="module", autouse=True)
def _fake_world() -> Iterator[None]:
    with fake_world():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS, ids=str)
def test_values_and_records(kind: GraphKind) -> None:
    records = prove(kind, Options(rewrite="always", schedule="ring"))
    assert all(record.rewritten for record in records), records
    assert_on_page(row_of(kind, records))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMS, ids=str)
def test_values_with_direct_transfers_and_two_slices_a_rank(kind: GraphKind) -> None:
    prove(kind, Options(rewrite="always", schedule="direct", slices_per_rank=2))
