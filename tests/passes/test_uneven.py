"""Sizes that do not divide by the ranks, in the forms that DTensor gives them: the graphs of the ranks differ.

Cheapest first; every comparison runs all ranks, each with its own graph, and checks that they decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fo_compiler.options import Options
from fo_compiler.passes.separability import Slices, shape_of
from fo_compiler.passes.sites import Site
from fo_compiler.records import Record
from fo_compiler.runtime import ops
from fo_compiler.testing import assert_equivalent
from tests.graphs import c10d, capture
from tests.passes.helpers import aten, rewritten, sites, tensors
from tests.tapers import ragged

Program = Callable[["Rank"], Callable[..., tuple[Tensor, ...]]]


def share_of(size: int, ranks: int) -> int:
    return -(-size // ranks)


def pad_end(x: Tensor, dim: int, rows: int, value: float = 0.0) -> Tensor:
    return aten.constant_pad_nd.default(x, [*[0, 0] * (x.dim() - 1 - dim), 0, rows], value) if rows else x


class Rank:
    """What DTensor's redistribute does on one rank, and what of `size` rows that rank has."""

    def __init__(self, rank: int, ranks: int, size: int) -> None:
        self.rank, self.ranks, self.size, self.share = rank, ranks, size, share_of(size, ranks)
        self.rows = max(0, min(self.share, size - rank * self.share))

    def gather(self, x: Tensor, dim: int, padding: float = 0.0) -> Tensor:
        x = pad_end(x, dim, self.share - x.shape[dim], padding)
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), self.ranks, "0"))
        whole = torch.cat(torch.chunk(whole, self.ranks, 0), dim) if dim else whole
        return whole.narrow(dim, 0, self.size).contiguous()

    def scatter(self, y: Tensor, dim: int, padding: float = 0.0, op: str = "sum") -> Tensor:
        share = share_of(y.shape[dim], self.ranks)
        pieces = [piece.contiguous() for piece in torch.split(y, share, dim)]
        shape = [0 if d == dim else size for d, size in enumerate(y.shape)]
        pieces += [aten.full.default(shape, 0, dtype=y.dtype, device=y.device)] * (self.ranks - len(pieces))
        y = torch.cat([pad_end(piece, dim, share - piece.shape[dim], padding) for piece in pieces], dim)
        y = torch.cat(torch.split(y, share, dim)) if dim else y
        mine = c10d.wait_tensor(c10d.reduce_scatter_tensor(y.contiguous(), op, self.ranks, "0"))
        return mine.narrow(dim, 0, self.rows) if self.rows < share else mine


