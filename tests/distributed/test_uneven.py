"""Sizes that do not divide by the ranks, on real ranks: DTensor pads the shards, and the last rank has fewer rows, or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from fo_compiler import Record
from tests.distributed import uneven_checks as checks
from tests.distributed.harness import World

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


def train(world: World, *args: Any, **options: Any) -> list[Record]:
    """The records of rank 0. That the ranks decide alike is checked before a graph runs."""
    records, *_ = world.run(partial(checks.trains_as_under_plain_inductor, **options), *args)
    return list(records)


def test_a_plan_whose_sequence_and_hidden_size_do_not_divide_trains_as_under_plain_inductor(
    world: Callable[[int], World],
) -> None:
    """7 rows on 3 ranks: 3, 3 and 1. The gradients of two matmuls are added, and travel once."""
    records = train(world(3), (2, 7, 6), 1, 8, False)
    assert all(record.rewritten for record in records), records
    assert sum("whose results are added" in record.reason for record in records) >= 2


@pytest.mark.nightly  # compiles of ten seconds
@pytest.mark.parametrize(
    ("sizes", "dim", "options"),
    [
        pytest.param((8, 2, 6), 0, {"schedule": "direct", "slices_per_rank": 1}, id="rows of dim 0"),
        pytest.param((2, 10, 6), 1, {"schedule": "ring", "slices_per_rank": 2}, id="chains of two slices a rank"),
        pytest.param((2, 4, 6), 1, {}, id="a rank without rows"),
    ],
)
def test_other_shards_train_as_under_plain_inductor(
    world: Callable[[int], World], sizes: tuple[int, ...], dim: int, options: dict[str, Any]
) -> None:
    records = train(world(3), sizes, dim, 9, False, **options)
    left = [record for record in records if not record.rewritten]
    # The zeros of a rank without rows may be an input of the backward graph.
    assert all("not known to be the zeros" in record.reason for record in left), left
    assert not left or sizes[dim] == 4
