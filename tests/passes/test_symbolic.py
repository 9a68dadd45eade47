"""Graphs with symbolic sizes: one rewrite, right for every length, without a guard."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from fo_compiler.options import Options
from fo_compiler.passes.sizes import (
    SizeNodes,
    UnknownSize,
    as_size,
    at_least,
    drop_unused_sizes,
    quotient,
    sizes_from_inputs,
)
from fo_compiler.records import Record
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import assert_equivalent, rewrite_for_rank, run_ranks
from tests.graphs import all_gather, all_reduce, all_to_all, capture, reduce_scatter
from tests.passes.helpers import aten, on_each_rank, tensors

N = 3
Sizes = tuple[int, int]  # batch, sequence
SIZES: tuple[Sizes, ...] = ((2, 6), (3, 4), (5, 3), (4, 11))


def gather(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    whole = all_gather(x, 1, N)
    return F.relu(whole @ w), whole.transpose(1, 2)


def scatter(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (reduce_scatter(torch.sigmoid(x.repeat(1, N, 1)) @ w, 1, N),)


def reduced(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (all_reduce(x @ w),)


def looked_up(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Rows by indices, which no matmul makes: only the all-gather half of the sum is hidden."""
    return (all_reduce(F.embedding((x[..., 0] * 100).long() % 4, w)) @ w.t(),)


