"""Random programs through the whole of torch.compile on real ranks: results and gradients as in eager mode.

A few by default, hundreds in `make nightly`; tests/reliability/test_fuzz.py plays thousands through our part alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import fo_compiler
from tests.distributed import checks
from tests.distributed.harness import World
from tests.recipes import GROUPS, Recipe, forward_of, inputs_of, recipes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
NIGHTLY_EXAMPLES = int(os.environ.get("FO_FUZZ_COMPILES", "200"))


def step(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of a weighted sum of them."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    loss = sum((output * (index + 1)).sum() for index, output in enumerate(outputs))
    assert isinstance(loss, Tensor)
    return [output.detach() for output in outputs] + list(torch.autograd.grad(loss, leaves, materialize_grads=True))


@cache
def process_group(name: str) -> str:
    """The group of this rank that recipes call `name`, as c10d calls it. All ranks ask for the same ones, in one order."""
    parts = GROUPS[dist.get_world_size()][name]
    groups = [dist.group.WORLD if len(parts) == 1 else dist.new_group(list(ranks)) for ranks in parts]
    (mine,) = [group for ranks, group in zip(parts, groups, strict=True) if dist.get_rank() in ranks]
    assert isinstance(mine, dist.ProcessGroup)
    return str(mine.group_name)


def compiled_is_as_eager(recipe: Recipe, schedule: str) -> tuple[int, int]:
    """Two steps of the compiled program against one in eager mode; how many collectives were rewritten, of how many."""
    recipe = replace(recipe, groups=tuple((process_group(name), ranks) for name, ranks in recipe.groups))
    inputs = inputs_of(recipe, dist.get_world_size(), 0)[dist.get_rank()]
    want = step(forward_of(recipe), inputs)
    registry = torch._C._distributed_c10d._get_work_registry_size()
    with fo_compiler.record() as report, checks.generating(False):
        compiled = checks.ours(forward_of(recipe), schedule=schedule)
        for _ in range(2):
            for index, (got, wanted) in enumerate(zip(step(compiled, inputs), want, strict=True)):
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9, msg=lambda m, i=index: f"{i}: {m}")
    checks.assert_nothing_left(registry)
    return len(report.rewritten), len(report.records)


def fuzz(world: World, examples: int, number: int) -> tuple[int, int]:
    counts: list[tuple[int, int]] = []

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes(world.ranks, casts=False, blocks=2), st.sampled_from(["ring", "direct", "tapered"]))
    def run(recipe: Recipe, schedule: str) -> None:
        answers = world.run(compiled_is_as_eager, recipe, schedule)
        assert len(set(answers)) == 1, answers
        counts.append(answers[0])

    run()
    return sum(done for done, _ in counts), sum(of for _, of in counts)


def test_some_random_programs_compile_and_train_as_in_eager_mode(world: Callable[[int], World]) -> None:
    _, collectives = fuzz(world(2), 2, 3)
    assert collectives


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3])
def test_hundreds_of_random_programs_compile_and_train_as_in_eager_mode(
    world: Callable[[int], World], ranks: int
) -> None:
    rewritten, collectives = fuzz(world(ranks), NIGHTLY_EXAMPLES // 2, ranks)
    assert rewritten > collectives // 20
