"""Slices of unequal size: a shard of any number of rows, also a symbolic one, is cut as finely as the schedule wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from fo_compiler.dump import graph_text
from fo_compiler.options import Options
from fo_compiler.passes import decide
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.passes.regions import Region
from fo_compiler.passes.separability import Cut, Slices, bounds
from fo_compiler.passes.sites import Site
from fo_compiler.passes.sizes import sizes_from_inputs
from fo_compiler.runtime import ops
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.schedule.choose import Choice
from fo_compiler.testing import assert_equivalent, rewrite_for_rank, run_ranks
from tests.graphs import all_gather, all_reduce, all_to_all, capture, reduce_scatter
from tests.passes.helpers import aten, check_golden, on_each_rank, rewritten, sites, tensors
from tests.tapers import ragged

N = 3
Graph = Callable[..., tuple[Tensor, ...]]


@given(st.integers(0, 50), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(1, 3))
def test_slices_follow_each_other_and_differ_by_one_row_at_most(
    share: int, ranks: int, m: int, row: int, outer: int
) -> None:
    slices, shape = Slices.of(share, ranks, m), (2, share * row * ranks * outer)
    if share == 0:
        return
    places = [bounds(shape, Cut(1, outer), slices, index) for index in range(slices.count)]
    assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])]
    assert places[-1][1] == share * row * ranks
    assert all(places[rank * m][0] == rank * share * row for rank in range(ranks)), "a share is whole slices"
    sizes = {stop - start for start, stop in places}
    assert max(sizes) - min(sizes) in (0, row)
    assert slices.are_equal == (share % m == 0)


def gather(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    whole = all_gather(x, 1, N)
    return F.relu(whole @ w), whole.transpose(1, 2)


def gather_flattened(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The slices of the flattened batch are not contiguous, and are joined for a reader of the whole."""
    rows = torch.sigmoid(all_gather(x, 1, N)).flatten(0, 1)
    return rows @ w, rows @ torch.cumsum(w, 0)


