"""Along which tensor dim can a node be computed slice by slice? The question, and the algebra that answers it.

A tensor is *cut* along one dim (`Cut`) into the slices of all ranks (`Slices`). A rule says for one node how a cut
travels: from its inputs to its output, or from its output back to its inputs. `passes/rules.py` has a row for each op;
nearly every row names the axes of its operands as an einsum does (`Axes`), and the rest of the answer follows from that:
cut along an axis of the output, and every operand that has this axis must be cut along it; cut along an axis that the
output does not have, and the output is a sum over the slices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol, TypeAlias

import torch
from torch.fx import Node

from .sizes import Size, UnknownSize, as_size, floor_quotient, hint, product, quotient, stride_size

Shape: TypeAlias = tuple[Size, ...]

SIXTEEN_BIT = (torch.float16, torch.bfloat16)  # sums of these are rounded no more often than the plain graph does


class NotSeparable(Exception):
    """A node cannot be computed slice by slice along the asked dim; the message is the reason, for the records."""


@dataclass(frozen=True)
class Slices:
    """How many slices there are, and how long they are: each rank's share has `rows`, cut in `per_rank` slices of whole rows.

    Slice j is part `p = j % per_rank` of the share of rank `j // per_rank`: its rows from `rows * p // per_rank` up to
    `rows * (p + 1) // per_rank`. So they differ by one row at most, and a symbolic number of rows is cut without a guard.
    What a row is differs from tensor to tensor of a region. Where slices are equal, a slice is a row.

    Shards that are not equal leave no more than `kept` rows for all ranks together: the shares of the last ranks are shorter
    by what is missing, or empty. There all sizes are numbers.
    """

    ranks: int
    per_rank: int = 1
    rows: Size = 1
    kept: int | None = None

    @classmethod
    def of(cls, share: Size, ranks: int, per_rank: int) -> Slices:
        """Equal ones where `per_rank` divides the share of a rank."""
        return cls(ranks, per_rank, share if quotient(share, per_rank) is None else per_rank)

    @classmethod
    def of_uneven(cls, share: int, size: int, ranks: int, per_rank: int) -> Slices:
        """Of shares that end at `size`. Rows are as coarse as both and `per_rank` slices of a share allow."""
        row = gcd(share, size)
        row = row if share // row % per_rank == 0 else 1
        return cls(ranks, per_rank, share // row, size // row)

    @property
    def count(self) -> int:
        return self.ranks * self.per_rank

    @property
    def numbers(self) -> Sequence[int]:
        """Of the slices, in their order."""
        return range(self.count)

    @property
    def are_rows(self) -> bool:
        """Whether no slice is longer than another one, but for those that are short because rows are missing."""
        return self.rows == self.per_rank

    @property
    def are_equal(self) -> bool:
        return self.are_rows and self.kept is None

    @property
    def all_rows(self) -> Size:
        """Rows of all ranks together."""
        return product((self.ranks, self.rows)) if self.kept is None else self.kept

    def bounds(self, index: int, row: Size) -> tuple[Size, Size]:
        """Where a slice starts and ends, along a dim in which a row has size `row`."""
        rank, part = divmod(index, self.per_rank)
        before = product((self.rows, rank))
        low, high = (before + floor_quotient(product((self.rows, p)), self.per_rank) for p in (part, part + 1))
        if self.kept is not None:
            low, high = min(low, self.kept), min(high, self.kept)
        return product((row, low)), product((row, high))

    def fewest_rows(self) -> Size:
        """Rows of the shortest slice."""
        return floor_quotient(self.rows, self.per_rank)


@dataclass(frozen=True)
class Spans(Slices):
    """Neighbouring slices taken together, up to each of the `ends`; such a span goes by the number of its first slice."""

    ends: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        return (0, *self.ends[:-1])

    @property
    def are_equal(self) -> bool:
        return False

    def bounds(self, index: int, row: Size) -> tuple[Size, Size]:
        last = min(end for end in self.ends if end > index) - 1
        return super().bounds(index, row)[0], super().bounds(last, row)[1]


@dataclass(frozen=True)
class Cut:
    """A tensor cut along `dim` into slices.

    The dim is read as `[outer, size / outer]`, and the last axis is cut: `outer` is 1 for a plain cut, and the batch size
    where a cut sequence dim was flattened together with the batch dim before it.
    """

    dim: int
    outer: Size = 1


@dataclass(frozen=True)
class Split:
    """How one node runs slice by slice: which inputs are cut (all others are used whole), and what comes out.

    `output` is None where each slice yields a partial sum of the whole output.
    """

    inputs: Mapping[Node, Cut]
    output: Cut | None


class Rule(Protocol):
    """How a cut travels through one node. Both directions raise NotSeparable with a reason."""

    def from_inputs(self, node: Node, cuts: Mapping[Node, Cut], slices: Slices) -> Split:
        """Some inputs are cut; the answer says how all inputs and the output are."""

    def from_output(self, node: Node, cut: Cut, slices: Slices) -> Split:
        """The output is to be cut; the answer says how the inputs have to be."""


def name_of(node: Node) -> str:
    """The name that a reason gives a node: for one that a rewrite made, that of the node it was made from."""
    place = node.meta.get("fo")
    return node.name if place is None else str(place.origin)


def argument(node: Node, name: str) -> Any:
    """The value that a node passes for the schema argument `name`, or its default."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for index, formal in enumerate(node.target._schema.arguments):
        if formal.name == name:
            if index < len(node.args) and not formal.kwarg_only:
                return node.args[index]
            return node.kwargs.get(name, formal.default_value)
    raise KeyError(name)


