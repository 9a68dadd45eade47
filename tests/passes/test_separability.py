"""The algebra of cuts: how a cut travels through a reshape and through an op with named axes."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.passes.rules import rule_of
from fo_compiler.passes.separability import Cut, NotSeparable, Slices, bounds, local_shape, reshaped_cut, row_size
from tests.graphs import capture
from tests.passes.helpers import aten, tensors

EXAMPLES = int(os.environ.get("FO_TEST_EXAMPLES", "300"))


def node_of(function, target, *shapes):
    (node,) = capture(function, tensors(*shapes)).graph.find_nodes(op="call_function", target=target)
    return node


def cut_slices(x: torch.Tensor, cut: Cut, slices: Slices) -> list[torch.Tensor]:
    """The slices of a tensor, by the definition of a cut."""
    shape, pieces = tuple(x.shape), []
    for index in range(slices.count):
        start, stop = bounds(shape, cut, slices, index)
        piece = x.unflatten(cut.dim, (cut.outer, -1)).narrow(cut.dim + 1, start, stop - start)
        pieces.append(piece.reshape(local_shape(shape, cut, slices, index)))
    return pieces


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.data())
def test_a_reshape_of_a_slice_is_the_slice_of_the_reshape(data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=5))
    slices = data.draw(st.builds(Slices.of, st.integers(1, 7), st.sampled_from([2, 3]), st.integers(1, 4)))

    def grouped() -> list[int]:
        sizes, current = [], 1
        for factor in factors:
            current *= factor
            if data.draw(st.booleans()):
                sizes.append(current)
                current = 1
        return [*sizes, current]

    source, target = grouped(), grouped()
    cut = Cut(data.draw(st.integers(0, len(source) - 1)), data.draw(st.sampled_from([1, 1, 2, 3])))
    x = torch.arange(float(torch.Size(source).numel())).reshape(source)
    node = node_of(lambda t: t.reshape(target) + 0, aten.add.Tensor, source)
    try:
        pieces = cut_slices(x, cut, slices)
        moved = reshaped_cut(node, tuple(source), tuple(target), cut, slices)
    except NotSeparable:
        return
    for piece, wanted in zip(pieces, cut_slices(x.reshape(target), moved, slices), strict=True):
        assert torch.equal(piece.reshape(wanted.shape), wanted)
    assert reshaped_cut(node, tuple(target), tuple(source), moved, slices) == cut, "the way back leads to the same cut"


def test_flattening_batch_and_sequence_keeps_the_sequence_cut() -> None:
    node = node_of(lambda x: x.reshape(6, 5) + 0, aten.add.Tensor, (2, 3, 5))
    assert reshaped_cut(node, (2, 12, 5), (24, 5), Cut(1), Slices(4)) == Cut(0, outer=2)
    assert reshaped_cut(node, (24, 5), (2, 12, 5), Cut(0, outer=2), Slices(4)) == Cut(1)


def test_a_reshape_that_mixes_slices_is_refused_with_both_shapes() -> None:
    node = node_of(lambda x: x.reshape(6, 5) + 0, aten.add.Tensor, (2, 3, 5))
    with pytest.raises(NotSeparable, match=r"\[4, 6\] to \[6, 4\]"):
        reshaped_cut(node, (4, 6), (6, 4), Cut(0), Slices(4))


def test_a_size_that_does_not_divide_is_refused_with_the_size() -> None:
    with pytest.raises(NotSeparable, match="size 7 of dim 1 does not divide into 2"):
        row_size((3, 7), Cut(1), Slices(2))


def test_an_empty_dim_is_not_cut() -> None:
    with pytest.raises(NotSeparable):
        row_size((0, 7), Cut(0), Slices(2))


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_reshape_of_an_empty_tensor_is_refused(empty: int) -> None:
    sizes = [0 if dim == empty else 4 for dim in range(3)]
    node = node_of(lambda x: x.reshape(6, 5) + 0, aten.add.Tensor, (2, 3, 5))
    target = (sizes[0] * sizes[1], sizes[2])
    for source, reshaped in ((tuple(sizes), target), (target, tuple(sizes))):
        for dim in range(len(source)):
            with pytest.raises(NotSeparable):
                reshaped_cut(node, source, reshaped, Cut(dim), Slices(2))


def test_a_matmul_cut_along_rows_takes_its_weight_whole() -> None:
    mm = node_of(lambda a, b: a @ b, aten.mm.default, (4, 6), (6, 5))
    a, _ = mm.args
    split = rule_of(mm).from_inputs(mm, {a: Cut(0)}, Slices(2))
    assert dict(split.inputs) == {a: Cut(0)}
    assert split.output == Cut(0)


def test_a_matmul_cut_along_k_is_a_sum_over_slices_of_both_factors() -> None:
    mm = node_of(lambda a, b: a @ b, aten.mm.default, (4, 6), (6, 5))
    a, b = mm.args
    split = rule_of(mm).from_inputs(mm, {a: Cut(1)}, Slices(2))
    assert dict(split.inputs) == {a: Cut(1), b: Cut(0)}
    assert split.output is None


def test_a_bias_that_broadcasts_is_used_whole_and_a_matrix_bias_is_cut() -> None:
    for shape, cut in (((5,), None), ((1, 5), None), ((4, 5), Cut(0))):
        addmm = node_of(torch.addmm, aten.addmm.default, shape, (4, 6), (6, 5))
        bias, a, _ = addmm.args
        split = rule_of(addmm).from_inputs(addmm, {a: Cut(0)}, Slices(2))
        assert split.inputs.get(bias) == cut


def test_one_tensor_in_two_roles_is_refused() -> None:
    mm = node_of(lambda a: a @ a, aten.mm.default, (4, 4))
    with pytest.raises(NotSeparable):
        rule_of(mm).from_inputs(mm, {mm.args[0]: Cut(0)}, Slices(2))


def test_an_op_without_a_row_is_refused_by_name() -> None:
    node = node_of(lambda x: torch.mode(x).values, aten.mode.default, (4, 4))
    with pytest.raises(NotSeparable, match=r"no separability rule for aten.mode.default \(mode\)"):
        rule_of(node)


def test_random_ops_are_not_separable() -> None:
    node = node_of(lambda x: torch.rand_like(x), aten.rand_like.default, (4, 4))
    with pytest.raises(NotSeparable):
        rule_of(node)
