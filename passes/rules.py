"""The separability rule table: one row an ATen op.

A row is a function from a node to its `Axes`, most of them made by one of the few makers below. Ops that torch tags as
pointwise need no row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..torch_adapter import has_float32_products
from . import attention, indexing
from .products import CheckedRule, check_grouped, check_scaled, einsum, grouped_product, linear, scaled_product
from .separability import (
    Axes,
    AxesRule,
    Label,
    NotSeparable,
    ReshapeRule,
    Rule,
    argument,
    broadcast,
    name_of,
    shape_of,
    tensor_of,
    tensor_operands,
)
from .sizes import as_size

aten = torch.ops.aten
prims = torch.ops.prims


def _identity_labels(node: Node) -> tuple[Label, ...]:
    return tuple(range(len(shape_of(node))))


def _modulo(dims: int | Iterable[int] | None, rank: int) -> set[int]:
    if dims is None:
        return set(range(rank))
    dims = [dims] if isinstance(dims, int) else list(dims)
    return {dim % rank for dim in dims} if dims else set(range(rank))


# --- makers of rows -------------------------------------------------------------------------------------------------


def pointwise(node: Node) -> Axes:
    """Element by element, with broadcasting."""
    sizes, labels = shape_of(node), _identity_labels(node)
    operands = tuple((o, broadcast(shape_of(o), labels, sizes)) for o in tensor_operands(node))
    return Axes(operands, labels)


def reduction(sums: bool = False) -> Callable[[Node], Axes]:
    """Reduce over the dims in argument `dim`. `sums`: partial results of slices may be added up."""

    def axes(node: Node) -> Axes:
        (source,) = tensor_operands(node)
        labels = _identity_labels(source)
        reduced = _modulo(argument(node, "dim"), len(labels))
        if argument(node, "keepdim"):
            output: tuple[Label, ...] = tuple(None if dim in reduced else dim for dim in labels)
        else:
            output = tuple(dim for dim in labels if dim not in reduced)
        return Axes(((source, labels),), output, frozenset(() if sums else reduced), sums)

    return axes


def along(*names: str) -> Callable[[Node], Axes]:
    """Pointwise but for the dims in the named argument, along which elements meet (softmax, cumsum, flip)."""

    def axes(node: Node) -> Axes:
        plain = pointwise(node)
        blocked = _modulo(argument(node, names[0]), len(plain.output))
        return Axes(plain.operands, plain.output, frozenset(blocked))

    return axes


def layer_norm(node: Node) -> Axes:
    """Normalises over the trailing dims; weight and bias have those dims; yields (out, mean, rstd)."""
    source, *affine = tensor_operands(node)
    labels = _identity_labels(source)
    trailing = labels[len(labels) - len(argument(node, "normalized_shape")) :]
    return Axes(((source, labels), *((a, trailing) for a in affine)), labels, frozenset(trailing))


def permute(node: Node) -> Axes:
    (source,) = tensor_operands(node)
    labels = _identity_labels(source)
    rank = len(labels)
    if node.target is aten.permute.default:
        order = [dim % rank for dim in argument(node, "dims")]
    else:
        a, b = (0, 1) if node.target is aten.t.default else (argument(node, "dim0"), argument(node, "dim1"))
        order = list(range(rank))
        if rank > 1:
            order[a], order[b] = order[b], order[a]
    return Axes(((source, labels),), tuple(labels[dim] for dim in order))


def unsqueeze(node: Node) -> Axes:
    (source,) = tensor_operands(node)
    labels = list(_identity_labels(source))
    labels.insert(argument(node, "dim") % (len(labels) + 1), None)
    return Axes(((source, _identity_labels(source)),), tuple(labels))


def squeeze(node: Node) -> Axes:
    (source,) = tensor_operands(node)
    shape, labels = shape_of(source), _identity_labels(source)
    dims = _modulo(argument(node, "dim"), len(shape))
    return Axes(
        ((source, labels),),
        tuple(x for x, size in zip(labels, shape, strict=True) if x not in dims or size != 1),
    )


def expand(node: Node) -> Axes:
    """A dim that is expanded is cut without cutting the input: each slice expands to fewer items."""
    (source,) = tensor_operands(node)
    labels = _identity_labels(node)
    return Axes(((source, broadcast(shape_of(source), labels, shape_of(node))),), labels)


def narrow(node: Node) -> Axes:
    """slice, split, topk: part of one dim is taken, every other dim passes."""
    (source,) = tensor_operands(node)
    labels = _identity_labels(source)
    dim = argument(node, "dim") % len(labels)
    why = ""
    if node.target is aten.slice.Tensor and as_size(argument(node, "start") or 0) == 0:
        kept, size = shape_of(node)[dim], shape_of(source)[dim]
        why = f": it keeps {kept} of {size}, as where shards are uneven. {_EVEN}"
    return Axes(((source, labels),), labels, frozenset({dim}), why=why)


# What is said where padding keeps a collective from being sliced.
_EVEN = "A size that divides by the ranks of the group needs no padding, and can be sliced"


def view_as_dtype(node: Node) -> Axes:
    """The same bytes as another type; where that is wider or narrower, they meet along the last dim."""
    (source,) = tensor_operands(node)
    labels = _identity_labels(source)
    same_size = source.meta["val"].element_size() == node.meta["val"].element_size()
    return Axes(((source, labels),), labels, frozenset(() if same_size else labels[-1:]))


def select(node: Node) -> Axes:
    (source,) = tensor_operands(node)
    labels = _identity_labels(source)
    dim = argument(node, "dim") % len(labels)
    return Axes(((source, labels),), tuple(x for x in labels if x != dim), frozenset({dim}))


def pick(node: Node) -> Axes:
    """gather, index_select: items along one dim, chosen by an index; every other dim passes."""
    source, index = tensor_operands(node)
    labels = _identity_labels(source)
    dim = argument(node, "dim") % len(labels)
    operands: list[tuple[Node, tuple[Label, ...]]] = [(source, labels)]
    if len(shape_of(index)) == len(labels) and node.target is aten.gather.default:
        if any(a != b for d, (a, b) in enumerate(zip(shape_of(source), shape_of(index), strict=True)) if d != dim):
            raise NotSeparable(f"{name_of(node)} has an index that is smaller than the tensor")
        operands.append((index, labels))
    return Axes(tuple(operands), labels, frozenset({dim}))


def complex_pairs(node: Node) -> Axes:
    """view_as_complex, view_as_real: real and imaginary part are the last dim of one side."""
    (source,) = tensor_operands(node)
    rank = min(len(shape_of(source)), len(shape_of(node)))
    labels: tuple[Label, ...] = tuple(range(rank))

    def padded(length: int) -> tuple[Label, ...]:
        return (*labels, *[None] * (length - rank))

    return Axes(((source, padded(len(shape_of(source)))),), padded(len(shape_of(node))))


def cat(node: Node) -> Axes:
    operands = tensor_operands(node)
    labels = _identity_labels(node)
    dim = argument(node, "dim") % len(labels)
    if any(len(shape_of(o)) != len(labels) for o in operands):
        raise NotSeparable(f"{name_of(node)} joins tensors of different ranks")
    padded = [name_of(o) for o in operands if o.target is aten.constant_pad_nd.default]
    why = f": {padded[0]} is padded, as where shards are uneven. {_EVEN}" if padded else ""
    return Axes(tuple((o, labels) for o in operands), labels, frozenset({dim}), why=why)


def getitem(node: Node) -> Axes:
    """One of the tensors that a node yields: cut as they all are."""
    source = node.args[0]
    assert isinstance(source, Node)
    if is_shared_item(node):
        raise NotSeparable(f"{name_of(node)} is the same for every slice of {name_of(source)}")
    labels = _identity_labels(node)
    return Axes(((source, labels),), labels)


def is_shared_item(node: Node) -> bool:
    """Whether a node is one of several results of an op, and is not cut with the others: every slice yields the same."""
    source = node.args[0]
    return isinstance(source, Node) and node.args[1] in attention.RANDOM_STATE.get(source.target, ())


def embedding(node: Node) -> Axes:
    """weight [V, D], indices [...] -> [..., D]"""
    weight, indices = tensor_operands(node)
    batch = tuple(range(len(shape_of(indices))))
    return Axes(((weight, (None, "d")), (indices, batch)), (*batch, "d"))


def pad(node: Node) -> Axes:
    """Pads from the last dim backwards, two numbers a dim: a padded dim is needed whole."""
    (source,) = tensor_operands(node)
    labels = _identity_labels(source)
    amounts = argument(node, "pad")
    blocked = {len(labels) - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    return Axes(((source, labels),), labels, frozenset(blocked), why=f": it pads. {_EVEN}")


# --- the table ------------------------------------------------------------------------------------------------------

_AXES: dict[Any, Callable[[Node], Axes]] = {
    # products
    aten.mm.default: einsum("mk,kn->mn"),
    aten.addmm.default: einsum("mn,mk,kn->mn"),
    aten.bmm.default: einsum("bmk,bkn->bmn"),
    aten.baddbmm.default: einsum("bmn,bmk,bkn->bmn"),
    aten.linear.default: linear,
    # element by element, though torch does not tag them so
    prims.convert_element_type.default: pointwise,
    aten._to_copy.default: pointwise,
    aten.clone.default: pointwise,
    aten.alias.default: pointwise,
    aten.detach.default: pointwise,
    aten.copy.default: pointwise,
    aten.full_like.default: pointwise,
    aten.zeros_like.default: pointwise,
    aten.ones_like.default: pointwise,
    # reductions
    aten.sum.dim_IntList: reduction(sums=True),
    aten.mean.dim: reduction(),
    aten.amax.default: reduction(),
    aten.amin.default: reduction(),
    aten.var_mean.correction: reduction(),
    aten.var.correction: reduction(),
    aten.any.dim: reduction(),
    aten.argmax.default: reduction(),
    aten.argmin.default: reduction(),
    aten.logsumexp.default: reduction(),
    aten.prod.dim_int: reduction(),
    aten._softmax.default: along("dim"),
    aten._log_softmax.default: along("dim"),
    aten.cumsum.default: along("dim"),
    aten._softmax_backward_data.default: along("dim"),
    aten._log_softmax_backward_data.default: along("dim"),
    aten.sort.default: along("dim"),
    aten.topk.default: narrow,
    aten.slice_scatter.default: cat,
    aten.flip.default: along("dims"),
    aten.roll.default: along("dims"),
    aten.native_layer_norm.default: layer_norm,
    # shape
    aten.permute.default: permute,
    aten.transpose.int: permute,
    aten.t.default: permute,
    aten.view.dtype: view_as_dtype,
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.expand.default: expand,
    aten.slice.Tensor: narrow,
    aten.split.Tensor: narrow,
    aten.split_with_sizes.default: narrow,
    aten.select.int: select,
    aten.unbind.int: select,
    aten.gather.default: pick,
    aten.index_select.default: pick,
    aten.view_as_complex.default: complex_pairs,
    aten.view_as_real.default: complex_pairs,
    aten.cat.default: cat,
    aten.constant_pad_nd.default: pad,
    operator.getitem: getitem,
    aten.embedding.default: embedding,
    aten.index.Tensor: indexing.index,
    aten._unsafe_index.Tensor: indexing.index,
    aten.index_put.default: indexing.index_put,
    aten._unsafe_index_put.default: indexing.index_put,
}

RESHAPES: tuple[Any, ...] = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)

RULES: dict[Any, Rule] = {
    **{op: AxesRule(axes) for op, axes in _AXES.items()},
    **dict.fromkeys(RESHAPES, ReshapeRule()),
    aten._scaled_mm.default: CheckedRule(scaled_product, check_scaled),
    aten._grouped_mm.default: CheckedRule(grouped_product, check_grouped),
    **dict.fromkeys(attention.RANDOM_STATE, attention.AttentionRule(attention.forward)),
    **dict.fromkeys(attention.BACKWARDS, attention.AttentionRule(attention.backward)),
}

_POINTWISE_RULE = AxesRule(pointwise)

# Ops that are a reshape on a slice: it need not be viewable where the whole tensor is, and where a squeeze leaves a dim of the
# whole tensor alone, the slice may have one row.
RESHAPED: tuple[Any, ...] = (*RESHAPES, aten.squeeze.dim, aten.squeeze.dims)

# Ops that take the shape of their output: which argument it is, to be replaced by that of the slice.
SHAPE_ARGUMENT: dict[Any, int] = dict.fromkeys((*RESHAPED, aten.expand.default), 1)

# Ops that only say how one tensor is read: free to be done on the whole tensor again.
VIEWS: frozenset[Any] = frozenset(
    (
        *RESHAPES,
        aten.alias.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.unbind.int,
        aten.view.dtype,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
    )
)

# Where a matmul's first factor stands among its tensors, if not before the last one (a bias comes first as a rule).
FIRST_FACTOR: dict[Any, int] = {aten.linear.default: 0, aten._scaled_mm.default: 0, aten._grouped_mm.default: 0}

# What makes a region worth having, and how the partial sums of slices are added up where its K dim is cut.
ATTENTIONS: frozenset[Any] = frozenset(attention.RANDOM_STATE) | attention.BACKWARDS
MATMULS: set[Any] = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.linear.default,
    aten._scaled_mm.default,
    aten._grouped_mm.default,
    *ATTENTIONS,
}
ADD_PRODUCT: dict[Any, Any] = {
    aten.mm.default: aten.addmm.default,
    aten.addmm.default: aten.addmm.default,
    aten.bmm.default: aten.baddbmm.default,
    aten.baddbmm.default: aten.baddbmm.default,
}
# The same product, not rounded: bfloat16 partial sums are added in float32. Their own adds: addmm.dtype takes no float32 sum.
WIDE_PRODUCT: dict[Any, Any] = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}


def is_product_in_float32(node: Node) -> bool:
    """Whether a matmul has a form that does not round its bfloat16 result.

    None for float16: where `allow_fp16_accumulation` is set, cuBLAS has no such product.
    """
    value = tensor_of(node)
    return node.target in WIDE_PRODUCT and value.dtype is torch.bfloat16 and has_float32_products(value.device)


# Rows that users added, by op name: part of the compile cache's key.
registered: dict[str, str] = {}


def register_rule(op: Any, spec: str, is_matmul: bool = False) -> None:
    """Add a row for an op of your own: its tensor inputs and output in einsum terms, as `"mk,kn->mn"`.

    Along an axis of the output the op has to be computable slice by slice; axes that only inputs or only the output have are
    needed whole.
    With `is_matmul` a region may be built around it, as around a matmul. Raises ValueError for a spec that is none, or an
    op that has a row already.
    """
    op = getattr(op, "default", op)
    inputs, arrow, output = spec.replace(" ", "").partition("->")
    if not arrow or not all(part.isalpha() for part in (*inputs.split(","), output)):
        raise ValueError(f"expected axes as in 'mk,kn->mn', got {spec!r}")
    if op in RULES:
        raise ValueError(f"{op} has a separability rule already")
    axes, whole = einsum(f"{inputs}->{output}"), frozenset(output) - frozenset(inputs)
    RULES[op] = AxesRule(lambda node: replace(axes(node), sums=False, blocked=whole))
    registered[str(op)] = f"{spec} {is_matmul}"
    if is_matmul:
        MATMULS.add(op)


def rule_of(node: Node) -> Rule:
    """The row for a node. Raises NotSeparable where there is none."""
    if node.op != "call_function":
        what = "an input" if node.op == "placeholder" else f"a {node.op}"
        raise NotSeparable(f"{name_of(node)} is {what} of the graph: it is there whole")
    rule = RULES.get(node.target)
    if rule is not None:
        return rule
    if isinstance(node.target, torch._ops.OpOverload):
        tags = node.target.tags
        if (
            torch.Tag.pointwise in tags
            and torch.Tag.nondeterministic_seeded not in tags
            and not node.target._schema.is_mutable
        ):
            return _POINTWISE_RULE
    raise NotSeparable(f"no separability rule for {node.target} ({name_of(node)})")
