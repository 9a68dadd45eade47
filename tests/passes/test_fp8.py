"""Matmuls in 8 bits: one scale a tensor, or one a row and a column; scales are sliced, or gathered, with the data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.options import Options
from fo_compiler.passes.decide import first_factor, product_of
from fo_compiler.passes.regions import plan_region
from fo_compiler.passes.rules import rule_of
from fo_compiler.passes.separability import Cut, NotSeparable, Slices
from fo_compiler.passes.sites import Site, is_collective, site_of
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import assert_equivalent
from fo_compiler.torch_adapter import TORCH_VERSION
from tests.passes.helpers import aten
from tests.passes.test_rewrite_properties import PROFILE, few_ranks, forced
from tests.programs import Program, all_gather, fp8_programs

FP8 = torch.float8_e4m3fn
ROW_SCALES = TORCH_VERSION >= (2, 13)  # of _scaled_mm on the CPU


def scaled(a_scale: tuple[int, ...], b_scale: tuple[int, ...], rows: int = 8, columns: int = 64) -> torch.fx.Node:
    p = Program(2, torch.float32)
    a, b = p.input(rows, 32, dtype=FP8), p.input(columns, 32, dtype=FP8)
    scales = [p.input(*shape) for shape in (a_scale, b_scale)]
    node = p.graph.call_function(aten._scaled_mm.default, (a, p.call(aten.t.default, b), *scales))
    node.meta["val"] = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    p.finish([node])
    return node


@settings(PROFILE, max_examples=PROFILE.max_examples // 5)
@given(fp8_programs(few_ranks, ROW_SCALES), forced, st.integers(0, 9))
def test_eight_bit_matmuls_near_a_collective_are_unchanged(program: Program, options: Options, seed: int) -> None:
    assert_equivalent(program.module, program.make_inputs(seed), options, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not ROW_SCALES, reason="this torch has no row-wise scales on the CPU")
def test_gathered_rows_are_multiplied_with_their_own_scales() -> None:
    p = Program(2, torch.float32)
    a, scale_a = all_gather(p, p.input(4, 32, dtype=FP8), 0), p.input(8, 1)
    b, scale_b = p.call(aten.t.default, p.input(16, 32, dtype=FP8)), p.input(1, 16)
    p.finish([p.call(aten._scaled_mm.default, a, b, scale_a, scale_b, out_dtype=torch.float32)])
    records = assert_equivalent(p.module, p.make_inputs(0), rtol=1e-5, atol=1e-5).records
    assert records[0].region == ("_scaled_mm_default",)


def test_scales_of_rows_and_columns_are_cut_with_them() -> None:
    node = scaled((8, 1), (1, 64))
    a, b, scale_a, scale_b = node.args[:4]
    assert rule_of(node).from_output(node, Cut(0), Slices(2)).inputs == {a: Cut(0), scale_a: Cut(0)}
    assert rule_of(node).from_output(node, Cut(1), Slices(2)).inputs == {b: Cut(1), scale_b: Cut(1)}


def test_one_scale_serves_every_slice() -> None:
    node = scaled((), (1, 1))
    assert rule_of(node).from_output(node, Cut(0, 2), Slices(2)).inputs == {node.args[0]: Cut(0, 2)}


@pytest.mark.parametrize(
    ("scales", "cut", "n", "reason"),
    [
        (((8, 2), (2, 64)), Cut(0), 2, r"block-wise scales \(scale_a is \[8, 2\]\)"),
        (((8, 1), (2, 1)), Cut(0), 2, r"block-wise scales \(scale_b is \[2, 1\]\)"),
        (((), ()), Cut(1), 8, "multiple of 16 columns"),
        (((), ()), Cut(1, 2), 2, "side by side in memory"),
    ],
)
def test_what_slices_cannot_keep_to_says_why(scales, cut: Cut, n: int, reason: str) -> None:
    node = scaled(*scales)
    with pytest.raises(NotSeparable, match=reason):
        rule_of(node).from_output(node, cut, Slices(n))


def test_a_contracted_dim_is_not_cut() -> None:
    node = scaled((), ())
    with pytest.raises(NotSeparable, match="reduces over this dim"):
        rule_of(node).from_inputs(node, {node.args[0]: Cut(1)}, Slices(2))


def test_the_cost_is_that_of_an_eight_bit_matmul() -> None:
    p = Program(2, torch.float32)
    x = all_gather(p, p.input(4, 32, dtype=FP8), 0)
    scale, b = p.input(), p.call(aten.t.default, p.input(16, 32, dtype=FP8))
    p.finish([p.call(aten._scaled_mm.default, x, b, scale, scale, out_dtype=torch.bfloat16)])
    (collective,) = [node for node in p.graph.nodes if is_collective(node)]
    site = site_of(collective, LocalWorld(2).transport(0))
    assert isinstance(site, Site)
    region = plan_region(site, 1)
    (matmul,) = region.matmuls
    assert first_factor(matmul).meta["val"].dtype == FP8
    product = product_of(region, matmul)
    assert (product.m, product.k, product.n, product.cut) == (8, 32, 16, "m")
