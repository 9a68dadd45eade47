"""Rows of the separability table for ops that pick items by tensors of indices.

    index      self [A, V, D], indices [None, i [..]]                   -> [A, .., D]
    index_put  self [A, V, D], indices [None, i [..]], values [A, .., D] -> [A, V, D]

Which items of V are meant depends on data, so V is needed whole. All other dims pass: A and D, and of `index` those of the
indices, too. A mask with one value to put is pointwise.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from .separability import Axes, Label, NotSeparable, Shape, argument, broadcast, name_of, shape_of, tensor_of
from .sizes import Size

_WHY = ": its indices depend on data"


def index(node: Node) -> Axes:
    source = argument(node, "self")
    indices, masks = _indices(node)
    if masks:
        raise NotSeparable(f"{name_of(node)} picks by a mask: how many items there are depends on data")
    before, after = _kept(source, indices)
    sizes = _joint_shape(indices)
    picked: tuple[Label, ...] = tuple(("index", dim) for dim in range(len(sizes)))
    operands = [(i, broadcast(shape_of(i), picked, sizes)) for i in indices.values()]
    return Axes(((source, _labels(source, indices)), *operands), (*before, *picked, *after), why=_WHY)


def index_put(node: Node) -> Axes:
    source, values = argument(node, "self"), argument(node, "values")
    indices, masks = _indices(node)
    if masks:
        return _fill(node, source, values, {**indices, **masks})
    before, after = _kept(source, indices)
    picked = _joint_shape(indices)
    size_of = dict(zip(_labels(source, indices), shape_of(source), strict=True))
    sizes = (*[size_of[label] for label in before], *picked, *[size_of[label] for label in after])
    put = broadcast(shape_of(values), (*before, *[None] * len(picked), *after), sizes)
    whole = [(i, (None,) * len(shape_of(i))) for i in indices.values()]
    kept = _labels(source, indices)
    return Axes(((source, kept), *whole, (values, put)), kept, why=_WHY)


def _fill(node: Node, source: Node, values: Node, masks: dict[int, Node]) -> Axes:
    """One value where a mask says so."""
    ((first, mask), *others) = masks.items()
    if others or any(size != 1 for size in shape_of(values)):
        raise NotSeparable(f"{name_of(node)} puts values in the order of a mask: where each goes depends on data")
    labels: tuple[Label, ...] = tuple(range(len(shape_of(source))))
    masked = labels[first : first + len(shape_of(mask))]
    return Axes(((source, labels), (mask, masked), (values, (None,) * len(shape_of(values)))), labels)


def _indices(node: Node) -> tuple[dict[int, Node], dict[int, Node]]:
    """By the dim of `self`: the indices that are numbers, and those that are masks."""
    given = {dim: i for dim, i in enumerate(argument(node, "indices")) if i is not None}
    masks = {dim: i for dim, i in given.items() if tensor_of(i).dtype in (torch.bool, torch.uint8)}
    return {dim: i for dim, i in given.items() if dim not in masks}, masks


def _labels(source: Node, indices: dict[int, Node]) -> tuple[Label, ...]:
    """Those of `self`: None where it is indexed."""
    return tuple(None if dim in indices else ("self", dim) for dim in range(len(shape_of(source))))


def _kept(source: Node, indices: dict[int, Node]) -> tuple[list[Label], list[Label]]:
    """The labels of `self` before and after the dims of the indices, which come first where they are not side by side."""
    dims, labels = sorted(indices), _labels(source, indices)
    first = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
    return list(labels[:first]), [label for label in labels[first:] if label is not None]


def _joint_shape(indices: dict[int, Node]) -> Shape:
    """The shape that all indices broadcast to."""
    shapes = [shape_of(i) for i in indices.values()]
    joint: list[Size] = [1] * max(map(len, shapes))
    for shape in shapes:
        for dim, size in enumerate(shape, len(joint) - len(shape)):
            if joint[dim] == 1:
                joint[dim] = size
    return tuple(joint)
