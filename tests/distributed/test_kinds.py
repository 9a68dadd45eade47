"""Kinds of graphs on real gloo ranks: attention, data parallel, eight bits, coalesced collectives, inputs and outputs."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist

from fo_compiler.torch_adapter import TORCH_VERSION
from tests.distributed import data_checks as checks
from tests.distributed.test_gloo import Worlds, agreed, rewritten

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_output_projection_are_one_region(world: Worlds, causal: bool) -> None:
    records = agreed(world(2).run(partial(checks.attention_block, causal, 2)))
    assert rewritten(records) == len(records) == 4
    assert any("flash_attention" in name for record in records for name in record.region)


def test_parameters_are_gathered_under_the_matmuls_that_read_them(world: Worlds) -> None:
    records = agreed(world(2).run(checks.fully_sharded_layers))
    assert rewritten(records) == len(records) == 4


@pytest.mark.skipif(TORCH_VERSION < (2, 13), reason="this torch has no row-wise scales on the CPU")
def test_eight_bit_activations_arrive_slice_by_slice(world: Worlds) -> None:
    records = agreed(world(2).run(checks.eight_bits))
    assert rewritten(records) >= 1


def test_coalesced_collectives_are_taken_apart_where_it_helps(world: Worlds) -> None:
    records = agreed(world(2).run(checks.coalesced))
    assert rewritten(records) == 3


def test_inputs_and_outputs_are_as_without_us(world: Worlds) -> None:
    records = agreed(world(2).run(checks.inputs_and_outputs))
    assert rewritten(records) == 5, "all that a matmul is next to"


def test_data_and_tensor_parallel_in_one_graph(world: Worlds) -> None:
    records = agreed(world(4).run(checks.both_axes_at_once))
    assert rewritten(records) >= 5