class Moved(torch.autograd.Function):
    """A tensor gathered or scattered, and its gradient the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on: Rank, dim: int, gathers: bool) -> Tensor:
        ctx.saved = on, dim, gathers
        return (on.gather if gathers else on.scatter)(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        on, dim, gathers = ctx.saved
        return (on.scatter if gathers else on.gather)(grad, dim), None, None, None


def run(program: Program, size: int, ranks: int, dim: int, **options: Any) -> tuple[list[Record], list[fx.GraphModule]]:
    """Compare the rewritten program with the plain one on all ranks; records of rank 0, and the graph of each rank."""
    inputs, graphs = [], []
    for on in (Rank(rank, ranks, size) for rank in range(ranks)):
        shard = [on.rows if d == dim else extent for d, extent in enumerate((2, 3, 4))]
        inputs.append(tensors(shard, (4, 6), (6, 4), seed=on.rank))
        graphs.append(capture(program(on), inputs[-1]))
    options = {"schedule": "ring", **options}
    records = assert_equivalent(graphs, inputs, Options(rewrite="always", **options)).records
    return list(records), graphs


# --- slices ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(2, 6), st.integers(1, 6))
def test_slices_of_uneven_shares_end_with_the_rows_there_are(size: int, ranks: int, per_rank: int) -> None:
    share = share_of(size, ranks)
    slices = Slices.of_uneven(share, size, ranks, per_rank)
    row = size // slices.all_rows
    assert slices.all_rows * row == size
    places = [slices.bounds(index, row) for index in range(slices.count)]
    assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])]
    assert [places[rank * per_rank][0] for rank in range(ranks)] == [min(rank * share, size) for rank in range(ranks)]
    assert places[-1][1] == size


# --- sites ----------------------------------------------------------------------------------------------------------


def block(on: Rank, dim: int) -> Callable[..., tuple[Tensor, ...]]:
    def f(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        return (Moved.apply(torch.relu(Moved.apply(x, on, dim, True) @ up) @ down, on, dim, False),)

    return f


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [7, 4])
def test_every_rank_sees_the_tensor_without_padding(dim: int, size: int) -> None:
    _, graphs = run(lambda on: block(on, dim), size, 3, dim)
    for rank, gm in enumerate(graphs):
        gather, scatter = sites(gm, 3, rank)
        assert isinstance(gather, Site)
        assert isinstance(scatter, Site)
        assert [shape_of(site.value)[dim] for site in (gather, scatter)] == [size, size]
        assert (gather.dim, gather.share, scatter.dim, scatter.share) == (dim, share_of(size, 3)) * 2
        assert shape_of(gather.shard)[dim] == Rank(rank, 3, size).rows


def test_padding_is_neither_sent_nor_computed_on() -> None:
    _, graphs = run(lambda on: block(on, 0), 7, 3, 0, schedule="ring", slices_per_rank=1)
    for rank, gm in enumerate(graphs):
        graph = rewritten(gm, 3, rank).graph
        sent = [shape_of(node.args[0])[0] for node in graph.find_nodes(op="call_function", target=ops.exchange)]
        slices = [3, 3, 1]
        assert sent == [slices[(rank - step) % 3] for step in (0, 1)] + [slices[(rank - step) % 3] for step in (1, 2)]
        rows = [shape_of(node)[0] for node in graph.find_nodes(op="call_function", target=aten.mm.default)]
        assert sum(rows) == 2 * 7 * 3


# --- values ---------------------------------------------------------------------------------------------------------


def step(on: Rank, dim: int, merged: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Forward and backward of a block; two matmuls may read what each gathers for itself, or one whole tensor."""

    def f(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, up, down)]
        x, up, down = leaves
        rows = Moved.apply(x, on, dim, True)
        gate = Moved.apply(x, on, dim, True) if merged else rows
        out = Moved.apply((torch.relu(rows @ up) * (gate @ up * 0.5)) @ down, on, dim, False)
        return *torch.autograd.grad(out.square().sum(), leaves), out.detach(), rows.detach()

    return f


@pytest.mark.nightly  # a second each, on all ranks
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_step_gives_the_values_and_gradients_of_the_plain_graph(data: st.DataObject) -> None:
    ranks, dim = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 1))
    size = data.draw(st.integers(2, 14).filter(lambda size: size % ranks != 0 and size > share_of(size, ranks)))
    options = {
        "schedule": data.draw(st.sampled_from(["ring", "direct", "tapered"])),
        "slices_per_rank": data.draw(st.sampled_from([1, 2, 3])),
    }
    merged = data.draw(st.booleans())
    records, _ = run(lambda on: step(on, dim, merged), size, ranks, dim, **options)
    assert all(record.rewritten for record in records), records


@pytest.mark.slow
@pytest.mark.parametrize("size", [10, 13])
def test_shares_that_are_not_equal_may_travel_in_pieces_of_any_size(size: int) -> None:
    with ragged(size):
        records, _ = run(lambda on: step(on, 0, False), size, 3, 0, schedule="tapered", slices_per_rank=4)
    assert any("tapered (" in (record.schedule or "") for record in records), records


@pytest.mark.parametrize("size", [1, 2])
def test_rows_of_one_rank_alone_are_left_with_their_padding(size: int) -> None:
    """Of 2 rows on 3 ranks the last has none; of 1, the others have none, and there is nothing to hide."""
    records, _ = run(lambda on: block(on, 0), size, 3, 0)
    assert {record.rewritten for record in records} == {size == 2}, records


@pytest.mark.slow
def test_sums_of_two_scattered_gradients_travel_once_on_every_rank() -> None:
    records, _ = run(lambda on: step(on, 1, True), 7, 3, 1, slices_per_rank=1)
    merged = [r for r in records if r.collective.startswith("reduce_scatter") and "results are added" in r.reason]
    assert len(merged) == 2, records


def test_a_gathered_dim_that_is_contracted_does_not_see_its_padding() -> None:
    def program(on: Rank) -> Callable[..., tuple[Tensor, ...]]:
        return lambda x, up, down: (on.gather(x, 0, float("nan")).flatten(0, 1).T @ x.new_ones(on.size * 3, 5),)

    (record,), _ = run(program, 7, 3, 0)
    assert record.rewritten, record


