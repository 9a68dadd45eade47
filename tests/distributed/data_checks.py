"""What the processes of test_kinds.py run: attention, data parallel, eight bits, coalesced collectives, inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

import fo_compiler
from fo_compiler import Record
from fo_compiler.torch_adapter import TORCH_VERSION, functional_collective
from tests.distributed.checks import (
    all_gather,
    assert_nothing_left,
    assert_one_record_each,
    generating,
    matches_eager,
    ours,
    own,
    reduce_scatter,
    shared,
)

gather_autograd = functional_collective("all_gather_single_autograd")
scatter_autograd = functional_collective("reduce_scatter_single_autograd")


def trains_as_eager(
    function: Any, inputs: list[Tensor], collectives: int, tolerance: float = 1e-10, **options: Any
) -> list[Record]:
    """Loss and gradients of a compiled function, twice, as in eager; returns the records."""
    registry = torch._C._distributed_c10d._get_work_registry_size()

    def step(call: Any) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        result = call(*leaves)
        result.square().sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    want = step(function)
    with fo_compiler.record() as report, generating(False):
        compiled = ours(function, **options)
        for _ in range(2):
            for index, (a, b) in enumerate(zip(step(compiled), want, strict=True)):
                torch.testing.assert_close(
                    a, b, rtol=tolerance, atol=tolerance, msg=lambda m, index=index: f"output {index}: {m}"
                )
                assert a.stride() == b.stride(), f"output {index}"
    assert_one_record_each(report.records, collectives)
    assert_nothing_left(registry)
    return report.records


def attention_block(causal: bool, depth: int) -> list[Record]:
    """all-gather along the sequence -> q, k, v -> attention -> output projection -> reduce-scatter, and its gradients."""
    group, heads = dist.group.WORLD, 4

    def block(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
        batch, seq, dim = x.shape[0], x.shape[1] * dist.get_world_size(), x.shape[2]
        parts = (gather_autograd(x, 1, group) @ qkv).chunk(3, -1)
        q, k, v = (part.reshape(batch, seq, heads, dim // heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return scatter_autograd(y.transpose(1, 2).reshape(batch, seq, dim) @ out, "sum", 1, group)

    inputs = [own(1, 2, 6, 32), own(2, 32, 96), own(3, 32, 32)]
    return trains_as_eager(block, inputs, 4, schedule="ring", depth=depth)


def fully_sharded_layers() -> list[Record]:
    """Parameters gathered in the graph, cast to a narrower type; their gradients averaged over the ranks."""
    group = dist.group.WORLD

    def layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for shard in (up, down):
            weight = gather_autograd(shard.float(), 0, group)
            x = torch.tanh(F.linear(x, weight))
        return x

    inputs = [own(1, 8, 16).float(), own(2, 12, 16), own(3, 8, 24)]
    return trains_as_eager(layers, inputs, 4, tolerance=1e-4, schedule="ring")


def eight_bits() -> list[Record]:
    """Activations in float8 gathered with the scales of their rows."""
    group = dist.group.WORLD

    def function(x: Tensor, w: Tensor, scale: Tensor, w_scale: Tensor) -> list[Tensor]:
        gathered = all_gather(x.view(torch.uint8), 0, group)
        both = all_gather(scale, 0, group)
        return [
            torch._scaled_mm(
                funcol.wait_tensor(gathered).view(torch.float8_e4m3fn), w.t(), both, w_scale, out_dtype=torch.float32
            )
        ]

    x, w = (t.float().to(torch.float8_e4m3fn) for t in (own(1, 8, 32), shared(0, 48, 32)))
    scales = (own(2, 8, 1).float().abs(), shared(1, 1, 48).float().abs())
    with torch.no_grad():
        return matches_eager(function, (x, w, *scales), 2, schedule="ring")


def coalesced() -> list[Record]:
    """Some parts of coalesced collectives are rewritten, others are not."""
    group = dist.group.WORLD

    def function(a: Tensor, b: Tensor, w: Tensor) -> list[Tensor]:
        first, second, third = (
            funcol.wait_tensor(t) for t in funcol.all_gather_into_tensor_coalesced([a, b, a + b], group)
        )
        again = funcol.wait_tensor(all_gather(b, 0, group))
        scattered = funcol.reduce_scatter_tensor_coalesced([a @ w, b], "sum", [0, 0], group)
        summed = funcol.all_reduce_coalesced([a, b * 2], "sum", group)
        return [first @ w, second * 2, third + 1, again @ w, *map(funcol.wait_tensor, [*scattered, *summed])]

    inputs = (own(1, 8, 24), own(2, 8, 24), shared(0, 24, 16))
    with torch.no_grad(), fo_compiler.record() as report, generating(False):
        want = function(*inputs)
        got = ours(function, schedule="ring")(*inputs)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            assert a.stride() == b.stride()
    return report.records


def inputs_and_outputs() -> list[Record]:
    """Un-awaited inputs, transposed and strided ones, and results that leave the graph as they came."""
    group = dist.group.WORLD

    def strided(x: Tensor) -> Tensor:
        """torch 2.11 itself refuses collectives of what is not contiguous."""
        return x if TORCH_VERSION >= (2, 13) else x.contiguous()

    def function(pending: Tensor, x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
        return [
            reduce_scatter(pending @ w, "sum", 0, group),
            all_gather(strided(x.t()), 0, group) @ w,
            all_gather(strided(y[:, ::2]), 0, group) @ w,
            all_gather(w.t() @ w, 0, group),
            reduce_scatter(strided((y[:, ::2] @ w).t()), "sum", 0, group).t(),
            all_gather(x, 1, group),
        ]

    part, w = own(1, 8, 24), shared(0, 24, 16)
    inputs = (own(2, 24, 8), own(3, 8, 48), w)
    registry = torch._C._distributed_c10d._get_work_registry_size()
    with torch.no_grad(), fo_compiler.record() as report, generating(False):
        want = function(funcol.wait_tensor(all_gather(part, 0, group)), *inputs)
        compiled = ours(function, schedule="ring")
        for _ in range(2):
            got = compiled(all_gather(part, 0, group), *inputs)
            for index, (a, b) in enumerate(zip(got, want, strict=True)):
                torch.testing.assert_close(
                    funcol.wait_tensor(a), funcol.wait_tensor(b), rtol=1e-12, atol=1e-12, msg=f"output {index}"
                )
                assert a.stride() == b.stride(), f"output {index}"
    del want, got
    assert_nothing_left(registry)
    return report.records


def both_axes_at_once() -> list[Record]:
    """Parameters sharded over one axis of a mesh, activations over the other: in one graph, and its gradients."""
    from tests.distributed.checks import mesh_2x2

    mesh = mesh_2x2()

    def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        up, down = (gather_autograd(shard, 0, (mesh, 0)) for shard in (up, down))
        hidden = torch.relu(F.linear(gather_autograd(x, 1, (mesh, 1)), up))
        return scatter_autograd(F.linear(hidden, down), "sum", 1, (mesh, 1))

    inputs = [own(1, 2, 4, 12), own(2, 8, 12), own(3, 6, 16)]
    return trains_as_eager(layer, inputs, 8, schedule="direct")
