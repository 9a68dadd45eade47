"""Changing batch sizes and sequence lengths on real ranks: forward, backward, and the number of compiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.distributed import shape_checks
from tests.distributed.harness import World

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.mark.parametrize(
    ("kind", "dim"),
    [
        pytest.param("sequence parallel", 1, id="training, sequence"),
        pytest.param("tensor parallel", 1, id="decode, sequence"),
        pytest.param("scattered", 1, id="training, scattered sequence"),
        pytest.param("sequence parallel", 0, id="training, batch", marks=pytest.mark.nightly),
        pytest.param("tensor parallel", 0, id="decode, batch", marks=pytest.mark.nightly),
    ],
)
def test_one_compile_serves_all_lengths(world: Callable[[int], World], kind: str, dim: int) -> None:
    for records, compiles in world(2).run(shape_checks.changing_lengths, kind, dim, True):
        assert compiles == 1 or dim == 0  # plain Inductor itself compiles some batch sizes anew
        assert all(record.rewritten for record in records), records
        assert all("of the first call" in record.reason for record in records)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["sequence parallel", "scattered"])
def test_one_compile_of_unequal_slices_serves_all_lengths_of_two_rows_a_slice(
    world: Callable[[int], World], kind: str
) -> None:
    for records, compiles in world(2).run(shape_checks.changing_lengths, kind, 1, True, True):
        assert compiles == 1
        assert {"x3" in (record.schedule or "") for record in records} == {True, False}, records


@pytest.mark.nightly
def test_a_length_that_changes_is_compiled_once_more_and_is_symbolic_then(world: Callable[[int], World]) -> None:
    for records, compiles in world(2).run(shape_checks.changing_lengths, "sequence parallel", 1, False):
        assert compiles == 2
        assert all(record.rewritten for record in records), records
