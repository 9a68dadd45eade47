"""Random tensor-parallel blocks with their gradients, as one joint graph: the rewritten graph gives the same."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fo_compiler.options import Options
from fo_compiler.testing import assert_equivalent
from tests.graphs import all_gather, all_reduce, capture, reduce_scatter

EXAMPLES = int(os.environ.get("FO_TEST_EXAMPLES", "100")) // 4


class AllGather(torch.autograd.Function):
    """Gather along a dim; its gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: int, group: str = "0") -> Tensor:
        ctx.where = dim, ranks, group
        return all_gather(x, dim, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, *ctx.where), None, None, None


class ReduceScatter(torch.autograd.Function):
    """Sum over ranks and scatter along a dim; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: int, group: str = "0") -> Tensor:
        ctx.where = dim, ranks, group
        return reduce_scatter(x, dim, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather(grad.contiguous(), *ctx.where), None, None, None


class Enter(torch.autograd.Function):
    """Plain tensor parallel, Megatron's f: the gradient of what all ranks read is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_reduce(grad.contiguous())


class Leave(torch.autograd.Function):
    """Plain tensor parallel, Megatron's g: partial results are all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@st.composite
def blocks(draw: Any) -> dict[str, Any]:
    ranks = draw(st.sampled_from([2, 2, 3, 4]))
    batch, seq, dim, hidden = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
    )
    return {
        "ranks": ranks,
        "shape": draw(st.sampled_from([(batch, seq, dim), (seq, batch, dim), (seq, dim)])),
        "hidden": hidden,
        "gather_dim": draw(st.integers(0, 1)),
        "sequence_parallel": draw(st.booleans()),
        "layers": draw(st.integers(1, 2)),
        "branches": draw(st.integers(1, 3)),
        "bias": draw(st.booleans()),
        "norm": draw(st.booleans()),
        "residual": draw(st.booleans()),
        "two_outputs": draw(st.booleans()),
        "gathered_logits": draw(st.booleans()),
        "activation": draw(st.sampled_from([torch.tanh, F.silu, F.gelu, lambda x: F.softmax(x, -1)])),
    }


@settings(max_examples=EXAMPLES, deadline=None, print_blob=True)
@given(
    blocks(),
    st.builds(
        Options,
        rewrite=st.just("always"),
        schedule=st.sampled_from(["ring", "direct", "tapered"]),
        slices_per_rank=st.sampled_from([1, 2, 3]),
    ),
    st.integers(0, 99),
)
def test_gradients_of_a_tensor_parallel_block_are_unchanged(b: dict[str, Any], options: Options, seed: int) -> None:
    ranks, sizes, hidden = b["ranks"], b["shape"], b["hidden"]
    dim = min(b["gather_dim"], len(sizes) - 2)
    sequence_parallel = b["sequence_parallel"]
    if not sequence_parallel:  # every rank has the whole sequence
        sizes = tuple(size * ranks if at == dim else size for at, size in enumerate(sizes))

    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        parameters = iter(weights)
        extra = x.new_zeros(())
        for _ in range(b["layers"]):
            # With the usual eps the norm of two near numbers makes 1e-10 of a rounding error, in two layers and back.
            h = F.layer_norm(x, (sizes[-1],), eps=0.1) if b["norm"] else x
            h = AllGather.apply(h, dim, ranks) if sequence_parallel else h
            outs = []
            for _ in range(b["branches"]):
                out = F.linear(
                    h if sequence_parallel else Enter.apply(h),
                    next(parameters),
                    next(parameters) if b["bias"] else None,
                )
                outs.append(b["activation"](out))
            h = torch.stack(outs).prod(0)
            h = F.linear(h, next(parameters), next(parameters) if b["bias"] else None)
            if b["two_outputs"]:
                extra = extra + h.square().mean()
            h = ReduceScatter.apply(h, dim, ranks) if sequence_parallel else Leave.apply(h)
            x = x + h if b["residual"] else h
        if b["gathered_logits"]:
            x = AllGather.apply(F.linear(x, next(parameters)), len(sizes) - 1, ranks)
        return (x * x).sum() + extra

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        loss = forward(*leaves)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    shapes = [sizes]
    for _ in range(b["layers"]):
        for _ in range(b["branches"]):
            shapes += [(hidden, sizes[-1])] + [(hidden,)] * b["bias"]
        shapes += [(sizes[-1], hidden)] + [(sizes[-1],)] * b["bias"]
    shapes += [(2 * hidden, sizes[-1])] * b["gathered_logits"]
    generator = torch.Generator().manual_seed(seed)
    inputs = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(ranks)]
    gm = capture(step, inputs[0])
    published = assert_equivalent(gm, inputs, options, rtol=1e-11, atol=1e-11)
    assert sum(record.rewritten for record in published.records) >= 2 * b["layers"], published.records