def tensor_operands(node: Node) -> list[Node]:
    """The tensor inputs of a node, each as often as it is used."""
    operands: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), operands.append)
    return [o for o in operands if isinstance(o.meta.get("val"), (torch.Tensor, tuple, list))]


def tensor_of(node: Node) -> torch.Tensor:
    """The fake tensor of a node that yields one tensor, or the first one of a node that yields several."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise NotSeparable(f"{name_of(node)} is not a tensor")
    return value


def shape_of(node: Node) -> Shape:
    """The sizes of a node's tensor; symbolic ones as expressions, which add no guard when they are compared."""
    return tuple(map(as_size, tensor_of(node).shape))


def strides_that_matter(tensor: torch.Tensor) -> tuple[Size | None, ...]:
    """Strides, without those of dims of size 1 and of empty tensors: nothing depends on them."""
    sizes = tuple(map(as_size, tensor.shape))
    return tuple(
        None if 0 in sizes or size == 1 else stride_size(stride)
        for size, stride in zip(sizes, tensor.stride(), strict=True)
    )


def example_shape(node: Node) -> tuple[int, ...]:
    """The sizes that a graph was compiled with, for predictions. Raises NotSeparable where they depend on data."""
    try:
        return tuple(map(hint, tensor_of(node).shape))
    except UnknownSize as error:
        raise NotSeparable(f"{name_of(node)}: {error}") from error


def example_size(size: Size, node: Node) -> int:
    """A size that follows from the symbolic ones of a node's tensor, as `example_shape`. Raises NotSeparable."""
    symbolic = next(s for s in tensor_of(node).shape if isinstance(s, torch.SymInt))
    try:
        return hint(symbolic, size)
    except UnknownSize as error:
        raise NotSeparable(f"{name_of(node)}: {error}") from error


def is_contiguous(tensor: torch.Tensor, order: Sequence[int] | None = None) -> bool:
    """Whether a tensor is contiguous, or would be with its dims in `order`; no guard is added."""
    order = range(tensor.dim()) if order is None else order
    strides, sizes = strides_that_matter(tensor), tuple(map(as_size, tensor.shape))
    return all(
        strides[dim] in (None, product(sizes[inner] for inner in order[place + 1 :])) for place, dim in enumerate(order)
    )