def exchanged(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (all_to_all(x.repeat(N, 1, 1), N) @ w,)


def weight_gradient(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gathered dim is contracted; the other operand comes from outside, and is sliced there."""
    whole = all_gather(x, 1, N)
    return whole.flatten(0, 1).t() @ torch.cumsum(x.repeat(1, N, 1), 1).flatten(0, 1), whole @ w


def at(sizes: Sizes) -> list[list[Tensor]]:
    return on_each_rank(N, (*sizes, 4), (4, 6))


def captured(function: Callable[..., tuple[Tensor, ...]], dims: Sequence[int]) -> fx.GraphModule:
    return capture(function, tensors((*SIZES[0], 4), (4, 6)), {0: dims})


def guards(gm: fx.GraphModule) -> int:
    size = next(
        s for node in gm.graph.nodes for s in getattr(node.meta["val"], "shape", ()) if isinstance(s, torch.SymInt)
    )
    return len(size.node.shape_env.guards)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dims",
    [
        pytest.param((0,), id="batch", marks=pytest.mark.slow),
        pytest.param((1,), id="sequence", marks=pytest.mark.slow),
        pytest.param((0, 1), id="both"),
    ],
)
@pytest.mark.parametrize(
    "function", [gather, scatter, reduced, looked_up, exchanged, weight_gradient], ids=lambda f: f.__name__
)
def test_one_graph_serves_all_sizes_without_a_guard(
    function: Callable[..., tuple[Tensor, ...]], dims: Sequence[int]
) -> None:
    gm = captured(function, dims)
    before = guards(gm)
    for batch, sequence in SIZES:
        sizes = (batch if 0 in dims else SIZES[0][0], sequence if 1 in dims else SIZES[0][1])
        records = assert_equivalent(gm, at(sizes))
        assert all(record.rewritten for record in records.records), records
    assert guards(gm) == before


# --- a size that the program itself says is a multiple ----------------------------------------------------------------

FIRST = (2, 24)  # the sizes that are compiled


class ScatterRows(torch.autograd.Function):
    """Reduce-scatter along dim 1, which has to divide: as torch's functional collectives check it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch._check(x.shape[1] % N == 0)
        return reduce_scatter(x, 1, N)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return all_gather(grad, 1, N)


def scattered_rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (ScatterRows.apply(x @ w),)


def flattened_rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Batch and sequence in one dim: whole sequences are multiples, so their rows are."""
    torch._check(x.shape[1] % N == 0)
    return (reduce_scatter(torch.relu(x.flatten(0, 1)) @ w, 0, N),)


def scattered_rows_trained(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = ScatterRows.apply(torch.tanh(leaves[0]) @ leaves[1])
    return y.detach(), *torch.autograd.grad((y * y).sum(), leaves)


def reduced_rows(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Only the rows can be cut: of the columns there are 7."""
    torch._check(x.shape[1] % N == 0)
    return (all_reduce(x @ F.pad(w, (0, 1))),)


def reduced_and_multiplied(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (F.silu(*reduced_rows(x, w)) @ F.pad(w.t(), (0, 0, 0, 1)),)


def guards_of(gm: fx.GraphModule) -> list[str]:
    env = next(s for n in gm.graph.nodes for s in getattr(n.meta["val"], "shape", ()) if isinstance(s, torch.SymInt))
    return [str(guard.expr) for guard in env.node.shape_env.guards]


def one_rewrite(gm: fx.GraphModule, lengths: Sequence[int], options: Options) -> Sequence[Record]:
    """The records of a graph that is rewritten once, after a check of its values for each of the lengths."""
    world = LocalWorld(N)
    rewritten = [rewrite_for_rank(gm, options, world.transport(rank)) for rank in range(N)]
    for length in lengths:
        inputs = at((FIRST[0], length))
        wanted = run_ranks(lambda _: gm, inputs, LocalWorld(N))
        got = run_ranks(lambda rank: rewritten[rank][0], inputs, world)
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    return rewritten[0][1].records


@pytest.mark.parametrize(
    "function",
    [
        scattered_rows,
        flattened_rows,
        pytest.param(scattered_rows_trained, marks=pytest.mark.slow),
        reduced_rows,
        pytest.param(reduced_and_multiplied, marks=pytest.mark.slow),
    ],
    ids=lambda f: f.__name__,
)
def test_what_the_program_says_of_a_size_is_used_and_no_guard_is_added(
    function: Callable[..., tuple[Tensor, ...]],
) -> None:
    gm = capture(function, tensors((*FIRST, 4), (4, 6)), {0: (1,)})
    before = guards_of(gm)
    assert any("Mod" in guard for guard in before), before
    records = one_rewrite(gm, (24, 12, 63, 3), Options(rewrite="always", schedule="ring"))
    assert all(record.rewritten for record in records), records
    assert guards_of(gm) == before


@pytest.mark.slow
@pytest.mark.parametrize("multiple", [N, 2 * N])
def test_a_rank_has_several_slices_of_what_the_program_says_divides_by_the_ranks(multiple: int) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        torch._check(x.shape[1] % multiple == 0)
        return scattered_rows(x, w)

    gm = capture(function, tensors((*FIRST, 4), (4, 6)), {0: (1,)})
    options = Options(rewrite="always", schedule="ring", slices_per_rank=2)
    (record,) = one_rewrite(gm, [multiple * count for count in (4, 1, 7)], options)
    assert record.schedule == "ring x2"


@pytest.mark.slow
def test_slices_are_no_finer_than_two_rows_in_the_first_call() -> None:
    """Where torch sees a 1 it takes it for a constant: what is compiled then would be wrong for other lengths."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        torch._check(x.shape[1] % (2 * N) == 0)
        return scattered_rows(x, w)

    gm = capture(function, tensors((2, 2 * N, 4), (4, 6)), {0: (1,)})
    options = Options(rewrite="always", schedule="ring", slices_per_rank=2)
    (record,) = one_rewrite(gm, (2 * N, 4 * N), options)
    assert record.schedule == "ring"


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_reduce"])
def test_where_nothing_is_known_of_a_size_the_reason_says_how_to_tell(collective: str) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x.flatten(0, 1) @ w
        return (reduce_scatter(y, 0, N) if collective == "reduce_scatter" else all_reduce(y[:, :5]),)

    gm = capture(function, tensors((1, 6, 4), (4, 6)), {0: (1,)})
    (record,) = assert_equivalent(gm, at((1, 6))).records
    assert not record.rewritten
    assert f"torch._check(size % {N} == 0)" in record.reason


@pytest.mark.slow
def test_attention_over_symbolic_rows_is_sliced_with_its_projection() -> None:
    def attended(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        q = x.repeat(1, N, 1).unsqueeze(1).expand(-1, 2, -1, -1)
        y = F.scaled_dot_product_attention(q, q.sin(), q.cos(), is_causal=True)
        return (reduce_scatter(y.transpose(1, 2).flatten(2) @ torch.cat([w, w]), 1, N),)

    gm = captured(attended, (0, 1))
    before = guards(gm)
    for sizes in SIZES:
        (record,) = assert_equivalent(gm, at(sizes), Options(rewrite="always", depth=2)).records
        assert len(record.region) == 2, record
    assert guards(gm) == before


def test_a_size_that_depends_on_data_is_left_alone_with_a_reason() -> None:
    def selected(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        rows = torch.nonzero(x[0, :, 0] > -10.0).shape[0]
        return (all_gather(x.new_ones(rows, 4), 0, N) @ w,)

    (record,) = assert_equivalent(captured(selected, (1,)), at((2, 5))).records
    assert not record.rewritten
    assert "u0" in record.reason


def gather_of_uneven(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (all_gather(x, 1, N)[:, :-1] @ w,)


def scatter_of_uneven(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (reduce_scatter(F.pad(x.repeat(1, N, 1)[:, :-1] @ w, (0, 0, 0, 1)), 1, N),)


@pytest.mark.parametrize("function", [gather_of_uneven, scatter_of_uneven], ids=lambda f: f.__name__)
def test_uneven_shards_of_a_symbolic_length_are_left_alone_and_the_reason_says_which_size_would_do(
    function: Callable[..., tuple[Tensor, ...]],
) -> None:
    (record,) = assert_equivalent(captured(function, (1,)), at((2, 6))).records
    assert not record.rewritten
    assert "A size that divides by the ranks" in record.reason


# --- sizes ------------------------------------------------------------------------------------------------------------


def symbols(*names: str) -> Sequence[Any]:
    return [sympy.Symbol(name, integer=True, positive=True) for name in names]


def test_a_quotient_is_one_for_all_values_or_none() -> None:
    s, t = symbols("s", "t")
    assert quotient(8 * s, 4) == 2 * s
    assert quotient(8 * s * t + 4 * t, 4 * t) == 2 * s + 1
    assert quotient(12, 4) == 3
    assert quotient(s * 0, 5) == 0
    for size, divisor in ((s, 2), (13, 4), (s, t), (4, s), (3, 0), (s + 1, s)):
        assert quotient(size, divisor) is None


def test_at_least_is_true_for_all_values_or_not() -> None:
    (s,) = symbols("s")
    assert at_least(3 * s, s)
    assert at_least(4, 4)
    assert not at_least(s, 2)
    assert not at_least(s, 3 * s)


def test_sizes_are_computed_from_the_inputs_of_a_graph() -> None:
    gm = captured(lambda x, w: (all_gather(x, 1, N).reshape(-1, 4) @ w,), (0, 1))
    sizes_from_inputs(gm.graph)
    x = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
    b, s = as_size(x.shape[0]), as_size(x.shape[1])
    nodes = SizeNodes(gm.graph)
    wanted = nodes[b * s**2 + 3 * s]
    assert wanted is SizeNodes(gm.graph)[b * s**2 + 3 * s], "what is there is used again"
    assert as_size(wanted) == b * s**2 + 3 * s
    assert [
        node.all_input_nodes[0].op for node in gm.graph.find_nodes(op="call_function", target=aten.sym_size.int)
    ] == [
        "placeholder",
        "placeholder",
    ]
    with pytest.raises(UnknownSize, match="unknown"):
        nodes.check(symbols("unknown"))
    before = len(gm.graph.nodes)
    drop_unused_sizes(gm.graph)
    assert len(gm.graph.nodes) < before
    gm.graph.lint()


def test_a_symbol_is_found_in_a_multiple_of_it() -> None:
    def halves(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x @ w,)

    gm = captured(lambda x, w: halves(x.reshape(-1, 4), w), (1,))
    (rows,) = [n for n in gm.graph.find_nodes(op="call_function", target=aten.reshape.default)]
    graph = fx.Graph()  # as a backward graph that gets a saved tensor alone
    graph.placeholder("saved").meta["val"] = rows.meta["val"]
    graph.output(())
    (s,) = as_size(rows.meta["val"].shape[0]).free_symbols
    assert as_size(SizeNodes(graph)[s]) == s
    assert [node.target for node in graph.find_nodes(op="call_function", target=operator.floordiv)]


# --- random programs --------------------------------------------------------------------------------------------------

STEPS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    lambda x: x * 0.5 + x.new_ones(x.shape[-1]),
    lambda x: x.transpose(0, -1),
    lambda x: x.transpose(0, 1).contiguous() if x.dim() > 1 else x,
    lambda x: x.flatten(0, 1) if x.dim() > 1 else x,
    lambda x: x.flatten(-2, -1) if x.dim() > 1 else x,
    lambda x: x.unsqueeze(1) if x.dim() < 4 else x,
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: torch.softmax(x, 0),
    lambda x: torch.cat([x, x.cos()], -1),
    lambda x: x + x.new_full(x.shape, 2.0).cumsum(0),
    lambda x: x[:1] + x,
    lambda x: x.unflatten(-1, (2, -1)) if as_size(x.shape[-1]) == 4 else x,
)


def times_weight(x: Tensor) -> Tensor:
    """A product with a weight that has as many rows as x has columns."""
    width, columns = 6, x.shape[-1]
    weight = torch.arange(columns * width, dtype=x.dtype).reshape(columns, width).sin()
    return (x.flatten(0, -2) @ weight).reshape(*x.shape[:-1], width) if x.dim() > 1 else x.unsqueeze(0) @ weight


def check_a_random_program(data: st.DataObject) -> None:
    dim, kind = data.draw(st.integers(0, 2)), data.draw(st.sampled_from(["gather", "scatter", "reduce"]))
    before, after = (data.draw(st.lists(st.sampled_from(STEPS), max_size=3)) for _ in range(2))
    dims = data.draw(st.sampled_from([(0,), (1,), (0, 1)]))

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = all_gather(x, dim, N) if kind == "gather" else torch.cat([x, x.sin(), x.cos()], dim)
        for step in before:
            y = step(y)
        z = times_weight(y)
        for step in after:
            z = step(z)
        if kind == "scatter":
            scatter = [d for d, size in enumerate(z.shape) if quotient(as_size(size), N) is not None]
            return (reduce_scatter(z, scatter[0], N), y) if scatter else (all_reduce(z),)
        return (all_reduce(z),) if kind == "reduce" else (z, y)

    gm = captured(program, dims)
    known = guards(gm)
    for batch, sequence in SIZES[:3]:
        sizes = (batch if 0 in dims else SIZES[0][0], sequence if 1 in dims else SIZES[0][1])
        assert_equivalent(gm, at(sizes), Options(rewrite="always", schedule="ring"), rtol=1e-9, atol=1e-9)
    assert guards(gm) == known


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_symbolic_programs_compute_the_same_for_each_size(data: st.DataObject) -> None:
    check_a_random_program(data)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None)
@given(st.data())
def test_thousands_of_random_symbolic_programs(data: st.DataObject) -> None:
    check_a_random_program(data)