def test_rows_of_a_gather_and_of_a_scatter_that_lie_at_other_places_are_no_chain() -> None:
    def program(on: Rank) -> Callable[..., tuple[Tensor, ...]]:
        def f(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
            y = (on.gather(x, 0)[:, 0] @ up).reshape(on.size * 2, 3) @ up[:3]
            return (Rank(on.rank, 3, on.size * 2).scatter(y, 0),)

        return f

    records, _ = run(program, 7, 3, 0)  # shards of 3 rows, and of 5: not of 6
    assert not any(record.rewritten and "chain" in (record.schedule or "") for record in records), records


def test_a_mean_is_that_of_the_rows_there_are() -> None:
    (record,), _ = run(lambda on: lambda x, up, down: (on.scatter(x.new_ones(on.size, 4) @ up, 0, op="avg"),), 7, 3, 0)
    assert record.rewritten, record


def test_gathers_that_a_rank_pads_twice_are_one_on_every_rank() -> None:
    def program(on: Rank) -> Callable[..., tuple[Tensor, ...]]:
        return lambda x, up, down: (on.gather(x, 1) @ up, on.gather(x, 1) @ up.sin())

    first, second = run(program, 7, 3, 1)[0]
    assert first.region == second.region
    assert len(first.region) == 2


def test_a_gather_whose_padding_is_taken_off_twice_is_cut_for_both_readers() -> None:
    """As torch 2.14 leaves it: one collective, and all that is done with it as often as it is read."""

    def program(on: Rank) -> Callable[..., tuple[Tensor, ...]]:
        def f(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
            x = pad_end(x, 1, on.share - x.shape[1])
            whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x, on.ranks, "0"))
            one, other = (torch.cat(torch.chunk(whole, on.ranks, 0), 1)[:, : on.size] for _ in range(2))
            return one @ up, other @ up.sin()

        return f

    (record,), _ = run(program, 7, 3, 1)
    assert len(record.region) == 2, record


# --- what is left alone ------------------------------------------------------------------------------------------------


def also_padded(on: Rank) -> Callable[..., tuple[Tensor, ...]]:
    def f(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
        x = pad_end(x, 0, on.share - x.shape[0])
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x, on.ranks, "0"))
        return whole[: on.size] @ up, whole * 2

    return f


def other_padding(on: Rank) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, up, down: (on.scatter(x.new_ones(on.size, 4) @ up, 0, padding=1.0),)


def made_by_a_matmul(on: Rank) -> Callable[..., tuple[Tensor, ...]]:
    return lambda x, up, down: (on.gather(x @ up, 0),)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (also_padded, "needs this dim whole: it keeps 7 of 9"),
        (other_padding, "needs this dim whole"),
        (made_by_a_matmul, "shorter on ranks with a short shard"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_exactly_padding_is_left_alone_on_every_rank(program: Program, reason: str) -> None:
    (record,), _ = run(program, 7, 3, 0)
    assert not record.rewritten
    assert reason in record.reason


def test_a_piece_that_is_not_known_to_be_zeros_is_left_alone() -> None:
    """Zeros for a rank without a shard that forward saved for backward."""

    def f(x: Tensor, w: Tensor, zeros: Tensor) -> tuple[Tensor, ...]:
        pieces = [*torch.split(x @ w, 2), zeros]
        return (c10d.wait_tensor(c10d.reduce_scatter_tensor(torch.cat(pieces), "sum", 3, "0")),)

    inputs = [tensors((4, 5), (5, 6), (2, 6), seed=rank) for rank in range(3)]
    (record,) = assert_equivalent(capture(f, inputs[0]), inputs).records
    assert not record.rewritten
    assert "not known to be the zeros of a rank without a shard" in record.reason


def test_a_padded_vocabulary_that_is_cut_off_hides_under_the_matmul_that_makes_it() -> None:
    """Every rank has as many columns, and none is without padding behind it: made alike."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x @ w, 3, "0"))
        return (torch.cat(torch.chunk(whole, 3, 0), 1)[:, :13],)

    inputs = [tensors((12, 5), (5, 8), seed=rank) for rank in range(3)]
    (record,) = assert_equivalent(capture(f, inputs[0]), inputs).records
    assert record.rewritten, record
