"""Coalesced and repeated collectives: taken apart, and put together again where nothing came of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from fo_compiler.options import Options
from fo_compiler.passes.single_collectives import SINGLE_OF, SingleCollectives
from fo_compiler.passes.sites import is_collective
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import assert_equivalent, rewrite_for_rank
from tests.graphs import all_gather, c10d, capture, reduce_scatter
from tests.passes.helpers import aten, on_each_rank, tensors

RANKS = 2


def gathered(tensors_: list[Tensor]) -> list[Tensor]:
    return [c10d.wait_tensor(t) for t in c10d.all_gather_into_tensor_coalesced(tensors_, RANKS, "0")]


def scattered(tensors_: list[Tensor]) -> list[Tensor]:
    results = c10d.reduce_scatter_tensor_coalesced(tensors_, "sum", RANKS, "0")
    return [c10d.wait_tensor(t) for t in results]


def summed(tensors_: list[Tensor]) -> list[Tensor]:
    return [c10d.wait_tensor(t) for t in c10d.all_reduce_coalesced(tensors_, "avg", "0")]


def collectives(gm: fx.GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if is_collective(node)]


SHAPES = ((4, 6), (4, 6), (6, 8))


def test_coalesced_parameters_are_gathered_one_by_one() -> None:
    def f(a: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
        return [w @ x for w in gathered([a, b])]

    records = assert_equivalent(capture(f, tensors(*SHAPES)), on_each_rank(RANKS, *SHAPES)).records
    assert [record.region for record in records] == [("mm",), ("mm_1",)]
    assert [record.collective for record in records] == [
        f"all_gather_into_tensor (all_gather_into_tensor_coalesced_part{index})" for index in range(2)
    ]


@pytest.mark.parametrize("collective", [scattered, summed])
def test_coalesced_gradients_leave_one_by_one(collective) -> None:
    def f(a: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
        return collective([a @ x, b @ x])

    records = assert_equivalent(capture(f, tensors(*SHAPES)), on_each_rank(RANKS, *SHAPES)).records
    assert [record.region for record in records] == [("mm",), ("mm_1",)]


def test_the_parts_that_are_left_are_coalesced_again() -> None:
    def f(a: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
        first, second, third, _ = gathered([a, b, a + b, x])
        return [first * 2, second @ x, third * 3]

    gm = capture(f, tensors(*SHAPES))
    records = assert_equivalent(gm, on_each_rank(RANKS, *SHAPES)).records
    assert [record.rewritten for record in records] == [False, True, False, False]
    after, _ = rewrite_for_rank(gm, Options(rewrite="always"), LocalWorld(RANKS).transport(0))
    (left,) = [node for node in after.graph.nodes if is_collective(node)]
    assert left.target is c10d.all_gather_into_tensor_coalesced.default
    assert len(left.args[0]) == 3  # type: ignore[arg-type]


def test_a_coalesced_collective_that_is_left_alone_stays_as_it_was_with_one_record() -> None:
    def f(a: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
        return [*(t * 2 for t in gathered([a, b])), *(t + 1 for t in summed([x, a]))]

    gm = capture(f, tensors(*SHAPES))
    after, records = rewrite_for_rank(gm, Options(rewrite="always"), LocalWorld(RANKS).transport(0))
    assert [record.rewritten for record in records.records] == [False, False]
    assert "none of its 2 tensors: no matmul" in records.records[0].reason

    def text(graph: fx.Graph) -> list[str]:
        return [f"{node.name} {node.target} {node.args}" for node in graph.nodes if node.name != "fo_records"]

    assert text(after.graph) == text(gm.graph)


def test_taking_apart_and_putting_together_changes_nothing() -> None:
    def f(a: Tensor, b: Tensor) -> list[Tensor]:
        return [*gathered([a, b]), *scattered([b, a]), *summed([a])]

    gm = capture(f, tensors((4, 6), (4, 6)))
    before = [(node.name, node.target) for node in gm.graph.nodes]
    singles = SingleCollectives(gm.graph)
    assert not set(SINGLE_OF) & {node.target for node in gm.graph.nodes}
    from fo_compiler.records import Record

    records = {
        node.name: Record("inference", node.name, 2, False, None, (), "no")
        for node in gm.graph.nodes
        if is_collective(node)
    }
    found, gone = singles.finish(records)
    gm.graph.lint()
    assert [(node.name, node.target) for node in gm.graph.nodes] == before
    assert len(found) == 3
    assert not any(gone.values())


def test_a_tensor_that_several_consumers_gather_is_gathered_once() -> None:
    def f(x: Tensor, q: Tensor, k: Tensor) -> list[Tensor]:
        return [all_gather(x, 1, RANKS) @ q, all_gather(x, 1, RANKS) @ k]

    shapes = ((2, 4, 6), (6, 8), (6, 3))
    records = assert_equivalent(capture(f, tensors(*shapes)), on_each_rank(RANKS, *shapes)).records
    assert [record.region for record in records] == [("mm", "mm_1")] * 2
    assert "the same as all_gather_into_tensor, whose result is read instead" in records[1].reason


def test_gathers_that_differ_are_kept_apart() -> None:
    def f(x: Tensor, w: Tensor) -> list[Tensor]:
        y = reduce_scatter(x, 0, RANKS, op="avg") + reduce_scatter(x, 0, RANKS)
        return [all_gather(x, 0, RANKS) @ w, all_gather(x * 2, 0, RANKS) @ w, y]

    shapes = ((4, 6), (6, 8))
    records = assert_equivalent(capture(f, tensors(*shapes)), on_each_rank(RANKS, *shapes)).records
    assert len(records) == 4
    assert not any("the same as" in record.reason for record in records)


def test_a_repeated_collective_that_is_left_alone_runs_once() -> None:
    def f(x: Tensor) -> Tensor:
        return all_gather(x, 0, RANKS) * all_gather(x, 0, RANKS)

    gm = capture(f, tensors((4, 6)))
    after, records = rewrite_for_rank(gm, Options(rewrite="always"), LocalWorld(RANKS).transport(0))
    assert len(collectives(after)) == 1
    assert [record.rewritten for record in records.records] == [False, False]
    assert_equivalent(gm, on_each_rank(RANKS, (4, 6)))


def test_rewrite_never_leaves_coalesced_and_repeated_collectives_as_they_are() -> None:
    def f(x: Tensor, w: Tensor) -> list[Tensor]:
        return [*gathered([x, x @ w]), all_gather(x, 0, RANKS), all_gather(x, 0, RANKS)]

    gm = capture(f, tensors((4, 6), (6, 8)))
    after, records = rewrite_for_rank(gm, Options(rewrite="never"), LocalWorld(RANKS).transport(0))
    assert collectives(after) == collectives(gm)
    assert len(records.records) == 3


def test_an_unused_collective_has_a_record() -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        all_gather(x, 0, RANKS)
        return x @ w

    gm = capture(f, tensors((4, 6), (6, 8)))
    (record,) = assert_equivalent(gm, on_each_rank(RANKS, (4, 6), (6, 8))).records
    assert "no matmul reads the gathered tensor" in record.reason


@pytest.mark.parametrize("copies", [False, True])
def test_a_gathered_list_that_feeds_two_cats_is_gathered_slice_by_slice(copies: bool) -> None:
    """`dist.all_gather(list, x)`, and the list joined along two dims."""

    def f(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
        whole = all_gather(x, 0, RANKS)
        blocks = [aten.slice(whole, 0, 4 * rank, 4 * rank + 4) for rank in range(RANKS)]
        if copies:
            blocks = [aten.copy(torch.empty_like(x), block) for block in blocks]
        return [torch.cat(blocks, 1) @ w, torch.cat(blocks, 0) @ v, blocks[0] + 1]

    shapes = ((4, 6), (12, 3), (6, 5))
    (record,) = assert_equivalent(capture(f, tensors(*shapes)), on_each_rank(RANKS, *shapes)).records
    assert record.region


@pytest.mark.parametrize("again", [1, 2, 3])
def test_what_was_awaited_already_is_not_awaited_again(again: int) -> None:
    def f(x: Tensor, w: Tensor) -> list[Tensor]:
        pending = c10d.all_gather_into_tensor(x, RANKS, "0")
        results = []
        for _ in range(again):  # user code waits for what tracing awaited
            whole = c10d.wait_tensor(pending)
            results.append(c10d.wait_tensor(c10d.wait_tensor(whole)) @ w)
        return results

    (record,) = assert_equivalent(capture(f, tensors((4, 6), (6, 8))), on_each_rank(RANKS, (4, 6), (6, 8))).records
    assert len(record.region) == again
