"""Regions as one op: the same values in the op's plain form, what it is read from, and when it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fo_compiler.codegen.absent_gpu import CUDA, move_graph
from fo_compiler.codegen.choice import FUSED, LIBRARY
from fo_compiler.options import Options
from fo_compiler.passes import whole_regions
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.passes.races import find_races
from fo_compiler.passes.streams import plan_of
from fo_compiler.passes.whole_regions import WholeGather, read_region, replace_region, use_whole_gather
from fo_compiler.records import GraphRecords
from fo_compiler.runtime import ops, whole_gather
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.schedule import Kind, build
from fo_compiler.schedule.presets import find_machine
from fo_compiler.testing import rewrite_for_rank, run_ranks
from tests.graphs import all_gather, capture, reduce_scatter
from tests.passes.helpers import on_each_rank, tensors

RANKS = 3
Shapes = tuple[tuple[int, ...], ...]


def rows(x: Tensor, w: Tensor) -> Tensor:
    return (all_gather(x, 0, RANKS) @ w).relu()


def batch(x: Tensor, w: Tensor) -> Tensor:
    """Slices of a flattened batch, whose result is put in order behind the region."""
    return all_gather(x, 1, RANKS) @ w + 1


BODIES: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "rows": (rows, ((4, 6), (6, 5))),
    "batch": (batch, ((2, 4, 6), (6, 5))),
}


def dim_of_columns(x: Tensor, w: Tensor) -> Tensor:
    return w @ all_gather(x, 1, RANKS)


def two_matmuls(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    whole = all_gather(x, 0, RANKS)
    return whole @ w, whole @ (2 * w)


def pointwise_first(x: Tensor, w: Tensor) -> Tensor:
    return all_gather(x, 0, RANKS).sin() @ w


def gathered_too(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    whole = all_gather(x, 0, RANKS)
    return whole @ w, whole


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("family", ["ring", "direct", "bidirectional"])
@pytest.mark.parametrize("name", BODIES)
def test_a_region_as_one_op_gives_what_the_plain_graph_gives(name: str, family: str, m: int) -> None:
    body, shapes = BODIES[name]
    inputs = on_each_rank(RANKS, *shapes)
    plain = capture(body, inputs[0])
    options = Options(rewrite="always", schedule=family, slices_per_rank=m)
    world = LocalWorld(RANKS)
    graphs = []
    for rank in range(RANKS):
        gm, _ = rewrite_for_rank(plain, options, world.transport(rank))
        cast_values(gm, torch.float32)
        found = read_region(gm.graph, "ag0")
        assert isinstance(found, WholeGather), found
        assert len(found.own) == m
        replace_region(gm.graph, found, "c10d")
        gm.graph.lint()
        gm.recompile()
        assert not gm.graph.find_nodes(op="call_function", target=ops.exchange)
        graphs.append(gm)
    expected = run_ranks(lambda _: plain, inputs, LocalWorld(RANKS))
    for want, got in zip(expected, run_ranks(graphs.__getitem__, inputs, world), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def cast_values(gm: fx.GraphModule, dtype: torch.dtype) -> None:
    """Say of a float64 graph, whose values can be compared well, that it has a dtype for which there is a kernel."""
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dtype == torch.float64:
            node.meta["val"] = node.meta["val"].to(dtype)


@pytest.mark.parametrize(
    ("body", "shapes", "reason"),
    [
        (dim_of_columns, ((4, 6), (5, 4)), "the matmul is not cut along its rows"),
        (two_matmuls, ((4, 6), (6, 5)), "its body is more than one matmul"),
        (pointwise_first, ((4, 6), (6, 5)), "it sends or receives what it does not multiply"),
        (gathered_too, ((4, 6), (6, 5)), "something else reads its slices"),
    ],
)
def test_what_is_no_gather_and_matmul_says_so_and_stays(body: Callable[..., Any], shapes: Shapes, reason: str) -> None:
    gm, records = on_cuda(body, shapes)
    assert not calls(gm, whole_gather.gather_matmul)
    assert calls(gm, ops.exchange)
    (record,) = records.records
    assert f"a kernel a slice: {reason}" in record.reason


def on_cuda(body: Callable[..., Any], shapes: Shapes, **options: Any) -> tuple[fx.GraphModule, GraphRecords]:
    gm = capture(body, tensors(*shapes, dtype=options.pop("dtype", torch.bfloat16)))
    move_graph(gm, CUDA)
    chosen = {
        "rewrite": "always",
        "machine": "h100-nvlink",
        "transport": "copy_engine",
        "slice_matmul": "whole",
        **options,
    }
    records = overlap(gm.graph, Options(**chosen), LocalWorld(RANKS).transport(1), pin=False)
    gm.graph.lint()
    return gm, records


def calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("name", BODIES)
def test_on_cuda_with_the_copy_engine_it_is_used_where_it_is_asked_for(name: str) -> None:
    gm, records = on_cuda(*BODIES[name])
    (op,) = calls(gm, whole_gather.gather_matmul)
    assert not calls(gm, ops.exchange)
    assert op.kwargs == {"transport": "copy_engine"}
    made = op.target(*fx.map_arg(op.args, lambda n: n.meta["val"]), **op.kwargs)
    assert (made.shape, made.dtype, made.device) == (op.meta["val"].shape, op.meta["val"].dtype, op.meta["val"].device)
    assert "one kernel for the region, as asked for" in records.records[0].reason
    assert find_races(plan_of(gm.graph)) == []


@pytest.mark.parametrize(
    "change",
    [{"transport": "c10d"}, {"slice_matmul": "auto"}, {"slice_matmul": "library"}, {"dtype": torch.float64}],
)
def test_without_any_of_its_conditions_it_is_not_used(change: dict[str, Any]) -> None:
    gm, _ = on_cuda(*BODIES["rows"], **change)
    assert not calls(gm, whole_gather.gather_matmul)
    assert calls(gm, ops.exchange)


def test_a_reduce_scatter_stays_slice_by_slice() -> None:
    gm, _ = on_cuda(lambda x, w: reduce_scatter(x @ w, 0, RANKS), ((6, 6), (6, 5)))
    assert not calls(gm, whole_gather.gather_matmul)
    assert len(calls(gm, ops.exchange)) == RANKS - 1


@pytest.mark.parametrize("form", [None, FUSED, LIBRARY])
def test_unless_it_is_forced_the_model_chooses(form: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it takes one launch rather than three, where launches are what counts."""
    choose = whole_regions.choose_kernel
    if form is not None:
        monkeypatch.setattr(whole_regions, "choose_kernel", lambda *a, **k: replace(choose(*a, **k), form=form))
    gm, _ = on_cuda(*BODIES["rows"], slice_matmul="auto", schedule="ring", slices_per_rank=1)
    schedule, machine = build(Kind.ALL_GATHER, "ring", RANKS, 1), replace(find_machine("h100-nvlink"), launch_us=50.0)
    used, reason = use_whole_gather(gm.graph, "ag0", schedule, machine, "copy_engine", forced=False)
    gm.graph.lint()
    assert used is (form != LIBRARY), reason
    assert bool(calls(gm, whole_gather.gather_matmul)) is used
    assert "predicted" in reason
