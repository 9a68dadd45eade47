"""Axes of products of tensors: matmuls, fp8 and grouped ones, and what their kernels ask of a slice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from .separability import (
    Axes,
    AxesRule,
    Cut,
    Label,
    NotSeparable,
    Slices,
    Split,
    argument,
    broadcast,
    name_of,
    row_size,
    shape_of,
    tensor_of,
    tensor_operands,
)
from .sizes import Size, product, quotient


def einsum(spec: str) -> Callable[[Node], Axes]:
    """A product of tensors: `spec` as for torch.einsum. An operand may broadcast (the bias of addmm)."""
    inputs, output = spec.split("->")

    def axes(node: Node) -> Axes:
        letters = inputs.split(",")
        operands = tensor_operands(node)
        sizes: dict[str, Size] = {}
        for operand, labels in zip(operands, letters, strict=False):
            shape = shape_of(operand)
            for letter, size in zip(labels[len(labels) - len(shape) :], shape, strict=True):
                if sizes.get(letter, 1) == 1:
                    sizes[letter] = size
        return Axes(
            tuple(
                (
                    operand,
                    broadcast(shape_of(operand), tuple(labels), tuple(sizes[letter] for letter in labels)),
                )
                for operand, labels in zip(operands, letters, strict=False)
            ),
            tuple(output),
            sums=True,
        )

    return axes


def linear(node: Node) -> Axes:
    """x [..., K] @ weight [N, K].T + bias [N]"""
    x, weight, *bias = tensor_operands(node)
    batch: tuple[Label, ...] = tuple(range(len(shape_of(x)) - 1))
    return Axes(((x, (*batch, "k")), (weight, ("n", "k")), *((b, ("n",)) for b in bias)), (*batch, "n"))


SCALED_COLUMNS = 16  # CUDA's _scaled_mm takes a multiple of so many output columns


@dataclass(frozen=True)
class CheckedRule(AxesRule):
    """The axes, and what an op's kernels ask of a slice beyond them: `check` raises NotSeparable."""

    check: Callable[[Node, Split, Slices], None]

    def from_inputs(self, node: Node, cuts: Mapping[Node, Cut], slices: Slices) -> Split:
        return self._checked(node, super().from_inputs(node, cuts, slices), slices)

    def from_output(self, node: Node, cut: Cut, slices: Slices) -> Split:
        return self._checked(node, super().from_output(node, cut, slices), slices)

    def _checked(self, node: Node, split: Split, slices: Slices) -> Split:
        self.check(node, split, slices)
        return split


def check_scaled(node: Node, split: Split, slices: Slices) -> None:
    """_scaled_mm: slices of columns are side by side, and a multiple of what CUDA takes."""
    cut, columns = split.output, shape_of(node)[1]
    if cut is None or cut.dim != 1:
        return
    if cut.outer != 1 or quotient(row_size(shape_of(node), cut, slices), SCALED_COLUMNS) is None:
        raise NotSeparable(
            f"{name_of(node)} takes a multiple of {SCALED_COLUMNS} columns, side by side in memory: "
            f"{columns} columns do not divide into {slices.count} such slices"
        )


def scaled_product(node: Node) -> Axes:
    """a [M, K] @ b [K, N] in 8 bits, with one scale each, or one a row of a [M, 1] and one a column of b [1, N].

    Block-wise scales belong to tiles, and may be laid out in swizzled order: a slice would have to know both.
    """
    a, b = argument(node, "self"), argument(node, "mat2")
    operands: list[tuple[Node, tuple[Label, ...]]] = [(a, ("m", "k")), (b, ("k", "n"))]
    rows, columns = shape_of(a)[0], shape_of(b)[1]
    for name, per_row, labels in (("scale_a", (rows, 1), ("m", None)), ("scale_b", (1, columns), (None, "n"))):
        scale = argument(node, name)
        shape = shape_of(scale)
        if all(size == 1 for size in shape):
            operands.append((scale, (None,) * len(shape)))
        elif shape == per_row:
            operands.append((scale, labels))
        else:
            raise NotSeparable(
                f"{name_of(node)} has block-wise scales ({name} is {list(shape)}): slices may not keep to its tiles"
            )
    if isinstance(bias := argument(node, "bias"), Node):
        operands.append((bias, ("n",)))
    if isinstance(scale := argument(node, "scale_result"), Node):
        operands.append((scale, (None,) * len(shape_of(scale))))
    return Axes(tuple(operands), ("m", "n"))


GROUPED_BYTES = 16  # _grouped_mm takes operands of which rows start at a multiple of so many bytes


def check_grouped(node: Node, split: Split, slices: Slices) -> None:
    """_grouped_mm: slices of columns start where its kernels can read."""
    if split.output is not None:
        columns = row_size(shape_of(node), split.output, slices)
        if quotient(product((columns, tensor_of(node).element_size())), GROUPED_BYTES) is None:
            raise NotSeparable(
                f"{name_of(node)}: slices in steps of {columns} columns start at no multiple of {GROUPED_BYTES} bytes"
            )


def grouped_product(node: Node) -> Axes:
    """tokens [T, K] in order of expert, weights [E, K, N], where each expert's tokens end [E] -> [T, N]

    Which tokens are whose depends on data, so that they are needed whole.
    """
    tokens, weights, *ends = tensor_operands(node)
    if len(ends) != 1 or (len(shape_of(tokens)), len(shape_of(weights))) != (2, 3):
        raise NotSeparable(f"{name_of(node)} is no product of one matrix with a group of matrices")
    return Axes(((tokens, (None, "k")), (weights, ("e", "k", "n")), (ends[0], ("e",))), (None, "n"))
