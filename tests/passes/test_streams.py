"""Streams of rewritten graphs: who runs where, what waits for what, and that the race checker finds what is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fo_compiler.codegen.absent_gpu import CUDA, move_graph
from fo_compiler.errors import OptionError
from fo_compiler.options import Options
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.passes.races import Plan, find_races
from fo_compiler.passes.slice_matmuls import use_slice_matmuls
from fo_compiler.passes.streams import assign_streams, has_streams, plan_of
from fo_compiler.runtime import ops, stream_ops
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.runtime.streams import CALLER, COMM, COMPUTE
from fo_compiler.testing import rewrite_for_rank, run_ranks
from tests.graphs import all_gather, all_reduce, capture, reduce_scatter
from tests.passes.helpers import on_each_rank, tensors
from tests.passes.test_races import unordered_conflicts

RANKS = 3
Body = Callable[..., Any]


def gather_two(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    whole = all_gather(x, 1, RANKS)
    return whole @ w, (whole @ v).relu()


def scatter(x: Tensor, w: Tensor) -> Tensor:
    return reduce_scatter((x * 2) @ w, 1, RANKS) + 1


def block(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x + reduce_scatter((all_gather(x, 1, RANKS) @ w).relu() @ v, 1, RANKS)


def chain(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """One region with two matmuls: what the first writes on a side stream, the second reads on it."""
    return reduce_scatter((all_gather(x, 0, RANKS) @ w).relu() @ v, 0, RANKS)


def reduced(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(x @ w).sin()


BODIES: dict[str, tuple[Body, tuple[tuple[int, ...], ...]]] = {
    "gather_two": (gather_two, ((2, 4, 6), (6, 5), (6, 7))),
    "scatter": (scatter, ((2, 12, 6), (6, 5))),
    "block": (block, ((2, 4, 6), (6, 8), (8, 6))),
    "chain": (chain, ((6, 6), (6, 8), (8, 6))),
    "reduced": (reduced, ((12, 6), (6, 5))),
}


def on_cuda(name: str, compute_streams: int = 1, rank: int = 1, **options: Any) -> fx.GraphModule:
    body, shapes = BODIES[name]
    gm = capture(body, tensors(*shapes))
    move_graph(gm, CUDA)
    made = Options(rewrite="always", machine="h100-nvlink", compute_streams=compute_streams, **options)
    overlap(gm.graph, made, LocalWorld(RANKS).transport(rank), pin=False)
    return gm


def calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


@pytest.mark.parametrize("transport", ["c10d", "copy_engine"])
@pytest.mark.parametrize("compute_streams", [1, 2])
@pytest.mark.parametrize("name", BODIES)
def test_every_op_takes_the_arguments_that_it_is_given(name: str, compute_streams: int, transport: str) -> None:
    gm = on_cuda(name, compute_streams, transport=transport)
    for node in gm.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "fo_compiler":
            node.target(*fx.map_arg(node.args, value_of), **fx.map_arg(node.kwargs, value_of))
    given = {exchange.kwargs.get("transport", "c10d") for exchange in calls(gm, ops.exchange)}
    assert given == {transport}


def value_of(node: fx.Node) -> Any:
    return node.meta["val"]


@pytest.mark.parametrize("name", BODIES)
def test_a_transfer_runs_on_the_communication_stream_and_its_wait_waits_for_its_event(name: str) -> None:
    gm = on_cuda(name)
    exchanges = calls(gm, ops.exchange)
    assert exchanges
    for exchange in exchanges:
        assert exchange.kwargs["stream"] == COMM
        assert exchange.kwargs["after"] == [CALLER]
        (wait,) = exchange.users
        assert wait.kwargs == {"after": [exchange.kwargs["event"]]}
    assert len({exchange.kwargs["event"] for exchange in exchanges}) == len(exchanges)


@pytest.mark.parametrize("name", BODIES)
def test_with_two_streams_slices_take_turns(name: str) -> None:
    gm = on_cuda(name, compute_streams=2)
    by_region: dict[str, dict[int, set[int]]] = {}
    for node in calls(gm, stream_ops.slice_matmul):
        place = node.meta["fo"]
        by_region.setdefault(place.region, {}).setdefault(place.slice, set()).add(node.kwargs["stream"])
    assert by_region
    for slices in by_region.values():
        assert [streams for streams in slices.values()] == [{COMPUTE[i % 2]} for i in range(len(slices))]


def test_matmuls_of_a_scatter_wait_for_the_fork_alone_and_not_for_the_sums_before_them() -> None:
    gm = on_cuda("scatter", compute_streams=2)
    (fork,) = calls(gm, stream_ops.fork)
    assert {tuple(node.kwargs["after"]) for node in calls(gm, stream_ops.slice_matmul)} == {(fork.kwargs["event"],)}


@pytest.mark.parametrize("compute_streams", [1, 2])
def test_no_region_uses_more_than_the_streams_of_the_process(compute_streams: int) -> None:
    streams = {step.stream for name in BODIES for step in plan_of(on_cuda(name, compute_streams).graph)}
    assert streams == {CALLER, COMM, *COMPUTE[: 2 * (compute_streams - 1)]}


def test_graphs_without_streams_are_left_as_they_are() -> None:
    body, shapes = BODIES["block"]
    gm = capture(body, tensors(*shapes))
    options = Options(rewrite="always", compute_streams=2)
    overlap(gm.graph, options, LocalWorld(RANKS).transport(0), pin=False)
    before = str(gm.graph)
    assign_streams(gm.graph, 2)
    assert not has_streams(gm.graph)
    assert str(gm.graph) == before
    assert not calls(gm, stream_ops.slice_matmul)


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(list(BODIES)),
    st.sampled_from([1, 2]),
    st.sampled_from(["ring", "direct", "tapered"]),
    st.sampled_from([1, 2]),
    st.integers(0, RANKS - 1),
    st.data(),
)
def test_plans_have_no_race_and_every_broken_one_is_found(
    name: str, compute_streams: int, schedule: str, slices: int, rank: int, data: st.DataObject
) -> None:
    plan = plan_of(on_cuda(name, compute_streams, rank, schedule=schedule, slices_per_rank=slices).graph)
    assert find_races(plan) == []
    step = data.draw(st.sampled_from([step for step in plan if step.stream != CALLER or step.holds - {""}]))
    broken = data.draw(st.sampled_from(breakages(plan, plan.index(step))))
    # Another event on the same stream may stand in for the one that is gone: then no conflict is left unordered.
    assert find_races(broken) or not unordered_conflicts(broken), f"not found: {step}"
    everywhere = tuple(replace(step, after=()) for step in plan)
    assert find_races(everywhere)


def breakages(plan: Plan, index: int) -> list[Plan]:
    """Plans with one mistake at a launch on a side stream, or at a fork, wait or join."""
    step = plan[index]
    changes: list[dict[str, Any]] = []
    if step.stream != CALLER:
        changes += [{"after": ()}, {"after": (10**6,)}]
        if step.event in {event for other in plan for event in other.after}:
            changes += [{"event": 10**6}]
    elif step.after:
        changes += [{"after": ()}]
    else:
        changes += [{"event": 10**6}]
    return [tuple(replace(s, **change) if s is step else s for s in plan) for change in changes]


@pytest.mark.parametrize("name", BODIES)
def test_slice_matmuls_give_what_the_plain_graph_gives(name: str) -> None:
    body, shapes = BODIES[name]
    gm = capture(body, tensors(*shapes))
    inputs = on_each_rank(RANKS, *shapes)
    plain = run_ranks(lambda _: gm, inputs, LocalWorld(RANKS))
    world = LocalWorld(RANKS)
    graphs = [rewrite_for_rank(gm, Options(rewrite="always"), world.transport(rank))[0] for rank in range(RANKS)]
    for rewritten in graphs:
        use_slice_matmuls(rewritten.graph)
        rewritten.graph.lint()
        assert not calls(rewritten, torch.ops.aten.mm.default)
    results = run_ranks(graphs.__getitem__, inputs, world)
    torch.testing.assert_close(results, plain, rtol=1e-12, atol=1e-12)


def test_a_reshape_that_copies_is_copied_once_for_matmul_and_join() -> None:
    gm = on_cuda("scatter", compute_streams=2)
    for matmul in calls(gm, stream_ops.slice_matmul):
        operand = matmul.args[1]
        assert operand.args[0].target is torch.ops.aten.clone.default
        assert any(user.target is stream_ops.join for user in operand.users)


def test_a_torch_that_cannot_order_writes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fo_compiler.passes.overlap_pass.orders_mutation", lambda: False)
    body, shapes = BODIES["scatter"]
    gm = capture(body, tensors(*shapes))
    with pytest.raises(OptionError, match=r"need torch 2\.13"):
        overlap(gm.graph, Options(rewrite="always", slice_matmul="library"), LocalWorld(RANKS).transport(0))
