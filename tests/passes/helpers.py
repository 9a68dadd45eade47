"""What the tests of the passes share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from fo_compiler.options import Options
from fo_compiler.passes.sites import LeftAlone, Site, is_collective, site_of
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import rewrite_for_rank
from tests.graphs import capture

aten = torch.ops.aten
GOLDEN = Path(__file__).parent / "golden"


def tensors(*shapes: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def on_each_rank(ranks: int, *shapes: Sequence[int], dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    return [tensors(*shapes, dtype=dtype, seed=rank) for rank in range(ranks)]


def sites(gm: fx.GraphModule, ranks: int, rank: int = 0) -> list[Site | LeftAlone]:
    transport = LocalWorld(ranks).transport(rank)
    return [site_of(node, transport) for node in gm.graph.nodes if is_collective(node)]


def only_site(function: Callable[..., Any], ranks: int, *shapes: Sequence[int], rank: int = 0) -> Site:
    (site,) = sites(capture(function, tensors(*shapes)), ranks, rank)
    assert isinstance(site, Site), site
    return site


def rewritten(gm: fx.GraphModule, ranks: int, rank: int = 0, **options: Any) -> fx.GraphModule:
    options = {"schedule": "ring", "slices_per_rank": 1, **options}
    return rewrite_for_rank(gm, Options(rewrite="always", **options), LocalWorld(ranks).transport(rank))[0]


def check_golden(name: str, text: str) -> None:
    """Compare with a stored text; FO_UPDATE_GOLDENS=1 stores it anew."""
    path = GOLDEN / name
    if os.environ.get("FO_UPDATE_GOLDENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; if the change is meant, run with FO_UPDATE_GOLDENS=1"
