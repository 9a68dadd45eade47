"""Schedules found by search, with one-sided posts, and schedules in pieces, through the rewrite: as exact as the families."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fo_compiler.options import Options
from fo_compiler.passes.regions import plan_region
from fo_compiler.passes.rewrite import rewrite_region
from fo_compiler.passes.sites import Site
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.runtime.ops import pending_transfers
from fo_compiler.schedule import Compute, Kind, Post, Program, Recv, Schedule, Send, Wait, verify
from fo_compiler.schedule.ir import COLLECTIVES
from fo_compiler.schedule.machine import simple_machine
from fo_compiler.schedule.network import Matrix
from fo_compiler.schedule.search import _proposals
from fo_compiler.schedule.simulate import RegionCost
from fo_compiler.schedule.taper import TAPERS, in_pieces
from fo_compiler.schedule.transform import OWN_ALONE
from fo_compiler.testing import assert_equivalent, run_ranks
from tests.graphs import all_gather, all_reduce, all_to_all, capture, reduce_scatter
from tests.machines import one_slow_link
from tests.passes.helpers import on_each_rank, sites, tensors
from tests.tapers import cuts_of

FUNCTIONS: dict[Kind, Callable[[int], Callable[[Tensor, Tensor], Tensor]]] = {
    Kind.ALL_GATHER: lambda ranks: lambda x, w: all_gather(x, 0, ranks) @ w,
    Kind.REDUCE_SCATTER: lambda ranks: lambda x, w: reduce_scatter(x @ w, 0, ranks),
    Kind.ALL_REDUCE: lambda ranks: lambda x, w: all_reduce(x @ w),
    Kind.ALL_TO_ALL: lambda ranks: lambda x, w: all_to_all(x, ranks) @ w,
    Kind.ALL_TO_ALL_OUT: lambda ranks: lambda x, w: all_to_all(x @ w, ranks),
    Kind.ALL_GATHER_OUT: lambda ranks: lambda x, w: all_gather(x @ w, 0, ranks),
}


def rows_of(kind: Kind, ranks: int, share: int) -> int:
    return share if kind.collective is Kind.ALL_GATHER else ranks * share


def rewritten(gm: fx.GraphModule, ranks: int, rank: int, kind: Kind, schedule: Schedule) -> fx.GraphModule:
    """A copy of the graph with its one region run by `schedule`."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    (site,) = sites(copy, ranks, rank)
    assert isinstance(site, Site)
    region = plan_region(site.rivals[0] if kind is Kind.ALL_GATHER_OUT else site, schedule.slices_per_rank)
    assert (region.site.kind, region.slices_per_rank) == (kind, schedule.slices_per_rank)
    rewrite_region(graph, region, schedule, "x0", "inference")
    graph.lint()
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL])
def test_a_skewed_machine_file_gets_a_searched_schedule(kind: Kind, tmp_path: Path) -> None:
    ranks = 4
    shapes = (rows_of(kind, ranks, 16), 64), (64, 64)
    gm = capture(FUNCTIONS[kind](ranks), tensors(*shapes))
    options = Options(rewrite="always", machine=one_slow_link(tmp_path, ranks), slices_per_rank=1)
    (record,) = assert_equivalent(gm, on_each_rank(ranks, *shapes), options).records
    assert record.rewritten
    assert record.schedule is not None
    assert record.schedule.startswith("searched")


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(COLLECTIVES), st.integers(2, 4), st.integers(1, 2), st.data())
def test_what_the_search_proposes_computes_what_the_collective_does(
    kind: Kind, ranks: int, m: int, data: st.DataObject
) -> None:
    row = st.lists(st.sampled_from([0.2, 0.5, 1.0, 3.0]), min_size=ranks, max_size=ranks).map(tuple)
    square = st.lists(row, min_size=ranks, max_size=ranks).map(tuple)
    machine = simple_machine(network=Matrix(data.draw(square), data.draw(square)))
    cost, m = RegionCost(data.draw(st.floats(0.5, 20.0)), 4e3), max(m, kind.fewest_slices)
    schedule = list(islice(_proposals(kind, machine, ranks, m, cost), 12))[-1]
    check(schedule, data.draw(st.integers(m, 2 * m)))


def check(schedule: Schedule, share: int) -> None:
    """The schedule computes what the plain collective does, where each rank has `share` rows."""
    kind, ranks = schedule.kind, schedule.ranks
    shapes = (rows_of(kind, ranks, share), 3), (3, 5)
    gm = capture(FUNCTIONS[kind](ranks), tensors(*shapes))
    inputs = on_each_rank(ranks, *shapes)
    plain = run_ranks(lambda _: gm, inputs, LocalWorld(ranks))
    graphs = [rewritten(gm, ranks, rank, kind, schedule) for rank in range(ranks)]
    for want, got in zip(plain, run_ranks(graphs.__getitem__, inputs, LocalWorld(ranks)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert not pending_transfers()


@pytest.mark.parametrize("share", [2, 3, 5])
def test_a_rank_may_receive_another_size_than_it_sends(share: int) -> None:
    """One rank sends its first part while the other sends its second, which has a row more."""

    def program(own: tuple[int, int], other: tuple[int, int], peer: int) -> Program:
        (a, b), (c, d) = own, other
        return (
            Post(0, Send(a, peer), Recv(c, peer)),
            Compute(a),
            Compute(b),
            Wait(0),
            Post(1, Send(b, peer), Recv(d, peer)),
            Compute(c),
            Wait(1),
            Compute(d),
        )

    programs = (program((0, 1), (3, 2), 1), program((3, 2), (0, 1), 0))
    schedule = Schedule(Kind.ALL_GATHER, "crossed", 2, 2, programs=programs)
    verify(schedule)
    check(schedule, share)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.sampled_from(OWN_ALONE), st.sampled_from(TAPERS), st.integers(2, 4), st.booleans(), st.data())
def test_pieces_of_any_size_compute_what_the_collective_does(
    kind: Kind, family: str, ranks: int, across: bool, data: st.DataObject
) -> None:
    units = data.draw(st.integers(1, 6))
    schedule = in_pieces(kind, family, ranks, units, data.draw(cuts_of(ranks, units)), across)
    check(schedule, data.draw(st.integers(units, 2 * units)))
