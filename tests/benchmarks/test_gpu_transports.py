"""What the transport checks of `make gpu-check` compute without a GPU: times under times, and expected values."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_transports
from benchmarks.gpu_context import Skipped


@pytest.mark.parametrize(
    ("spans", "by", "expected"),
    [
        ([(0, 10)], [], 0),
        ([(0, 10)], [(2, 4), (3, 6)], 4),  # what overlaps counts once
        ([(0, 10), (20, 30)], [(5, 25)], 10),
        ([(0, 10)], [(-5, 50)], 10),
    ],
)
def test_time_under_matmuls_is_that_inside_their_union(
    spans: list[tuple[float, float]], by: list[tuple[float, float]], expected: float
) -> None:
    assert gpu_transports.covered(spans, by) == expected


def test_a_check_without_its_gpus_is_skipped_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Skipped, match="needs 2 GPUs, found 1"):
        gpu_transports.several_gpus(None)  # type: ignore[arg-type]
