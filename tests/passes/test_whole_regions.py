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
from fo_compiler.dump import graph_text
from fo_compiler.options import Options
from fo_compiler.passes import whole_nodes, whole_regions
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.passes.races import find_races
from fo_compiler.passes.streams import plan_of
from fo_compiler.passes.whole_nodes import WholeRegion
from fo_compiler.passes.whole_regions import read_region, replace_region, use_whole_region
from fo_compiler.records import GraphRecords
from fo_compiler.runtime import ops, whole_gather, whole_scatter
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.schedule import Kind, build
from fo_compiler.schedule.presets import find_machine
from fo_compiler.testing import rewrite_for_rank, run_ranks
from tests.graphs import all_gather, all_reduce, capture, reduce_scatter
from tests.passes.helpers import check_golden, on_each_rank, tensors

RANKS = 3
GATHER, SCATTER = whole_gather.gather_matmul, whole_scatter.matmul_scatter
TAGS = {Kind.ALL_GATHER: "ag0", Kind.REDUCE_SCATTER: "rs0"}
Shapes = tuple[tuple[int, ...], ...]
Body = Callable[..., Any]


def gathered_rows(x: Tensor, w: Tensor) -> Tensor:
    return (all_gather(x, 0, RANKS) @ w).relu()


def gathered_batch(x: Tensor, w: Tensor) -> Tensor:
    """Slices of a flattened batch, whose result is put in order behind the region."""
    return all_gather(x, 1, RANKS) @ w + 1


