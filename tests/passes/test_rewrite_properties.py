"""Random separable programs: the rewritten graph, run by N threads, gives what the plain graph gives."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from fo_compiler.options import Options
from fo_compiler.testing import assert_equivalent
from tests.programs import (
    Program,
    all_reduce_stacks,
    attention_programs,
    chain_programs,
    gather_programs,
    result_programs,
    scatter_programs,
    several_programs,
)
from tests.tapers import ragged

EXAMPLES = int(os.environ.get("FO_TEST_EXAMPLES", "100"))
PROFILE = settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}

forced = st.builds(
    Options,
    rewrite=st.just("always"),
    schedule=st.sampled_from(["auto", "ring", "bidirectional", "direct", "tapered"]),
    slices_per_rank=st.sampled_from([1, 1, 2, 3, 4]),
    depth=st.sampled_from([None, 1, 2, 3, 4]),
)
few_ranks = st.sampled_from([2, 2, 3, 3, 4])


def check(program: Program, options: Options, seed: int) -> None:
    tolerance = TOLERANCE[program.dtype]
    published = assert_equivalent(program.module, program.make_inputs(seed), options, rtol=tolerance, atol=tolerance)
    for record in published.records:
        schedule = record.schedule or ""
        how = " in halves" if " + " in schedule else " in a chain" if schedule.startswith("chain") else ""
        event(f"{record.collective.partition(' ')[0]}: {'rewritten' if record.rewritten else 'left'}{how}")


@PROFILE
@given(gather_programs(few_ranks, [torch.float64]), forced, st.integers(0, 99))
def test_what_follows_an_all_gather_is_unchanged(program: Program, options: Options, seed: int) -> None:
    check(program, options, seed)


@PROFILE
@given(scatter_programs(few_ranks, [torch.float64]), forced, st.integers(0, 99))
def test_what_precedes_a_reduce_scatter_is_unchanged(program: Program, options: Options, seed: int) -> None:
    check(program, options, seed)


@settings(PROFILE, max_examples=EXAMPLES // 2)
@given(result_programs(few_ranks, [torch.float64]), forced, st.integers(0, 99))
def test_what_makes_the_shard_of_an_all_gather_is_unchanged(program: Program, options: Options, seed: int) -> None:
    check(program, options, seed)


@settings(PROFILE, max_examples=EXAMPLES // 4)
@given(attention_programs(few_ranks, [torch.float64]), forced, st.integers(0, 99))
def test_attention_near_a_collective_is_unchanged(program: Program, options: Options, seed: int) -> None:
    check(program, options, seed)


@settings(PROFILE, max_examples=EXAMPLES // 4)
@given(several_programs(few_ranks, [torch.float64]), forced, st.integers(0, 99))
def test_coalesced_and_repeated_collectives_give_the_same(program: Program, options: Options, seed: int) -> None:
    check(program, options, seed)


@settings(PROFILE, max_examples=EXAMPLES // 4)
@given(all_reduce_stacks(few_ranks, [torch.float64]), forced, st.integers(0, 99))
def test_layers_that_end_in_all_reduces_are_unchanged(program: Program, options: Options, seed: int) -> None:
    check(program, options, seed)


@settings(PROFILE, max_examples=EXAMPLES // 4)
@given(chain_programs(few_ranks, [torch.float64]), forced, st.integers(0, 99))
def test_what_lies_between_a_gather_and_a_scatter_is_unchanged(program: Program, options: Options, seed: int) -> None:
    check(program, options, seed)


@pytest.mark.slow
@settings(PROFILE, max_examples=EXAMPLES // 4)
@given(
    st.one_of(
        all_reduce_stacks(st.integers(5, 8), [torch.float64]),
        gather_programs(st.integers(5, 8), [torch.float64]),
        scatter_programs(st.integers(5, 8), [torch.float64]),
    ),
    forced,
)
def test_larger_groups_give_the_same(program: Program, options: Options) -> None:
    check(program, options, 0)


@settings(PROFILE, max_examples=EXAMPLES // 4)
@given(
    st.one_of(
        all_reduce_stacks(few_ranks, [torch.float32]),
        gather_programs(few_ranks, [torch.float32, torch.bfloat16]),
        scatter_programs(few_ranks, [torch.float32, torch.bfloat16]),
    ),
    forced,
)
def test_narrow_types_agree_within_their_rounding(program: Program, options: Options) -> None:
    check(program, options, 0)


@settings(PROFILE, max_examples=EXAMPLES // 2)
@given(
    st.one_of(
        gather_programs(few_ranks, [torch.float64, torch.bfloat16]),
        scatter_programs(few_ranks, [torch.float64, torch.bfloat16]),
        several_programs(few_ranks, [torch.float64]),
    ),
    st.integers(2, 6),
    st.integers(0, 99),
)
def test_pieces_of_any_size_give_the_same(program: Program, units: int, seed: int) -> None:
    with ragged(seed):
        check(program, Options(rewrite="always", schedule="tapered", slices_per_rank=units), seed)
