"""What a graph does beside its results: it writes into inputs, has effects, and gives each result memory of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from fo_compiler.errors import RewriteError
from fo_compiler.options import Options
from fo_compiler.passes.graph_verifier import signature, verify_graph
from fo_compiler.testing import assert_equivalent
from tests.graphs import all_gather, all_reduce, capture, reduce_scatter
from tests.passes.helpers import on_each_rank, tensors

RANKS = 2
ALWAYS = Options(rewrite="always")
AUTO = Options()
WRITTEN: list[Tensor] = []  # by the op below

_LIBRARY = torch.library.Library("fo_effects", "DEF")
_LIBRARY.define("look(Tensor x) -> ()")
_LIBRARY.impl("look", lambda x: WRITTEN.append(x.clone()), "CompositeExplicitAutograd")
torch.library.register_fake("fo_effects::look", lambda x: None, lib=_LIBRARY)
look = torch.ops.fo_effects.look.default
has_side_effect(look)


def joined(gathered: Tensor) -> Tensor:
    return torch.cat(gathered.chunk(RANKS, 0), 1)


def copies_the_gathered(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    gathered = all_gather(x, 0, RANKS)
    buffer.copy_(gathered)
    return joined(gathered) @ w


def copies_a_block(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    gathered = all_gather(x, 0, RANKS)
    buffer[:4].copy_(gathered.chunk(RANKS, 0)[1])
    return joined(gathered) @ w


def copies_the_joined(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    whole = joined(all_gather(x, 0, RANKS))
    buffer.copy_(whole.reshape(8, 6))
    return whole @ w


def copies_the_scattered(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    scattered = reduce_scatter(x @ w[:6], 0, RANKS)
    buffer[:2, :5].copy_(scattered)
    return scattered + 1


def copies_the_reduced(x: Tensor, w: Tensor, buffer: Tensor) -> Tensor:
    reduced = all_reduce(x @ w[:6])
    buffer[:4, :5].copy_(reduced)
    return reduced @ w[:5, :5]


@pytest.mark.parametrize(
    "function",
    [copies_the_gathered, copies_a_block, copies_the_joined, copies_the_scattered, copies_the_reduced],
)
@pytest.mark.parametrize("m", [1, 2])
def test_what_is_written_into_an_input_is_written(function, m: int) -> None:
    inputs = on_each_rank(RANKS, (4, 6), (12, 5), (8, 6))
    gm = capture(function, inputs[0])
    assert any(node.target is torch.ops.aten.copy_.default for node in gm.graph.nodes)
    assert_equivalent(gm, inputs, Options(rewrite="always", slices_per_rank=m))


def test_an_effect_on_what_is_gathered_takes_place() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        gathered = all_gather(x, 0, RANKS)
        look(gathered)
        return joined(gathered) @ w

    inputs = on_each_rank(RANKS, (4, 6), (12, 5))
    gm = capture(function, inputs[0])
    WRITTEN.clear()
    assert_equivalent(gm, inputs, ALWAYS)
    assert len(WRITTEN) == 2 * RANKS, "of the plain graph and of the rewritten one, on each rank"
    assert len({tensor.sum().item() for tensor in WRITTEN}) == 1


def test_a_rewrite_that_would_lose_an_effect_is_caught() -> None:
    gm = capture(copies_the_gathered, tensors((4, 6), (12, 5), (8, 6)))
    before = signature(gm.graph)
    (copy,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    gm.graph.erase_node(copy)
    with pytest.raises(RewriteError, match="lost what has effects: copy_"):
        verify_graph(gm.graph, before, {})


def gathered_and_joined(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    gathered = all_gather(x, 0, RANKS)
    return gathered, joined(gathered) @ w


def a_block_and_the_joined(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    blocks = all_gather(x, 0, RANKS).chunk(RANKS, 0)
    whole = torch.cat(blocks, 0)
    return whole @ w[:6], whole, blocks[0]


def a_block_and_the_joined_along_columns(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    blocks = all_gather(x[:1], 0, RANKS).chunk(RANKS, 0)
    whole = torch.cat(blocks, 1)
    return whole @ w, whole, blocks[0]


def two_alike(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return all_reduce(x), all_reduce(x)


def two_alike_seen_as_another_shape(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return all_gather(x, 0, RANKS).t(), all_gather(x, 0, RANKS)


def two_alike_joined(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return all_gather(x, 1, RANKS), all_gather(x, 1, RANKS)


def blocks_that_are_copies(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    first, second = (block.clone() for block in all_gather(x @ w[:6], 0, RANKS).chunk(RANKS, 0))
    return torch.cat([first, second], 0) * 2, first, second


def blocks_that_are_copies_joined_along_columns(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    first, second = (block.clone() for block in all_gather(x @ w[:6], 0, RANKS).chunk(RANKS, 0))
    return torch.cat([first, second], 1) * 2, first, second


def blocks_that_are_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    gathered = all_gather(x @ w[:6], 0, RANKS)
    return gathered * 2, *gathered.chunk(RANKS, 0)


def a_view_and_a_copy(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    first, second = all_gather(x @ w[:6], 0, RANKS).chunk(RANKS, 0)
    second = second.clone()
    return torch.cat([first, second], 1) * 2, first, second, first.t()


SEVERAL_BLOCKS = (
    blocks_that_are_copies, blocks_that_are_copies_joined_along_columns, blocks_that_are_views, a_view_and_a_copy,
)  # fmt: skip


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("function", SEVERAL_BLOCKS)
def test_blocks_that_are_results_share_what_they_shared_before(function, m: int) -> None:
    inputs = on_each_rank(RANKS, (4, 6), (12, 5))
    report = assert_equivalent(capture(function, inputs[0]), inputs, Options(rewrite="always", slices_per_rank=m))
    assert any(record.rewritten for record in report.records)


@pytest.mark.parametrize("options", [ALWAYS, AUTO], ids=["always", "auto"])
@pytest.mark.parametrize(
    "function",
    [
        gathered_and_joined,
        a_block_and_the_joined,
        a_block_and_the_joined_along_columns,
        two_alike,
        two_alike_seen_as_another_shape,
        two_alike_joined,
    ],
)
def test_results_that_were_apart_do_not_share_their_memory(function, options: Options) -> None:
    inputs = on_each_rank(RANKS, (4, 6), (12, 5))
    assert_equivalent(capture(function, inputs[0]), inputs, options)


def test_of_two_collectives_that_are_alike_one_is_left_where_one_result_is_read_inside() -> None:
    inputs = on_each_rank(RANKS, (4, 6))
    records = assert_equivalent(capture(lambda x: (all_reduce(x), all_reduce(x) + 1), inputs[0]), inputs, AUTO).records
    assert any("whose result is read instead" in record.reason for record in records)


def test_a_rewrite_that_would_let_results_share_their_memory_is_caught() -> None:
    gm = capture(two_alike, tensors((4, 6), (12, 5)))
    before = signature(gm.graph)
    (output,) = gm.graph.find_nodes(op="output")
    first, _ = output.args[0]
    output.args = ((first, first),)
    with pytest.raises(RewriteError, match=r"share their memory that did not: \[\(0, 1\)\]"):
        verify_graph(gm.graph, before, {})


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: all_reduce(torch.relu(torch.squeeze(x @ w, 0))),
        lambda x, w: reduce_scatter(torch.squeeze(x @ w, 0), 0, RANKS),
        lambda x, w: torch.squeeze(all_gather(x, 0, RANKS), 0) @ w,
        lambda x, w: torch.squeeze(all_gather(x, 0, RANKS), (0, 1, 2)) @ w,
    ],
)
def test_a_squeeze_that_leaves_a_dim_alone_leaves_it_in_a_slice_of_one_row(function, m: int) -> None:
    inputs = on_each_rank(RANKS, (RANKS, 4, 6), (6, 5))
    assert_equivalent(capture(function, inputs[0]), inputs, Options(rewrite="always", slices_per_rank=m))
