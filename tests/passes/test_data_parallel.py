"""Parameters that are gathered in the graph, and gradients that leave it: one axis of ranks, or two at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fo_compiler.options import Options
from fo_compiler.testing import assert_equivalent
from tests.graphs import all_gather, all_reduce, capture, reduce_scatter
from tests.passes.helpers import on_each_rank, tensors
from tests.passes.test_gradient_properties import EXAMPLES, AllGather, ReduceScatter

MESH = {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}


def test_a_gathered_parameter_is_the_second_operand() -> None:
    def f(x: Tensor, shard: Tensor) -> Tensor:
        return x @ all_gather(shard, 0, 2).t()

    shapes = ((6, 8), (5, 8))
    (record,) = assert_equivalent(capture(f, tensors(*shapes)), on_each_rank(2, *shapes)).records
    assert record.region == ("mm",)


@pytest.mark.parametrize("cast_first", [False, True])
def test_casts_between_a_parameter_and_its_matmul_are_in_the_region(cast_first: bool) -> None:
    def f(x: Tensor, shard: Tensor) -> Tensor:
        if cast_first:
            return F.linear(x.bfloat16(), all_gather(shard.bfloat16(), 0, 2))
        return F.linear(x.bfloat16(), all_gather(shard, 0, 2).bfloat16())

    shapes = ((6, 8), (4, 8))
    inputs = on_each_rank(2, *shapes, dtype=torch.float32)
    (record,) = assert_equivalent(capture(f, inputs[0]), inputs, rtol=2e-2, atol=2e-2).records
    assert record.rewritten


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_weight_gradient_leaves_row_by_row(kind: str, op: str) -> None:
    """The gradient is computed in bfloat16 and summed in float32, as with fp32 parameters and bf16 compute."""

    def f(grad: Tensor, x: Tensor) -> Tensor:
        weight_grad = (grad.bfloat16().t() @ x.bfloat16()).float()
        return reduce_scatter(weight_grad, 0, 2, op=op) if kind == "reduce_scatter" else all_reduce(weight_grad, op=op)

    shapes = ((6, 8), (6, 4))
    inputs = on_each_rank(2, *shapes, dtype=torch.float32)
    (record,) = assert_equivalent(capture(f, inputs[0]), inputs, rtol=1e-5, atol=1e-5).records
    assert record.rewritten


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_a_replicated_model_are_reduced_one_by_one(bias: bool) -> None:
    """DDP in the graph: each gradient is flattened, reduced and brought back into shape."""

    def step(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (w, b)]
        loss = F.linear(x, leaves[0], leaves[1] if bias else None).square().sum()
        grads = torch.autograd.grad(loss, leaves[: 1 + bias])
        return [all_reduce(grad.reshape(-1), op="avg").reshape(grad.shape) for grad in grads]

    shapes = ((6, 4), (8, 4), (8,))
    records = assert_equivalent(capture(step, tensors(*shapes)), on_each_rank(2, *shapes)).records
    assert [record.rewritten for record in records] == [True] + [False] * bias
    if bias:
        assert "addmm is also read on a path to the collective that is not cut" in records[1].reason


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(
    st.booleans(),
    st.booleans(),
    st.integers(1, 2),
    st.builds(
        Options,
        rewrite=st.just("always"),
        schedule=st.sampled_from(["ring", "direct", "tapered"]),
        slices_per_rank=st.sampled_from([1, 2]),
        depth=st.sampled_from([None, 1, 2]),
    ),
    st.integers(0, 99),
)
def test_a_step_over_both_axes_of_a_mesh_is_unchanged(
    sequence_parallel: bool, residual: bool, layers: int, options: Options, seed: int
) -> None:
    """Parameters are sharded over dp, and what is left of them over tp; activations over tp. Gradients go back both ways."""
    dim, hidden = 4, 8

    def forward(x: Tensor, *shards: Tensor) -> Tensor:
        parameters = iter(shards)
        for _ in range(layers):
            up, down = (AllGather.apply(next(parameters), 0, 2, "dp") for _ in range(2))
            h = AllGather.apply(x, 1, 2, "tp") if sequence_parallel else x
            h = torch.tanh(F.linear(h, up))
            h = F.linear(h, down)
            h = ReduceScatter.apply(h, 1, 2, "tp") if sequence_parallel else h
            x = x + h if residual else h
        return (x * x).sum()

    def step(*tensors_: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors_]
        loss = forward(*leaves)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    shapes = [(2, 2, dim), *[(hidden // 2, dim), (dim // 2, hidden)] * layers]
    generator = torch.Generator().manual_seed(seed)
    inputs = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(4)]
    records = assert_equivalent(capture(step, inputs[0]), inputs, options, groups=MESH, rtol=1e-11, atol=1e-11).records
    assert sum(record.rewritten for record in records) >= 3 * layers, records
