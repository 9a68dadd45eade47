"""Weight gradients in bfloat16: their slices are multiplied and added in float32, and rounded once, where CUDA can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode

from fo_compiler.codegen.absent_gpu import CPU, CUDA, move_graph
from fo_compiler.options import Options
from fo_compiler.passes.decide import decide
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.passes.regions import plan_region
from fo_compiler.passes.separability import NotSeparable
from fo_compiler.passes.sites import Site
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import rewrite_for_rank, run_ranks
from fo_compiler.torch_adapter import has_float32_products
from tests.graphs import all_gather, capture
from tests.passes.helpers import aten, sites, tensors

RANKS = 4
prims = torch.ops.prims
WIDE = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}


def gradient(x: Tensor, grad: Tensor) -> Tensor:
    """h [T, M] whole, grad [T / R, N] gathered -> [M, N]"""
    return x.t() @ all_gather(grad, 0, RANKS)


def gradient_of_each_expert(x: Tensor, grad: Tensor) -> Tensor:
    return torch.bmm(x.transpose(1, 2), all_gather(grad, 1, RANKS))


def row_parallel_backward(x: Tensor, grad: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Both gradients of a row-parallel layer: of its input, cut along rows, and of its weight, a sum over the slices."""
    whole = all_gather(grad, 0, 8)
    return whole @ w.t(), x.t() @ whole


BODIES = {
    aten.mm.default: (gradient, ((64, 6), (16, 5))),
    aten.bmm.default: (gradient_of_each_expert, ((3, 64, 6), (3, 16, 5))),
}


def on_cuda(function: Callable[..., Any], inputs: list[Tensor]) -> fx.GraphModule:
    gm = capture(function, inputs)
    move_graph(gm, CUDA)
    overlap(gm.graph, Options(rewrite="always", schedule="ring"), LocalWorld(RANKS).transport(0), pin=False)
    return gm


def multiplied_wide(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """What `mm.dtype` and `bmm.dtype` do, which CPUs lack: products of 16-bit values are exact in float32."""
    return a.to(dtype) @ b.to(dtype)


def on_cpu(function: Callable[..., Any], inputs: list[Tensor], world: LocalWorld, rank: int) -> fx.GraphModule:
    gm = capture(function, inputs)
    gm, _ = rewrite_for_rank(gm, Options(rewrite="always", schedule="ring"), world.transport(rank))
    assert any(node.target in WIDE.values() for node in gm.graph.nodes)
    for node in gm.graph.nodes:
        if node.target in WIDE.values():
            node.target = multiplied_wide
    gm.recompile()
    return gm


@pytest.mark.parametrize("product", BODIES, ids=str)
def test_each_slice_is_multiplied_and_added_in_float32_and_the_sum_is_rounded_once(product: Any) -> None:
    function, shapes = BODIES[product]
    graph = on_cuda(function, tensors(*shapes, dtype=torch.bfloat16)).graph
    computed = [node for node in graph.nodes if node.target in (*WIDE, *WIDE.values(), aten.add.Tensor)]
    assert [node.target for node in computed].count(WIDE[product]) == RANKS
    assert [node.target for node in computed].count(aten.add.Tensor) == RANKS - 1
    assert len(computed) == 2 * RANKS - 1
    assert {node.meta["val"].dtype for node in computed} == {torch.float32}
    (cast,) = graph.find_nodes(op="call_function", target=prims.convert_element_type.default)
    assert cast.args == (computed[-1], torch.bfloat16)
    assert graph.output_node().args[0] is cast


def values(kind: str, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "cancelling":  # along the dim that is summed: what is left is far smaller than the terms
        signs = torch.tensor([1.0, -1.0]).repeat_interleave(shape[-2] // 2).reshape(-1, 1)
        value = 100 * signs + value
    elif kind == "mixed sizes":
        value = value * 10.0 ** (torch.rand(shape, generator=generator, dtype=torch.float64) * 5 - 4)
    return value.bfloat16()


@pytest.mark.parametrize("kind", ["usual", "cancelling", "mixed sizes"])
@pytest.mark.parametrize("product", BODIES, ids=str)
def test_the_error_is_that_of_one_whole_matmul(product: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rules", "decide"):
        monkeypatch.setattr(f"fo_compiler.passes.{module}.has_float32_products", lambda device: True)
    function, (x_shape, grad_shape) = BODIES[product]
    x = values("usual", *x_shape, seed=9).abs()
    grads = values(kind, *x_shape[:-1], grad_shape[-1], seed=1).chunk(RANKS, -2)
    inputs = [[x, grad.contiguous()] for grad in grads]
    world = LocalWorld(RANKS)
    graphs = [on_cpu(function, inputs[rank], world, rank) for rank in range(RANKS)]
    results = run_ranks(graphs.__getitem__, inputs, world)
    whole, factor = torch.cat(grads, -2), x.transpose(-1, -2)
    exact = factor.double() @ whole.double()

    def rms(result: Tensor) -> float:
        return float((result.double() - exact).square().mean().sqrt())

    plain = rms(factor @ whole)
    assert all(result.dtype is torch.bfloat16 for result in results)
    assert max(map(rms, results)) <= 1.005 * plain
    parts = [a @ b for a, b in zip(factor.chunk(RANKS, -1), grads, strict=True)]
    assert rms(sum(parts[1:], parts[0])) > 1.1 * plain, "sums of rounded slices are worse: the values tell them apart"


def row_parallel_site(dtype: torch.dtype = torch.bfloat16, device: torch.device = CUDA) -> Site:
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype) for shape in ((8192, 1792), (1024, 4096), (1792, 4096))]
        gm = capture(row_parallel_backward, inputs)
    move_graph(gm, device)
    (site,) = sites(gm, 8)
    assert isinstance(site, Site)
    return site


@pytest.mark.parametrize(("machine", "matmuls"), [("h100-infiniband", 2), ("h100-nvlink", 1)])
def test_a_weight_gradient_joins_the_region_where_it_saves_more_than_its_adds_cost(machine: str, matmuls: int) -> None:
    decision = decide(row_parallel_site(), Options(machine=machine))
    assert decision.schedule is not None
    assert len(decision.region.matmuls) == matmuls


@pytest.mark.parametrize(
    ("dtype", "device", "matmuls"),
    [(torch.bfloat16, CPU, 1), (torch.float16, CUDA, 1), (torch.float32, CUDA, 2), (torch.bfloat16, CUDA, 2)],
)
def test_what_has_no_product_in_float32_is_not_summed_over_slices(
    dtype: torch.dtype, device: torch.device, matmuls: int
) -> None:
    region = plan_region(row_parallel_site(dtype, device), 1, wide_sums=True)
    assert len(region.matmuls) == matmuls
    assert [refusal for refusal in region.refusals if f"round to {dtype}" in refusal] == region.refusals
    assert len(region.refusals) == 2 - matmuls


def test_a_weight_gradient_alone_is_refused_where_slices_would_round() -> None:
    gm = capture(gradient, tensors((64, 6), (16, 5), dtype=torch.bfloat16))
    (site,) = sites(gm, RANKS)
    assert isinstance(site, Site)
    with pytest.raises(NotSeparable, match=r"each slice would round to torch\.bfloat16"):
        decide(site, Options(rewrite="always"))


def test_inductors_own_matmul_is_not_asked_for_float32() -> None:
    assert has_float32_products(CUDA)
    with config.patch({"triton.native_matmul": True}):
        assert not has_float32_products(CUDA)
    assert has_float32_products(CUDA)
