"""The pass costs as much for the last layer of a model as for the first."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from torch import Tensor

from fo_compiler import passes
from fo_compiler.options import Options
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import rewrite_for_rank
from tests.graphs import all_gather, capture, reduce_scatter
from tests.passes.helpers import tensors


def model(x: Tensor, table: Tensor, *weights: Tensor) -> Tensor:
    """Two matmuls a layer, a residual stream, and a table that every layer reads, as of rotary embeddings."""
    table = table.cos()
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        x = x + reduce_scatter((all_gather(x.tanh(), 0, 2) @ up * table) @ down, 0, 2)
    return x


def steps(layers: int) -> int:
    """Calls that code of the passes makes and gets, in all."""
    gm = capture(model, tensors((4, 6), (8, 8), *[(6, 8), (8, 6)] * layers))
    made = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal made
        if event in ("call", "c_call") and passes.__name__ in frame.f_globals.get("__name__", ""):
            made += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        records = rewrite_for_rank(gm, Options(rewrite="always"), LocalWorld(2).transport(0))[1]
    finally:
        sys.setprofile(before)
    assert all(record.rewritten for record in records.records)
    return made


@pytest.mark.slow
def test_the_steps_of_the_pass_grow_with_the_layers_and_not_with_their_square() -> None:
    few, more, many = steps(2), steps(6), steps(10)
    assert many - more < 1.1 * (more - few)
