"""What is compiled by us and what is not, in one process and with one cache, never gets in each other's way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code

from fo_compiler.passes import overlap_pass
from fo_compiler.torch_adapter import fake_process_group

RANKS = 4


@contextmanager
def rank(number: int) -> Iterator[None]:
    with fake_process_group(number, RANKS):
        yield


def gathered_matmul(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD) @ w


def code_of(function: Callable[..., Any], **settings: Any) -> tuple[str, int]:
    """The generated code without the number of the compile, and how often the cache had it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        _, codes = run_and_get_code(torch.compile(function, **settings), torch.ones(4, 8), torch.ones(8, 6))
    return re.sub(r"# AOT ID: .*", "", "\n".join(codes)), torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]


OURS: dict[str, Any] = {"backend": "flashoverlap", "options": {"rewrite": "always", "schedule": "ring"}}


@pytest.mark.slow
def test_plain_inductor_is_as_it_was_after_a_compile_of_ours() -> None:
    with rank(0), config.patch(force_disable_caches=True):
        before, configuration = code_of(gathered_matmul)[0], config.get_config_copy()
        ours, _ = code_of(gathered_matmul, **OURS)
        assert code_of(gathered_matmul)[0] == before
        assert config.get_config_copy() == configuration
    assert "fo_compiler" in ours
    assert "fo_compiler" not in before


@pytest.mark.slow
def test_one_cache_for_plain_inductor_for_us_for_another_version_and_for_all_ranks_never_mixes_them_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fresh_cache():
        with rank(0):
            plain, hits = code_of(gathered_matmul)
            ours, ours_hits = code_of(gathered_matmul, **OURS)
            assert (hits, ours_hits) == (0, 0)
            assert "fo_compiler" not in plain
            assert "fo_compiler" in ours
            assert code_of(gathered_matmul, **OURS)[1] == 1, "the cache works"
            assert code_of(gathered_matmul)[1] == 1
            monkeypatch.setattr(overlap_pass, "_source_digest", lambda: "another version of us")
            assert code_of(gathered_matmul, **OURS)[1] == 0
            monkeypatch.undo()
            other, hits = code_of(gathered_matmul, **(OURS | {"options": {"rewrite": "always", "schedule": "direct"}}))
            assert hits == 0
            assert other != ours
        with rank(1):
            of_rank_1, hits = code_of(gathered_matmul, **OURS)
            assert hits == 0
            assert of_rank_1 != ours
            assert "exchange" in of_rank_1
        with rank(0):
            assert code_of(gathered_matmul, **OURS)[1] == 1