def dense_order(tensor: torch.Tensor) -> list[int] | None:
    """The dims of a permuted contiguous tensor from the outermost to the innermost; None for one that is not dense."""
    try:
        order = sorted(range(tensor.dim()), key=lambda dim: (-hint(tensor.stride()[dim]), dim))
    except UnknownSize:
        order = list(range(tensor.dim()))
    return order if is_contiguous(tensor, order) else None


def divides_by_ranks(shape: Shape, dims: Sequence[int], ranks: int) -> list[int]:
    """Those of `dims` whose size is a multiple of the number of ranks, and not 0. Raises NotSeparable where none is."""
    found = [dim for dim in dims if shape[dim] != 0 and quotient(shape[dim], ranks) is not None]
    if found:
        return found
    which = f"dim {dims[0]}" if len(dims) == 1 else "no dim"
    unknown = next((shape[dim] for dim in dims if not isinstance(shape[dim], int)), None)
    if unknown is None:
        does_not = "does not divide" if len(dims) == 1 else "divides"
        raise NotSeparable(f"{which} of {list(shape)} {does_not} by the {ranks} ranks of the group")
    is_not = "is not known to divide" if len(dims) == 1 else "is known to divide"
    raise NotSeparable(
        f"{which} of {list(shape)} {is_not} by the {ranks} ranks of the group: where the size {unknown} does, say so in the "
        f"model with torch._check(size % {ranks} == 0)"
    )


def row_size(shape: Shape, cut: Cut, slices: Slices) -> Size:
    """Size of a row along the cut dim: a slice starts and ends at a multiple. Raises NotSeparable where there is none."""
    size = shape[cut.dim]
    row = quotient(size, product((cut.outer, slices.all_rows)))
    if size == 0:
        raise NotSeparable(f"dim {cut.dim} of {list(shape)} is empty: there is nothing to slice")
    if row is None:
        does_not = "does not divide" if isinstance(size, int) else "does not divide, for each of its values,"
        what = f"{slices.count} equal slices" if slices.are_equal else f"{slices.ranks} times {slices.rows} rows"
        what = (
            what if slices.kept is None else f"{slices.kept} rows, {slices.rows} for each rank that has all of its own"
        )
        raise NotSeparable(f"size {size} of dim {cut.dim} {does_not} into {what}")
    return row


def bounds(shape: Shape, cut: Cut, slices: Slices, index: int) -> tuple[Size, Size]:
    """Where a slice starts and ends along the cut dim, in each of the `outer` repetitions."""
    return slices.bounds(index, row_size(shape, cut, slices))


def local_shape(shape: Shape, cut: Cut, slices: Slices, index: int) -> list[Size]:
    """The shape of one slice of a tensor of `shape`."""
    start, stop = bounds(shape, cut, slices, index)
    size = product((stop - start, cut.outer))
    return [size if dim == cut.dim else other for dim, other in enumerate(shape)]


Label = Hashable | None  # None: a dim of size 1 that is broadcast, or one that no operand shares


def broadcast(shape: Shape, labels: tuple[Label, ...], sizes: Shape) -> tuple[Label, ...]:
    """Labels of an operand of `shape` that broadcasts to `sizes`, whose dims are `labels`: aligned from the right."""
    found: list[Label] = []
    for size, label, wanted in zip(
        shape, labels[len(labels) - len(shape) :], sizes[len(sizes) - len(shape) :], strict=True
    ):
        if size not in (1, wanted):
            raise NotSeparable(f"sizes {size} and {wanted} are not known to be equal, nor the first to be 1")
        found.append(None if size == 1 else label)
    return tuple(found)


