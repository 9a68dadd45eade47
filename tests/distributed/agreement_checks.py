"""What the processes of test_agreement.py run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

c10d = torch.ops._c10d_functional
TIMEOUT_S = 12


def _group() -> dist.ProcessGroup:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    assert group is not None
    return group


def _column_parallel(name: str, ranks: int) -> Any:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, name)) @ w

    return f


def _attempt(compiled: Any, *args: Tensor) -> str:
    try:
        return f"ok {tuple(compiled(*args).shape)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def other_option_on_rank_1(agreement: str) -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    f = _column_parallel(_group().group_name, ranks)
    options = {"rewrite": "always", "schedule": "ring" if rank == 0 else "direct", "slices_per_rank": 1 + rank}
    compiled = torch.compile(f, backend="flashoverlap", options={**options, "agreement": agreement})
    x, w = torch.ones(4, 6), torch.ones(6, 5)
    with torch.no_grad():
        outcome = _attempt(compiled, x, w)
        if outcome.startswith("ok"):
            torch.testing.assert_close(compiled(x, w), torch.full((4 * ranks, 5), 6.0))
    return outcome


def other_length_on_rank_1_at_step_3() -> str:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    f = _column_parallel(_group().group_name, ranks)
    compiled = torch.compile(f, backend="flashoverlap", options={"rewrite": "always"}, dynamic=False)
    w = torch.ones(6, 5)
    outcome = ""
    with torch.no_grad():
        for step in range(1, 5):
            rows = 8 if step == 3 and rank == 1 else 4
            outcome = f"step {step}: {_attempt(compiled, torch.ones(rows, 6), w)}"
            if not outcome.startswith(f"step {step}: ok"):
                break
    return outcome


def compile_with_own_cache(directory: str) -> tuple[str, int, int]:
    """Each rank has its own cache; the outcome, how often it was hit, and the number of records."""
    import os

    import fo_compiler

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory.format(rank=dist.get_rank())
    torch._dynamo.utils.counters.clear()
    f = _column_parallel(dist.group.WORLD.group_name, dist.get_world_size())
    x, w = torch.ones(4, 6), torch.ones(6, 5)
    with torch.no_grad(), fo_compiler.record() as report:
        outcome = _attempt(torch.compile(f, backend="flashoverlap", options={"rewrite": "always"}), x, w)
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    hits += torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
    return outcome, hits, len(report.records)
