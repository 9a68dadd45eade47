"""Every row of the rule table: whatever cut it admits, running it slice by slice gives the slices of its output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx import Node

import fo_compiler
from fo_compiler.options import Options
from fo_compiler.passes.overlap_pass import FlashOverlapPass
from fo_compiler.passes.rules import ATTENTIONS, MATMULS, RESHAPED, RULES, SHAPE_ARGUMENT, registered, rule_of
from fo_compiler.passes.separability import Cut, NotSeparable, Slices, Split, local_shape, shape_of
from fo_compiler.testing import assert_equivalent
from tests.graphs import all_gather, all_reduce, capture
from tests.passes.helpers import aten, on_each_rank, tensors
from tests.passes.test_separability import cut_slices
from tests.programs import Program

prims = torch.ops.prims
EQUAL = Slices(2)
SLICES = (EQUAL, Slices(1, 2, 3), Slices(1, 3, 4))  # a dim of 6 in 2 and 4, one of 4 in 1, 1 and 2


def places(x: Tensor) -> Tensor:
    """Different indices below 4, some of them equal: additions that meet have an order."""
    return (x * 100).long() % 4


# op -> a call of it, and the shapes of the inputs
CASES: dict[object, tuple[Callable[..., object], tuple[tuple[int, ...], ...]]] = {
    aten.mm.default: (lambda a, b: a @ b, ((4, 6), (6, 8))),
    aten.addmm.default: (torch.addmm, ((8,), (4, 6), (6, 8))),
    aten.bmm.default: (torch.bmm, ((2, 4, 6), (2, 6, 8))),
    aten.baddbmm.default: (torch.baddbmm, ((2, 4, 8), (2, 4, 6), (2, 6, 8))),
    aten.linear.default: (aten.linear.default, ((2, 4, 6), (8, 6), (8,))),
    prims.convert_element_type.default: (lambda x: prims.convert_element_type(x, torch.float32), ((4, 6),)),
    aten._to_copy.default: (lambda x: aten._to_copy(x, dtype=torch.float32), ((4, 6),)),
    aten.clone.default: (aten.clone.default, ((4, 6),)),
    aten.alias.default: (aten.alias.default, ((4, 6),)),
    aten.detach.default: (aten.detach.default, ((4, 6),)),
    aten.copy.default: (aten.copy.default, ((4, 6), (4, 6))),
    aten.full_like.default: (lambda x: aten.full_like(x, 3.0), ((4, 6),)),
    aten.zeros_like.default: (aten.zeros_like.default, ((4, 6),)),
    aten.ones_like.default: (aten.ones_like.default, ((4, 6),)),
    aten.sum.dim_IntList: (lambda x: aten.sum(x, [1]), ((4, 6, 2),)),
    aten.mean.dim: (lambda x: aten.mean(x, [1], True), ((4, 6, 2),)),
    aten.amax.default: (lambda x: aten.amax(x, [-1]), ((4, 6, 2),)),
    aten.amin.default: (lambda x: aten.amin(x, [0, 1]), ((4, 6, 2),)),
    aten.var_mean.correction: (lambda x: aten.var_mean(x, [1], correction=0), ((4, 6, 2),)),
    aten.var.correction: (lambda x: aten.var(x, [1], correction=1), ((4, 6, 2),)),
    aten.any.dim: (lambda x: aten.any(x, 1), ((4, 6, 2),)),
    aten.argmax.default: (lambda x: aten.argmax(x, 1), ((4, 6, 2),)),
    aten.argmin.default: (lambda x: aten.argmin(x, 0), ((4, 6, 2),)),
    aten.logsumexp.default: (lambda x: aten.logsumexp(x, [1], True), ((4, 6, 2),)),
    aten.prod.dim_int: (lambda x: aten.prod(x, 1), ((4, 6, 2),)),
    aten._softmax_backward_data.default: (
        lambda g, y: aten._softmax_backward_data(g, y, 1, torch.float64),
        ((4, 6, 2), (4, 6, 2)),
    ),
    aten._log_softmax_backward_data.default: (
        lambda g, y: aten._log_softmax_backward_data(g, y, -1, torch.float64),
        ((4, 6, 2), (4, 6, 2)),
    ),
    aten.sort.default: (lambda x: aten.sort(x, 1), ((4, 6, 2),)),
    aten.topk.default: (lambda x: aten.topk(x, 3, 1), ((4, 6, 2),)),
    aten.slice_scatter.default: (lambda x, y: aten.slice_scatter(x, y, 1, 2, 4), ((4, 6), (4, 2))),
    aten.roll.default: (lambda x: aten.roll(x, [1], [1]), ((4, 6),)),
    aten.unbind.int: (lambda x: aten.unbind(x, 1), ((4, 3, 6),)),
    aten.gather.default: (lambda x: aten.gather(x, 1, (x * 0).long() + 1), ((4, 6),)),
    aten.index_select.default: (lambda x, i: aten.index_select(x, 1, (i * 0).long() + 2), ((4, 6), (8,))),
    aten.view_as_complex.default: (aten.view_as_complex.default, ((4, 6, 2),)),
    aten.view_as_real.default: (lambda x: aten.view_as_real(torch.complex(x, x * 2)), ((4, 6),)),
    aten._softmax.default: (lambda x: aten._softmax(x, 1, False), ((4, 6, 2),)),
    aten._log_softmax.default: (lambda x: aten._log_softmax(x, -1, False), ((4, 6, 2),)),
    aten.cumsum.default: (lambda x: aten.cumsum(x, 0), ((4, 6, 2),)),
    aten.flip.default: (lambda x: aten.flip(x, [0, 2]), ((4, 6, 2),)),
    aten.native_layer_norm.default: (
        lambda x, w, b: aten.native_layer_norm(x, [6, 2], w, b, 1e-5),
        ((4, 6, 2), (6, 2), (6, 2)),
    ),
    aten.permute.default: (lambda x: x.permute(2, 0, 1), ((4, 6, 2),)),
    aten.transpose.int: (lambda x: x.transpose(0, -1), ((4, 6, 2),)),
    aten.t.default: (lambda x: aten.t(x), ((4, 6),)),
    aten.unsqueeze.default: (lambda x: x.unsqueeze(-2), ((4, 6),)),
    aten.squeeze.dim: (lambda x: aten.squeeze(x, 1), ((4, 1, 6),)),
    aten.squeeze.dims: (lambda x: aten.squeeze(x, [0, 1, 2]), ((1, 2, 1, 6),)),
    aten.expand.default: (lambda x: x.expand(4, 2, 6), ((1, 6),)),
    aten.slice.Tensor: (lambda x: aten.slice(x, 1, 0, 4), ((4, 6),)),
    aten.split.Tensor: (lambda x: aten.split(x, 3, 1), ((4, 6),)),
    aten.split_with_sizes.default: (lambda x: aten.split_with_sizes(x, [2, 4], 1), ((4, 6),)),
    aten.select.int: (lambda x: aten.select(x, 1, 3), ((4, 6, 2),)),
    aten.cat.default: (lambda x, y: torch.cat([x, y], 1), ((4, 6), (4, 2))),
    aten.constant_pad_nd.default: (lambda x: aten.constant_pad_nd(x, [1, 1], 0.0), ((4, 6),)),
    aten.embedding.default: (lambda w, i: aten.embedding(w, (i * 0).long()), ((5, 8), (4, 6))),
    aten.index.Tensor: (lambda x, i: aten.index(x, [None, places(i)]), ((4, 6, 2), (8,))),
    aten._unsafe_index.Tensor: (
        lambda x, i, j: aten._unsafe_index(x, [places(i), None, places(j)]),
        ((4, 6, 4), (2, 1), (4,)),
    ),
    aten.index_put.default: (
        lambda x, i, v: aten.index_put(x, [None, places(i)], v, True),
        ((4, 6, 2), (8,), (4, 8, 1)),
    ),
    aten._unsafe_index_put.default: (
        lambda x, i, j, v: aten._unsafe_index_put(x, [places(i), None, places(j)], v, True),
        ((4, 6, 4), (2, 1), (4,), (2, 4, 6)),
    ),
    aten._grouped_mm.default: (
        lambda a, b, e: aten._grouped_mm(a.bfloat16(), b.bfloat16(), (e * 0).int() + 3),
        ((3, 16), (2, 16, 32), (2,)),
    ),
    aten.view.default: (lambda x: aten.view(x, [24, 2]), ((4, 6, 2),)),
    aten.reshape.default: (lambda x: x.reshape(4, 12), ((4, 6, 2),)),
    aten._unsafe_view.default: (lambda x: aten._unsafe_view(x, [2, 2, 6]), ((4, 6),)),
    aten.view.dtype: (lambda x: aten.view(x, torch.int32), ((4, 6, 2),)),
    # pointwise ops need no row
    aten.relu.default: (torch.relu, ((4, 6),)),
    aten.add.Tensor: (torch.add, ((4, 6), (6,))),
    aten.where.self: (lambda x, y: torch.where(x > 0, x, y), ((4, 6), (4, 1))),
}


def test_every_row_of_the_table_has_a_case() -> None:
    import operator

    rows = {op for op in RULES if str(op) not in registered} - ATTENTIONS  # those are in test_attention.py
    rows.remove(aten._scaled_mm.default)  # this one is in test_fp8.py
    assert rows - {operator.getitem} <= set(CASES), rows - set(CASES)


def run_slice(node: Node, split: Split, values: dict[Node, Tensor], slices: Slices, j: int) -> object:
    """The node on slice j, as a rewrite would run it."""
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs),
        lambda o: cut_slices(values[o], split.inputs[o], slices)[j] if o in split.inputs else values[o],
    )
    if node.target in SHAPE_ARGUMENT:
        assert split.output is not None
        args = (args[0], local_shape(shape_of(node), split.output, slices, j), *args[2:])
    target = aten.reshape.default if node.target in RESHAPED else node.target
    return target(*args, **kwargs)


def one_node(target: object, inputs: list[Tensor]) -> fx.GraphModule:
    program = Program(1, inputs[0].dtype)
    node = program.call(target, *(program.input(*x.shape) for x in inputs))
    return program.finish([node]).module


def every_split(node: Node, slices: Slices) -> list[Split]:
    """What the rule answers for every cut of every input, and of the output."""
    rule = rule_of(node)
    found = []
    asked = [
        (operand, Cut(dim, outer))
        for operand in node.all_input_nodes
        for dim in range(len(shape_of(operand)))
        for outer in (1, 2)
    ]
    for operand, cut in asked:
        try:
            found.append(rule.from_inputs(node, {operand: cut}, slices))
        except NotSeparable:
            continue
    for dim in range(len(shape_of(node))):
        try:
            split = rule.from_output(node, Cut(dim), slices)
            local_shape(shape_of(node), Cut(dim), slices, 0)
            found.append(split)
        except NotSeparable:
            continue
    return found


@pytest.mark.parametrize("target", CASES, ids=str)
def test_slices_of_the_output_are_the_op_on_slices_of_the_inputs(target: object) -> None:
    function, shapes = CASES[target]
    inputs = tensors(*shapes)
    if target in (aten.argmax.default, aten.argmin.default, aten.any.dim):
        inputs = [x.round() for x in inputs]
    gm = capture(function, inputs)
    if target in (aten.view.default, aten._unsafe_view.default):  # capture turns views into reshapes
        (gm.graph.find_nodes(op="call_function", target=aten.reshape.default)[0]).target = target
    elif not gm.graph.find_nodes(op="call_function", target=target):  # tracing takes it apart
        gm = one_node(target, inputs)
    node = gm.graph.find_nodes(op="call_function", target=target)[0]
    values: dict[Node, Tensor] = {}

    class Remember(fx.Interpreter):
        def run_node(self, n: Node) -> object:
            values[n] = super().run_node(n)
            return values[n]

    Remember(gm).run(*inputs)
    splits = [(slices, split) for slices in SLICES for split in every_split(node, slices)]
    assert splits, "a row that admits no cut at all is no row"
    whole = values[node]
    for slices, split in splits:
        count = slices.count
        pieces = [run_slice(node, split, values, slices, j) for j in range(count)]
        for index, want in enumerate(whole if isinstance(whole, (tuple, list)) else [whole]):
            parts = [p[index] if isinstance(p, (tuple, list)) else p for p in pieces]
            if split.output is None:
                got = sum(parts) if target is not aten.addmm.default else None
                if got is None:  # the bias is added once: by the first slice
                    bias = values[node.args[0]]
                    got = sum(parts) - (count - 1) * bias
                if target is aten.baddbmm.default:
                    got = got - (count - 1) * values[node.args[0]]
                torch.testing.assert_close(got, want)
                continue
            for piece, expected in zip(parts, cut_slices(want, split.output, slices), strict=True):
                torch.testing.assert_close(piece, expected, msg=f"{slices} {split}")


@pytest.mark.parametrize(
    ("function", "shapes", "cut"),
    [
        (lambda x: torch.softmax(x, 1), ((4, 6),), Cut(1)),
        (lambda x: aten.cumsum(x, 0), ((4, 6),), Cut(0)),
        (lambda x: aten.flip(x, [1]), ((4, 6),), Cut(1)),
        (lambda x: x.amax(0), ((4, 6),), Cut(0)),
        (lambda x: x.mean(1), ((4, 6),), Cut(1)),
        (lambda x: aten.slice(x, 1, 0, 4), ((4, 6),), Cut(1)),
        (lambda x: aten.select(x, 0, 0), ((4, 6),), Cut(0)),
        (lambda x: torch.cat([x, x], 0), ((4, 6),), Cut(0)),
        (lambda x: aten.constant_pad_nd(x, [0, 0, 1, 0]), ((4, 6),), Cut(0)),
        (lambda x: aten.native_layer_norm(x, [6], None, None, 1e-5)[0], ((4, 6),), Cut(1)),
        (lambda x, i: aten.index(x, [places(i)]), ((4, 6), (8,)), Cut(0)),
        (lambda x, i, v: aten.index_put(x, [places(i)], v), ((4, 6), (8,), (8, 6)), Cut(0)),
    ],
)
def test_a_dim_along_which_elements_meet_is_not_cut(function, shapes, cut) -> None:
    gm = capture(function, tensors(*shapes))
    source = gm.graph.find_nodes(op="placeholder")[0]
    (node, *_) = source.users
    with pytest.raises(NotSeparable):
        rule_of(node).from_inputs(node, {source: cut}, EQUAL)


def test_a_mask_that_fills_is_cut_and_one_that_orders_values_is_not() -> None:
    def fill(x: Tensor, value: Tensor) -> Tensor:
        return aten.index_put(x, [x[:, :, 0] > 0], value)

    for shape, separable in (((), True), ((1,), True), ((2,), False)):
        gm = capture(fill, tensors((4, 6, 2), shape))
        node = gm.graph.find_nodes(op="call_function", target=aten.index_put.default)[0]
        if separable:
            mask = node.args[1][0]
            for dim in range(2):
                split = rule_of(node).from_output(node, Cut(dim), EQUAL)
                assert split.inputs == {node.args[0]: Cut(dim), mask: Cut(dim)}
        else:
            with pytest.raises(NotSeparable, match="order of a mask"):
                rule_of(node).from_output(node, Cut(0), EQUAL)


def test_columns_of_a_grouped_product_are_cut_where_its_kernels_can_read() -> None:
    for columns, separable in ((32, True), (24, False)):  # in two slices of 16, or of 12 numbers of 2 bytes
        gm = capture(CASES[aten._grouped_mm.default][0], tensors((3, 16), (2, 16, columns), (2,)))
        node = gm.graph.find_nodes(op="call_function", target=aten._grouped_mm.default)[0]
        if separable:
            assert rule_of(node).from_output(node, Cut(1), EQUAL).output == Cut(1)
        else:
            with pytest.raises(NotSeparable, match="16 bytes"):
                rule_of(node).from_output(node, Cut(1), EQUAL)


def test_what_experts_give_is_summed_column_by_column() -> None:
    """Tokens in order of expert, multiplied with the part of each expert that a rank has, and put back in their order."""

    def layer(tokens: Tensor, down: Tensor, order: Tensor) -> Tensor:
        ends = torch.tensor([1, 1, 6, 8], dtype=torch.int32)
        rows = order[:, 0].argsort(stable=True)
        return all_reduce(aten._grouped_mm(tokens[rows], down, ends)[rows.argsort()].reshape(4, 2, 32).sum(1))

    inputs = on_each_rank(2, (8, 16), (4, 16, 32), (8, 1), dtype=torch.bfloat16)
    (record,) = assert_equivalent(capture(layer, inputs[0]), inputs, rtol=1e-2, atol=1e-2).records
    assert record.region == ("_grouped_mm",)
    assert "along dim 1" in record.tensor


@pytest.fixture
def own_op():
    library = torch.library.Library("fo_test", "FRAGMENT")
    library.define("scaled_mm(Tensor a, Tensor b, float scale) -> Tensor")
    library.impl("scaled_mm", lambda a, b, scale: (a @ b) * scale, "CompositeExplicitAutograd")
    yield torch.ops.fo_test.scaled_mm.default
    RULES.pop(torch.ops.fo_test.scaled_mm.default, None)
    MATMULS.discard(torch.ops.fo_test.scaled_mm.default)
    registered.clear()
    library._destroy()


def test_a_user_can_add_a_row_for_an_op_of_their_own(own_op) -> None:
    before = FlashOverlapPass(Options()).uuid()
    fo_compiler.register_rule(own_op, "mk,kn->mn", is_matmul=True)
    inputs = on_each_rank(2, (4, 6), (6, 5))
    gm = capture(lambda x, w: own_op(all_gather(x, 0, 2), w, 0.5), inputs[0])
    assert assert_equivalent(gm, inputs).records[0].region == ("scaled_mm",)
    assert FlashOverlapPass(Options()).uuid() != before, "another compile cache key"


def test_an_axis_that_only_the_output_of_an_own_op_has_is_needed_whole(own_op) -> None:
    fo_compiler.register_rule(own_op, "mk,kn->mz")
    gm = capture(lambda a, b: own_op(a, b, 0.5), tensors((4, 6), (6, 8)))
    (node,) = gm.graph.find_nodes(op="call_function", target=own_op)
    assert rule_of(node).from_output(node, Cut(0), EQUAL).inputs
    with pytest.raises(NotSeparable, match="needs this dim whole"):
        rule_of(node).from_output(node, Cut(1), EQUAL)


@pytest.mark.parametrize("spec", ["mk,kn", "m k -> ", "mk,k1->m1"])
def test_a_row_that_is_no_einsum_is_refused(own_op, spec: str) -> None:
    with pytest.raises(ValueError, match="expected axes"):
        fo_compiler.register_rule(own_op, spec)


def test_a_row_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="already"):
        fo_compiler.register_rule(aten.mm, "mk,kn->mn")