@dataclass(frozen=True)
class Axes:
    """The axes of a node, in einsum terms: a label for each dim of each tensor input, and of the output.

    `blocked` are labels along which the op is not separable (the dim of a softmax), and `why` is said of them. `sums`
    says that an axis that the output lacks may be cut, each slice yielding a partial sum.
    """

    operands: tuple[tuple[Node, tuple[Label, ...]], ...]
    output: tuple[Label, ...]
    blocked: frozenset[Label] = frozenset()
    sums: bool = False
    why: str = ""

    def split(self, node: Node, label: Label, outer: Size, slices: Slices) -> Split:
        """Cut along one axis."""
        if label is None or label in self.blocked:
            raise NotSeparable(f"{name_of(node)} ({node.target}) needs this dim whole{self.why}")
        inputs: dict[Node, Cut] = {}
        for operand, labels in self.operands:
            if label not in labels:
                if operand in inputs:
                    raise NotSeparable(f"{name_of(node)} uses {name_of(operand)} both cut and whole")
                continue
            cut = Cut(labels.index(label), outer)
            if inputs.setdefault(operand, cut) != cut or labels.count(label) > 1:
                raise NotSeparable(f"{name_of(node)} uses {name_of(operand)} along two dims at once")
            row_size(shape_of(operand), cut, slices)
        if any(operand in inputs and label not in labels for operand, labels in self.operands):
            raise NotSeparable(f"{name_of(node)} uses the same tensor both cut and whole")
        if label in self.output:
            return Split(inputs, Cut(self.output.index(label), outer))
        if not self.sums:
            raise NotSeparable(f"{name_of(node)} ({node.target}) reduces over this dim")
        return Split(inputs, None)


@dataclass(frozen=True)
class AxesRule:
    """A rule that follows from the node's axes alone."""

    axes: Callable[[Node], Axes]

    def from_inputs(self, node: Node, cuts: Mapping[Node, Cut], slices: Slices) -> Split:
        axes = self.axes(node)
        wanted: set[tuple[Label, Size]] = set()
        for operand, labels in axes.operands:
            if operand in cuts:
                wanted.add((labels[cuts[operand].dim], cuts[operand].outer))
        if len(wanted) != 1:
            raise NotSeparable(f"{name_of(node)} would have to be cut along two dims at once")
        label, outer = wanted.pop()
        split = axes.split(node, label, outer, slices)
        if any(split.inputs.get(operand) != cut for operand, cut in cuts.items()):
            raise NotSeparable(f"{name_of(node)} would have to be cut along two dims at once")
        return split

    def from_output(self, node: Node, cut: Cut, slices: Slices) -> Split:
        axes = self.axes(node)
        return axes.split(node, axes.output[cut.dim], cut.outer, slices)


class ReshapeRule:
    """View, reshape, flatten: a slice stays a slice if no dim boundary of the other shape falls inside it."""

    def from_inputs(self, node: Node, cuts: Mapping[Node, Cut], slices: Slices) -> Split:
        ((source, cut),) = cuts.items()
        return Split({source: cut}, reshaped_cut(node, shape_of(source), shape_of(node), cut, slices))

    def from_output(self, node: Node, cut: Cut, slices: Slices) -> Split:
        source = node.args[0]
        assert isinstance(source, Node)
        return Split({source: reshaped_cut(node, shape_of(node), shape_of(source), cut, slices)}, cut)


def reshaped_cut(node: Node, source: Shape, target: Shape, cut: Cut, slices: Slices) -> Cut:
    """Where a cut of shape `source` lies in shape `target` with the same elements in the same order.

    In flat order a cut repeats a pattern: the rows of all ranks, of `row` elements each. It is a cut of target dim d iff a
    row is a whole number of that dim's items and the dim is a whole number of patterns. At most one dim is.
    """
    if 0 in target:
        raise NotSeparable(f"{name_of(node)} of shape {list(target)} is empty")
    row = product((row_size(source, cut, slices), *source[cut.dim + 1 :]))
    pattern = product((slices.all_rows, row))
    for dim in range(len(target)):
        outer = quotient(product(target[dim:]), pattern)
        if outer is not None and quotient(row, product(target[dim + 1 :])) is not None:
            return Cut(dim, outer)
    raise NotSeparable(
        f"{name_of(node)} reshapes {list(source)} to {list(target)}, which puts elements of several slices into one item"
    )