def scattered_rows(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(x @ w, 0, RANKS).relu()


def scattered_batch(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(x @ w, 1, RANKS) + 1


def scattered_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Rows of a transposed tensor."""
    return reduce_scatter(x.t() @ g, 0, RANKS)


def mean(x: Tensor, w: Tensor) -> Tensor:
    """The division stays behind the op."""
    return reduce_scatter(x @ w, 0, RANKS, op="avg")


BODIES: dict[Body, tuple[Kind, Shapes]] = {
    gathered_rows: (Kind.ALL_GATHER, ((4, 6), (6, 5))),
    gathered_batch: (Kind.ALL_GATHER, ((2, 4, 6), (6, 5))),
    scattered_rows: (Kind.REDUCE_SCATTER, ((12, 6), (6, 5))),
    scattered_batch: (Kind.REDUCE_SCATTER, ((2, 12, 6), (6, 5))),
    scattered_gradient: (Kind.REDUCE_SCATTER, ((6, 12), (6, 5))),
    mean: (Kind.REDUCE_SCATTER, ((12, 6), (6, 5))),
}


def columns_of_the_gathered(x: Tensor, w: Tensor) -> Tensor:
    return w @ all_gather(x, 1, RANKS)


def two_matmuls(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    whole = all_gather(x, 0, RANKS)
    return whole @ w, whole @ (2 * w)


def pointwise_first(x: Tensor, w: Tensor) -> Tensor:
    return all_gather(x, 0, RANKS).sin() @ w


def gathered_too(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    whole = all_gather(x, 0, RANKS)
    return whole @ w, whole


def columns_of_the_sum(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(x @ w, 1, RANKS)


def sum_of_two(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(x @ w + x.cos() @ (2 * w), 0, RANKS)


def pointwise_behind(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter((x @ w).sin(), 0, RANKS)


def product_too(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = x @ w
    return reduce_scatter(product, 0, RANKS), product


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("family", ["ring", "direct", "bidirectional"])
@pytest.mark.parametrize("body", BODIES)
def test_a_region_as_one_op_gives_what_the_plain_graph_gives(
    body: Body, family: str, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_nodes, "DTYPES", (torch.float64,))  # whose values can be compared well
    kind, shapes = BODIES[body]
    inputs = on_each_rank(RANKS, *shapes)
    plain = capture(body, inputs[0])
    options = Options(rewrite="always", schedule=family, slices_per_rank=m, slice_matmul="whole")
    world = LocalWorld(RANKS)
    graphs = []
    for rank in range(RANKS):
        gm, _ = rewrite_for_rank(plain, options, world.transport(rank))
        found = read_region(gm.graph, TAGS[kind], kind)
        assert isinstance(found, WholeRegion), found
        assert len(found.order) == 2 * RANKS * m
        assert sum(part >= 0 for part in found.order[1::2]) == m
        replace_region(gm.graph, found, "c10d")
        gm.graph.lint()
        gm.recompile()
        for gone in (ops.exchange, ops.wait, torch.ops.aten.mm.default):
            assert not calls(gm, gone)
        graphs.append(gm)
    expected = run_ranks(lambda _: plain, inputs, LocalWorld(RANKS))
    for want, got in zip(expected, run_ranks(graphs.__getitem__, inputs, world), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("body", "shapes", "reason"),
    [
        (columns_of_the_gathered, ((4, 6), (5, 4)), "the matmul is not cut along its rows"),
        (two_matmuls, ((4, 6), (6, 5)), "its body is more than one matmul of what is gathered"),
        (pointwise_first, ((4, 6), (6, 5)), "it sends or receives what it does not multiply"),
        (gathered_too, ((4, 6), (6, 5)), "something else reads its slices"),
        (columns_of_the_sum, ((4, 6), (6, 6)), "the matmul is not cut along its rows"),
        (sum_of_two, ((6, 6), (6, 5)), "its body is more than one matmul and sums of what it gives"),
        (pointwise_behind, ((6, 6), (6, 5)), "it sends what is no product, or no sum with one"),
        (product_too, ((6, 6), (6, 5)), "something else reads its slices"),
        (mean, ((6, 6), (6, 5)), "something else reads its sums before they are rounded"),  # in 16 bit
    ],
)
def test_what_is_no_matmul_and_collective_says_so_and_stays(body: Body, shapes: Shapes, reason: str) -> None:
    gm, records = on_cuda(body, shapes)
    assert not calls(gm, GATHER)
    assert not calls(gm, SCATTER)
    assert calls(gm, ops.exchange)
    (record,) = records.records
    assert f"a kernel a slice: {reason}" in record.reason


def on_cuda(body: Body, shapes: Shapes, **options: Any) -> tuple[fx.GraphModule, GraphRecords]:
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


def summed_in_float32(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter(torch.ops.prims.convert_element_type(x @ w, torch.float32), 0, RANKS)


ON_CUDA = {
    **{body: case for body, case in BODIES.items() if body is not mean},
    summed_in_float32: (Kind.REDUCE_SCATTER, ((6, 6), (6, 5))),
}


@pytest.mark.parametrize("body", ON_CUDA)
def test_on_cuda_with_the_copy_engine_it_is_used_where_it_is_asked_for(body: Body) -> None:
    kind, shapes = ON_CUDA[body]
    gm, records = on_cuda(body, shapes)
    (op,) = calls(gm, GATHER if kind is Kind.ALL_GATHER else SCATTER)
    assert not calls(gm, ops.exchange)
    assert op.kwargs == {"transport": "copy_engine"}
    made = op.target(*fx.map_arg(op.args, lambda n: n.meta["val"]), **op.kwargs)
    assert (made.shape, made.dtype, made.device) == (op.meta["val"].shape, op.meta["val"].dtype, op.meta["val"].device)
    assert made.dtype == (torch.float32 if body is summed_in_float32 else torch.bfloat16)
    assert "one kernel for the region" in records.records[0].reason
    assert find_races(plan_of(gm.graph)) == []


def test_a_dump_shows_the_op_in_the_place_of_its_slices() -> None:
    gm, _ = on_cuda(scattered_batch, ((2, 6, 4), (4, 5)), slices_per_rank=1)
    check_golden("reduce_scatter_whole.txt", graph_text(gm.graph))


@pytest.mark.parametrize(
    "change",
    [{"transport": "c10d"}, {"slice_matmul": "auto"}, {"slice_matmul": "library"}, {"dtype": torch.float64}],
)
@pytest.mark.parametrize("body", [gathered_rows, scattered_rows])
def test_without_any_of_its_conditions_it_is_not_used(body: Body, change: dict[str, Any]) -> None:
    gm, _ = on_cuda(body, BODIES[body][1], **change)
    assert not calls(gm, GATHER)
    assert not calls(gm, SCATTER)
    assert calls(gm, ops.exchange)


def test_both_halves_of_an_all_reduce_are_ops() -> None:
    def two_layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return all_reduce(x @ w, "0") @ v

    gm, records = on_cuda(two_layers, ((6, 4), (4, 5), (5, 4)), schedule="ring")
    assert len(calls(gm, GATHER)) == len(calls(gm, SCATTER)) == 1
    assert not calls(gm, ops.exchange)
    assert records.records[0].reason.count("one kernel for the region") == 2


@pytest.mark.parametrize("form", [None, FUSED, LIBRARY])
@pytest.mark.parametrize("body", [gathered_rows, scattered_rows])
def test_unless_it_is_forced_the_model_chooses(body: Body, form: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it takes one launch rather than three, where launches are what counts."""
    kind, shapes = BODIES[body]
    choose = whole_regions.choose_kernel
    if form is not None:
        monkeypatch.setattr(whole_regions, "choose_kernel", lambda *a, **k: replace(choose(*a, **k), form=form))
    gm, _ = on_cuda(body, shapes, slice_matmul="auto", schedule="ring", slices_per_rank=1)
    schedule, machine = build(kind, "ring", RANKS, 1), replace(find_machine("h100-nvlink"), launch_us=50.0)
    used, reason = use_whole_region(gm.graph, TAGS[kind], schedule, machine, "copy_engine", forced=False)
    gm.graph.lint()
    assert used is (form != LIBRARY), reason
    assert bool(calls(gm, GATHER) + calls(gm, SCATTER)) is used
    assert "predicted" in reason


def test_a_slice_that_leaves_before_an_earlier_one_is_done_keeps_its_kernel() -> None:
    """The one kernel would hold it up until the earlier one is done, for which another rank may need it."""
    options = {"transport": "c10d", "schedule": "ring", "slices_per_rank": 2, "dtype": torch.float32}
    gm, _ = on_cuda(scattered_rows, ((12, 6), (6, 5)), **options)
    assert isinstance(read_region(gm.graph, "rs0", Kind.REDUCE_SCATTER), WholeRegion)
    first, _, third, fourth, *_ = calls(gm, ops.exchange)
    (wait,) = (node for node in first.users if node.target is ops.wait)
    for node in (third, third.args[0], wait):  # the third slice leaves behind the fourth
        fourth.append(node)
    gm.graph.lint()
    reason = "a slice leaves before the sum of an earlier one is done"
    assert read_region(gm.graph, "rs0", Kind.REDUCE_SCATTER) == reason
