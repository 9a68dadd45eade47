"""Scaled dot product attention, slice by slice: the rules, the causal slices, and what they cost.

Forward    softmax(query [B, H, L, E] @ key [B, H, S, E].mT + mask [B, H, L, S]) @ value [B, H, S, F] -> [B, H, L, F]
           separable along B, H and the query rows L; keys and values may have fewer heads
Backward   separable along B and H: gradients of keys and values are sums over the query rows

A slice of the query rows of a causal attention has to know where its rows stand. Rows [low, high) see no key behind the last of
their diagonals, so that slice reads the first keys only, and then

    flash on CUDA   aligns its mask to the lower right corner (torch/nn/attention/bias.py relies on it): nothing to say
    flash on CPU    aligns it to the upper left one, and takes a mask of its own: it gets one
    others          take neither: their causal form is separable along B and H only
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .separability import (
    Axes,
    AxesRule,
    Cut,
    Label,
    NotSeparable,
    Shape,
    Slices,
    Split,
    argument,
    bounds,
    example_shape,
    name_of,
    row_size,
    shape_of,
    tensor_of,
)
from .sizes import Size, as_size, at_least, quotient

aten = torch.ops.aten
prims = torch.ops.prims

FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
OVERRIDEABLE = aten._scaled_dot_product_fused_attention_overrideable.default

# Forward ops -> results that hold the state of the random numbers: the same for every slice, as there is no dropout.
RANDOM_STATE: dict[Any, frozenset[int]] = {
    FLASH: frozenset({6, 7}),
    FLASH_CPU: frozenset(),
    EFFICIENT: frozenset({2, 3}),
    CUDNN: frozenset({6, 7}),
    OVERRIDEABLE: frozenset({6, 7}),
}
BACKWARDS: frozenset[Any] = frozenset(
    (
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        aten._scaled_dot_product_fused_attention_overrideable_backward.default,
    )
)
EFFICIENT_ROWS = 32  # its logsumexp is padded to a multiple of so many rows

ROWS = 2  # the dim of the query rows


def _optional(node: Node, *names: str) -> Node | None:
    """The first of these arguments that the op has, if it is a tensor."""
    assert isinstance(node.target, torch._ops.OpOverload)
    known = {formal.name for formal in node.target._schema.arguments}
    value = next((argument(node, name) for name in names if name in known), None)
    return value if isinstance(value, Node) else None


def _sizes(node: Node, shape: Callable[[Node], Shape] = shape_of) -> Shape:
    """B, H, L, S, E, F"""
    batch, heads, rows, size = shape(argument(node, "query"))
    value = shape(argument(node, "value"))
    return batch, heads, rows, value[-2], size, value[-1]


def _operands(node: Node) -> list[tuple[Node, tuple[Label, ...]]]:
    batch, heads, rows, keys, _, _ = _sizes(node)
    if argument(node, "dropout_p"):
        raise NotSeparable(f"{name_of(node)} drops at random: slices would draw other numbers than the whole")
    key, value = argument(node, "key"), argument(node, "value")
    few: Label = "h" if shape_of(key)[1] != 1 or heads == 1 else None  # one head of keys serves all slices
    operands: list[tuple[Node, tuple[Label, ...]]] = [
        (argument(node, "query"), ("b", "h", "q", "e")),
        (key, ("b", few, "s", "e")),
        (value, ("b", few, "s", "f")),
    ]
    mask = _optional(node, "attn_mask", "attn_bias")
    if mask is not None:
        wanted: tuple[Label, ...] = ("b", "h", "q", "s")
        shape = shape_of(mask)
        full = (batch, heads, rows, keys)
        offset = 4 - len(shape)
        if any(size not in (1, full[offset + d]) for d, size in enumerate(shape)):
            raise NotSeparable(
                f"the sizes {list(shape)} of the mask of {name_of(node)} are not known to be 1 or {list(full)}"
            )
        labels = tuple(None if size == 1 else wanted[offset + d] for d, size in enumerate(shape))
        operands.append((mask, labels))
    return operands


def forward(node: Node) -> Axes:
    unknown = [name_of(user) for user in node.users if user.args[1] not in {0, 1, *RANDOM_STATE[node.target]}]
    if unknown:
        raise NotSeparable(f"{unknown[0]} is a result of {name_of(node)} that slices do not have")
    return Axes(tuple(_operands(node)), ("b", "h", "q", "f"), frozenset("f"))


def backward(node: Node) -> Axes:
    if _asks_for_gradient_of_bias(node):
        raise NotSeparable(f"{name_of(node)} yields the gradient of a bias, which is a sum over slices")
    grad, out, logsumexp = (
        next(node.args[i] for i, formal in enumerate(node.target._schema.arguments) if formal.name in names)  # type: ignore[union-attr]
        for names in (("grad_out", "grad_out_"), ("out",), ("logsumexp",))
    )
    operands = _operands(node)
    for operand in (grad, out, logsumexp):
        assert isinstance(operand, Node)
        operands.append((operand, ("b", "h", *[None] * (len(shape_of(operand)) - 2))))
    return Axes(tuple(operands), ("b", "h", None, None))


def _asks_for_gradient_of_bias(node: Node) -> bool:
    assert isinstance(node.target, torch._ops.OpOverload)
    if all(formal.name != "grad_input_mask" for formal in node.target._schema.arguments):
        return False
    return bool(argument(node, "grad_input_mask")[3]) and _optional(node, "attn_bias") is not None


@dataclass(frozen=True)
class AttentionRule(AxesRule):
    """The axes, and what a cut of the query rows asks for beyond them."""

    def from_inputs(self, node: Node, cuts: Mapping[Node, Cut], slices: Slices) -> Split:
        return _checked(node, super().from_inputs(node, cuts, slices), slices)

    def from_output(self, node: Node, cut: Cut, slices: Slices) -> Split:
        return _checked(node, super().from_output(node, cut, slices), slices)


def _checked(node: Node, split: Split, slices: Slices) -> Split:
    """Raises NotSeparable where the slices along the query rows would not be those of the whole."""
    cut = split.output
    if cut is None or cut.dim != ROWS or node.target in BACKWARDS:
        return split
    _, _, rows, keys, _, _ = _sizes(node)
    if argument(node, "is_causal"):
        if node.target not in SLICED_CALLS:
            raise NotSeparable(
                f"{name_of(node)} is causal, and {node.target} cannot be told where a slice of its rows stands"
            )
        if cut.outer != 1:
            raise NotSeparable(f"{name_of(node)} is causal, and a slice of its rows is not contiguous")
        static = isinstance(rows, int) and isinstance(keys, int)
        if (node.target is FLASH or not static) and not at_least(keys, rows):
            raise NotSeparable(
                f"{name_of(node)} is causal, with {rows} rows and {keys} keys: with more rows than keys some see no key"
            )
    if node.target is EFFICIENT and argument(node, "compute_log_sumexp"):
        size = row_size((rows,), Cut(0, cut.outer), slices)
        if cut.outer != 1 or quotient(size, EFFICIENT_ROWS) is None:
            raise NotSeparable(
                f"{name_of(node)} pads its logsumexp to a multiple of {EFFICIENT_ROWS} rows, and a slice has a multiple of {size}"
            )
    return split


Emit = Callable[[str, Any, tuple[Any, ...], dict[str, Any]], Node]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def _first_keys(count: Size, args: tuple[Any, ...], emit: Emit) -> tuple[Node, Node]:
    """The first `count` keys and values."""

    def first(name: str, node: Node) -> Node:
        return node if shape_of(node)[-2] == count else emit(name, aten.slice.Tensor, (node, 2, 0, count), {})

    return first("keys", args[1]), first("values", args[2])


def _causal_flash(node: Node, high: Size, args: tuple[Any, ...], kwargs: dict[str, Any], emit: Emit) -> Call:
    _, _, rows, keys, _, _ = _sizes(node)
    return (args[0], *_first_keys(as_size(high + keys - rows), args, emit), *args[3:]), kwargs


def _causal_flash_cpu(node: Node, high: Size, args: tuple[Any, ...], kwargs: dict[str, Any], emit: Emit) -> Call:
    rows, keys = shape_of(args[0])[ROWS], _sizes(node)[3]
    seen = high if at_least(keys, high) else keys
    query = tensor_of(node)
    integers = {"dtype": torch.int64, "device": query.device, "requires_grad": False}
    number = {"dtype": query.dtype, "device": query.device}
    row = emit("rows", prims.iota.default, (rows,), {"start": as_size(high - rows), "step": 1, **integers})
    row = emit("rows", aten.unsqueeze.default, (row, 1), {})
    column = emit("columns", prims.iota.default, (seen,), {"start": 0, "step": 1, **integers})
    hidden = emit("hidden", aten.gt.Tensor, (column, row), {})
    minus_infinity = emit("minus_infinity", aten.full.default, ([], float("-inf")), number)
    zero = emit("zero", aten.full.default, ([], 0.0), number)
    mask = emit("mask", aten.where.self, (hidden, minus_infinity, zero), {})
    return (args[0], *_first_keys(seen, args, emit), args[3], False), {**kwargs, "attn_mask": mask}


SLICED_CALLS: dict[Any, Callable[[Node, Size, tuple[Any, ...], dict[str, Any], Emit], Call]] = {
    FLASH: _causal_flash,
    FLASH_CPU: _causal_flash_cpu,
}


def sliced_call(
    node: Node,
    cut: Cut | None,
    slices: Slices,
    index: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    emit: Emit,
) -> Call:
    """The arguments for slice `index`, given those that are cut already; `emit` adds a node in front of it."""
    if node.target not in SLICED_CALLS or cut is None or cut.dim != ROWS or not argument(node, "is_causal"):
        return args, kwargs
    _, stop = bounds(shape_of(node), cut, slices, index)
    return SLICED_CALLS[node.target](node, stop, args, kwargs, emit)


def product_sizes(node: Node) -> tuple[int, int, int, int]:
    """batch, m, k, n of one matmul with as many FLOP, the scores being its result: two matmuls forward, five backward.

    A causal attention has half of them; its slices are not equal, and this is their mean.
    """
    batch, heads, rows, keys, size, value_size = map(int, _sizes(node, example_shape))
    width = 3 * size + 2 * value_size if node.target in BACKWARDS else size + value_size
    return batch * heads, rows, width, max(1, keys // 2) if argument(node, "is_causal") else keys