def second_operand(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What is gathered are columns of the second factor."""
    return (w.t() @ all_gather(x, 1, N).transpose(1, 2)[0],)


def scatter(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (reduce_scatter(torch.sigmoid(x.repeat(1, N, 1)) @ w, 1, N),)


def scatter_flattened(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = torch.sigmoid(x.repeat(1, N, 1)).flatten(0, 1) @ w
    return (reduce_scatter(y.unflatten(0, (x.shape[0], N * x.shape[1])), 1, N),)


def reduced(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (all_reduce(x.repeat(1, N, 1) @ F.pad(w, (0, 1))),)


def reduced_and_multiplied(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (F.silu(*reduced(x, w)) @ F.pad(w.t(), (0, 0, 0, 1)),)


def exchanged(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (all_to_all(x.repeat(N, 1, 1).flatten(0, 1), N) @ w,)


def exchanged_result(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (all_to_all(x.repeat(N, 1, 1).flatten(0, 1) @ w, N),)


def weight_gradient(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    whole = all_gather(x, 1, N)
    return whole.flatten(0, 1).t() @ torch.cumsum(x.repeat(1, N, 1), 1).flatten(0, 1), whole @ w


def chain(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (reduce_scatter(F.gelu(all_gather(x, 1, N) @ w) @ w.t(), 1, N),)


def normalised(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    whole = all_gather(x, 1, N)
    return (F.layer_norm(whole, (4,)) @ w + w.new_ones(6),)


GRAPHS: tuple[Graph, ...] = (
    gather,
    gather_flattened,
    second_operand,
    scatter,
    scatter_flattened,
    reduced,
    reduced_and_multiplied,
    exchanged,
    exchanged_result,
    weight_gradient,
    chain,
    normalised,
)
FAMILIES = ("ring", *(pytest.param(family, marks=pytest.mark.nightly) for family in ("bidirectional", "direct")))


def inputs_at(length: int, batch: int = 2) -> list[list[Tensor]]:
    return on_each_rank(N, (batch, length, 4), (4, 6))


def forced(schedule: str, m: int) -> Options:
    return Options(rewrite="always", schedule=schedule, slices_per_rank=m)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", FAMILIES)
@pytest.mark.parametrize("function", GRAPHS, ids=lambda f: f.__name__)
def test_every_kind_is_cut_as_finely_as_asked(function: Graph, schedule: str) -> None:
    gm = capture(function, inputs_at(5)[0])
    records = assert_equivalent(gm, inputs_at(5), forced(schedule, 3)).records
    assert all("x3" in (record.schedule or "") for record in records), records


def lengths_that_run(gm: fx.GraphModule, lengths: Sequence[int]) -> Sequence[int]:
    """Those at which the plain graph runs: torch.chunk has other results for an empty tensor."""
    found = []
    for length in lengths:
        try:
            run_ranks(lambda _: gm, inputs_at(length), LocalWorld(N))
        except IndexError:
            assert length == 0
            continue
        found.append(length)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        pytest.param(function, marks=() if function in (gather, chain, scatter_flattened) else pytest.mark.nightly)
        for function in GRAPHS
    ],
    ids=lambda f: f.__name__,
)
def test_one_graph_serves_every_length_without_a_guard(function: Graph) -> None:
    """Lengths below the number of slices make empty ones; those of one row are no constants."""
    gm = capture(function, inputs_at(6)[0], {0: (1,)})
    env = gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[1].node.shape_env
    known = len(env.guards)
    transports = [LocalWorld(N).transport(rank) for rank in range(N)]
    done = [rewrite_for_rank(gm, forced("ring", 3), transport) for transport in transports]
    assert all("x3" in (record.schedule or "") for record in done[0][1].records), done[0][1]
    assert len(env.guards) == known
    for length in lengths_that_run(gm, (6, 5, 17, 2, 1, 0)):
        wanted = run_ranks(lambda _: gm, inputs_at(length), LocalWorld(N))
        got = run_ranks(lambda rank: done[rank][0], inputs_at(length), LocalWorld(N))
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def gathered_rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (all_gather(x[0], 0, N) @ w,)


def scattered_rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (reduce_scatter(torch.sigmoid(x[0].repeat(N, 1)) @ w, 0, N),)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [gathered_rows, scattered_rows, exchanged, exchanged_result], ids=lambda f: f.__name__
)
def test_pieces_of_any_size_serve_every_length(function: Graph) -> None:
    gm = capture(function, inputs_at(12)[0], {0: (1,)})
    with ragged(3):
        transports = [LocalWorld(N).transport(rank) for rank in range(N)]
        done = [rewrite_for_rank(gm, forced("tapered", 5), transport) for transport in transports]
    assert all("tapered (" in (record.schedule or "") for record in done[0][1].records), done[0][1]
    for length in lengths_that_run(gm, (12, 9, 17, 5, 2, 1)):
        wanted = run_ranks(lambda _: gm, inputs_at(length), LocalWorld(N))
        got = run_ranks(lambda rank: done[rank][0], inputs_at(length), LocalWorld(N))
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "m"), [(31, 1), (33, 2), (70, 4)])
def test_symbolic_slices_are_long_in_the_first_call(length: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that one compile serves lengths that are shorter, too."""
    gm = capture(gather, inputs_at(length)[0], {0: (1,)})
    sizes_from_inputs(gm.graph)
    (site,) = sites(gm, N)
    assert isinstance(site, Site)
    asked: list[tuple[int, ...]] = []

    def predict(region: Region, options: Options, numbers: tuple[int, ...], units: int | None) -> Choice:
        asked.append(numbers)
        return plain_predict(region, options, numbers, units)

    plain_predict = decide._predict
    monkeypatch.setattr(decide, "_predict", predict)
    decide.decide(site, Options(rewrite="always"))
    assert max(asked[0]) == m


@pytest.mark.slow
def test_a_compiler_is_told_first_that_symbolic_slices_have_two_rows() -> None:
    """What it asks of them itself ends in guards that divide by their sizes, which are 0 for short lengths."""
    gm = capture(gather, inputs_at(6)[0], {0: (1,)})
    env = gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[1].node.shape_env
    known = len(env.guards)
    records = overlap(gm.graph, forced("ring", 3), LocalWorld(N).transport(0), pin=True)
    assert "slices that differ by one row" in records.records[0].reason
    (guard,) = env.guards[known:]
    (s,) = guard.expr.free_symbols
    assert [bool(guard.expr.xreplace({s: sympy.Integer(length)})) for length in (0, 2, 5, 6, 7)] == [False] * 3 + [
        True
    ] * 2
    assert env.var_to_range[s].lower <= 2, "a bound would be checked last"


def test_equal_slices_need_no_shape_of_what_is_received() -> None:
    gm = rewritten(capture(gather, inputs_at(6)[0]), N, schedule="direct", slices_per_rank=2)
    assert all(not node.kwargs for node in gm.graph.find_nodes(op="call_function", target=ops.exchange))


def test_an_unequal_all_gather_looks_as_in_the_golden() -> None:
    def column_parallel(x: Tensor, w: Tensor) -> Tensor:
        return all_gather(x, 0, 2) @ w

    gm = rewritten(capture(column_parallel, tensors((5, 4), (4, 6))), 2, slices_per_rank=2)
    check_golden("all_gather_unequal.txt", graph_text(gm.graph))


@pytest.mark.slow
def test_sizes_of_symbolic_slices_are_computed_from_the_inputs() -> None:
    gm = rewritten(capture(gather, inputs_at(6)[0], {0: (1,)}), N, slices_per_rank=2)
    read_off = gm.graph.find_nodes(op="call_function", target=aten.sym_size.int)
    assert [node.args[0].op for node in read_off] == ["placeholder"] * len(read_off)
