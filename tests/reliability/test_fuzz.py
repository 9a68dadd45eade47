"""Random programs, forward and backward, through the passes and the runtime: the same values as with plain collectives.

A failing program is shrunk and printed as a recipe; 10,000 of them in `make nightly`. tests/distributed/test_fuzz.py takes a
few through the whole of torch.compile on real processes.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, seed, settings
from hypothesis import strategies as st

from fo_compiler.options import Options
from fo_compiler.testing import assert_equivalent
from tests.graphs import capture
from tests.recipes import GROUPS, Recipe, forward_of, inputs_of, recipes, step_of

EXAMPLES = int(os.environ.get("FO_TEST_EXAMPLES", "80"))
NIGHTLY_EXAMPLES = int(os.environ.get("FO_FUZZ_EXAMPLES", "10000"))

forced = st.builds(
    Options,
    rewrite=st.just("always"),
    schedule=st.sampled_from(["auto", "ring", "direct", "tapered", "library"]),
    slices_per_rank=st.sampled_from([1, 1, 2, 3]),
)
cases = st.sampled_from([2, 2, 3, 4]).flatmap(lambda ranks: st.tuples(st.just(ranks), recipes(ranks)))


def check(ranks: int, recipe: Recipe, options: Options, gradients: bool) -> None:
    inputs = inputs_of(recipe, ranks, 0)
    gm = capture((step_of if gradients else forward_of)(recipe), inputs[0])
    tolerance = 1e-4 if any(name == "cast" for name, *_ in recipe.steps) else 1e-9
    published = assert_equivalent(gm, inputs, options, GROUPS[ranks], rtol=tolerance, atol=tolerance)
    for record in published.records:
        assert record.reason
        event(f"{record.collective.partition(' ')[0]}: {'rewritten' if record.rewritten else 'left'}")


def fuzz(examples: int) -> Any:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=examples, deadline=None, print_blob=True, suppress_health_check=checks)


@pytest.mark.slow
@fuzz(EXAMPLES)
@given(cases, forced, st.booleans())
def test_random_programs_give_what_they_give_with_plain_collectives(
    case: tuple[int, Recipe], options: Options, gradients: bool
) -> None:
    check(*case, options, gradients)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_random_programs(part: int) -> None:
    @seed(part)
    @fuzz(NIGHTLY_EXAMPLES // 10)
    @given(cases, forced, st.booleans())
    def run(case: tuple[int, Recipe], options: Options, gradients: bool) -> None:
        check(*case, options, gradients)

    run()
