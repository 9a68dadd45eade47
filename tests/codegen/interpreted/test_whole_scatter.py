"""matmul_reduce_scatter under Triton's interpreter: partial sums arrive from a thread, another one watches the flags."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fo_compiler.codegen.kernels import (
    matmul_reduce_scatter,
    matmul_reduce_scatter_reference,
    scatter_tables,
    sum_partials,
    wait_flags,
)
from fo_compiler.codegen.order import scatter_order
from fo_compiler.errors import KernelError
from fo_compiler.schedule import Kind, build

from .helpers import (
    FLOATS,
    OPERANDS,
    POLLS,
    SHORT,
    TILE,
    TILES,
    Pause,
    assert_close_to_exact,
    block_of,
    examples,
    meanwhile,
    strided,
    values,
)
from .test_flags import int32


@examples(8)
@given(st.data())
def test_each_slice_is_its_product_and_what_arrived_and_is_whole_when_its_flag_is_up(data: st.DataObject) -> None:
    draw = data.draw
    ranks, m, family = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from(["ring", "direct"]))
    schedule = build(Kind.REDUCE_SCATTER, family, ranks, m)
    rank = draw(st.integers(0, ranks - 1))
    block, depth, cols = block_of(draw), draw(SHORT), draw(SHORT)
    dtype, wire = draw(OPERANDS), draw(FLOATS)
    a, b = strided(draw, ranks * m, *block, depth, dtype=dtype), strided(draw, depth, cols, dtype=dtype)
    order = scatter_order(schedule, rank)
    steps = sorted({step for group in order for step in group.adds})
    received = {step: values(step, *block, cols, dtype=wire) for step in steps}
    # All in one buffer each, so that places and partial sums have equal strides.
    places = torch.full((ranks * m, *block, cols), torch.nan, dtype=wire)
    arriving = torch.full((len(steps), *block, cols), torch.nan, dtype=wire)
    flags, arrival_flags = torch.zeros(ranks * m, dtype=torch.int32), torch.zeros(max(len(steps), 1), dtype=torch.int32)
    leaving = [group.slice for group in order if group.peer is not None]
    groups, adds = scatter_tables(
        order,
        list(places),
        [flags[s : s + 1] if s in leaving else None for s in range(ranks * m)],
        {step: (arriving[i], arrival_flags[i : i + 1]) for i, step in enumerate(steps)},
    )
    counters, late = (torch.zeros(count, dtype=torch.int32) for count in (ranks * m, len(steps)))
    seen: dict[int, torch.Tensor] = {}

    def transport(pause: Pause) -> None:
        for i, step in enumerate(steps):
            pause()
            arriving[i].copy_(received[step])
            arrival_flags[i] = 1

    def watch(pause: Pause) -> None:
        while len(seen) < len(leaving):
            for s in leaving:
                if s not in seen and flags[s] == 1:
                    seen[s] = places[s].clone()
            pause()

    launched = {"tile": draw(TILES), "programs": draw(st.integers(1, 5)), "polls": POLLS, "aligned": False}
    with meanwhile(transport, watch):
        matmul_reduce_scatter(a, b, places[0], groups, adds, counters, int32(1), late, **launched)
    assert not late.any()
    assert not counters.any()
    assert flags.tolist() == [int(s in leaving) for s in range(ranks * m)]
    for group in order:
        added = [received[step] for step in group.adds]
        exact = matmul_reduce_scatter_reference(a[group.slice], b, added)
        magnitude = matmul_reduce_scatter_reference(a[group.slice].abs(), b.abs(), [x.abs() for x in added])
        assert_close_to_exact(places[group.slice], exact, magnitude, depth + len(added))
        if group.slice in leaving:
            torch.testing.assert_close(seen[group.slice], places[group.slice], rtol=0, atol=0)


def test_tiles_stored_straight_at_the_owner_add_up_to_the_reduce_scatter() -> None:
    ranks, rows, depth, cols = 3, 5, 20, 18
    a = [values(r, ranks, rows, depth, dtype=torch.float32) for r in range(ranks)]
    b = [values(9 + r, depth, cols, dtype=torch.float32) for r in range(ranks)]
    schedule = build(Kind.REDUCE_SCATTER, "direct", ranks, 1)
    inbox = torch.full((ranks, ranks, rows, cols), torch.nan)  # [owner, source, ...]
    flags = torch.zeros(ranks, ranks, dtype=torch.int32)
    for rank in range(ranks):
        order = [type(g)(g.slice, g.peer, ()) for g in scatter_order(schedule, rank)]  # sums are left to sum_partials
        groups, adds = scatter_tables(
            order, [inbox[s, rank] for s in range(ranks)], [flags[s, rank : rank + 1] for s in range(ranks)], {}
        )
        counters = torch.zeros(ranks, dtype=torch.int32)
        matmul_reduce_scatter(
            a[rank], b[rank], inbox[0, 0], groups, adds, counters, int32(1), counters.clone(), tile=TILE, aligned=False
        )  # fmt: skip
    for owner in range(ranks):
        late = torch.zeros(ranks, dtype=torch.int32)
        wait_flags(flags[owner], int32(1), late, polls=1)
        assert not late.any()
        out = sum_partials(list(inbox[owner]), torch.empty(rows, cols))
        exact = torch.stack([a[r][owner].double() @ b[r].double() for r in range(ranks)]).sum(0)
        magnitude = torch.stack([a[r][owner].double().abs() @ b[r].double().abs() for r in range(ranks)]).sum(0)
        assert_close_to_exact(out, exact, magnitude, ranks * (depth + 1))


def test_places_of_different_strides_are_refused() -> None:
    order = scatter_order(build(Kind.REDUCE_SCATTER, "direct", 2, 1), 0)
    with pytest.raises(KernelError, match="places: expected one shape, dtype and strides"):
        scatter_tables(
            order, [torch.zeros(4, 6), torch.zeros(6, 4).t()], [None, None], {1: (torch.zeros(4, 6), int32(0))}
        )


def test_a_partial_sum_that_never_comes_is_marked_by_its_place_in_the_table() -> None:
    order = scatter_order(build(Kind.REDUCE_SCATTER, "direct", 3, 1), 1)
    places, arriving = torch.empty(3, 4, 6), torch.zeros(2, 4, 6)
    flags, arrived = int32(0, 0, 0), int32(5, 4)  # the second one of epoch 5 is missing
    partials = {step: (arriving[i], arrived[i : i + 1]) for i, step in enumerate(order[-1].adds)}
    groups, adds = scatter_tables(order, list(places), [flags[:1], None, flags[2:]], partials)
    a, b, late = torch.ones(3, 4, 5), torch.ones(5, 6), int32(0, 0)
    launched = {"tile": TILE, "polls": 3, "aligned": False}
    matmul_reduce_scatter(a, b, places[0], groups, adds, int32(0, 0, 0), int32(5), late, **launched)
    assert late.tolist() == [0, 1]
    assert flags.tolist() == [5, 0, 5]
