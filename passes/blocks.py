"""The blocks of a tensor along a dim, and copies of them, in whatever way a graph has them."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from .rules import aten
from .separability import shape_of
from .sizes import Size, as_size, quotient

_COPIES = (aten.clone.default, aten.alias.default, aten.copy.default)


def cat_dim(cat: Node) -> int:
    """The dim along which a cat joins."""
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim % len(shape_of(cat))


def blocks_of(whole: Node, dim: int, ranks: int) -> list[Node] | None:
    """The nodes that are the `ranks` equal blocks of `whole` along `dim`, in order, if the graph has all of them."""
    block = quotient(shape_of(whole)[dim], ranks)
    if block in (None, 0):
        return None
    found: dict[int, Node] = {}
    for user in whole.users:
        if user.target in (aten.split.Tensor, aten.split_with_sizes.default):
            for item in user.users:
                if item.target is operator.getitem and block_source(item) == (whole, dim):
                    found[item.args[1]] = item  # type: ignore[index]
        elif block_source(user) == (whole, dim):
            rank = quotient(block_start(user), block)
            if isinstance(rank, int):
                found[rank] = user
    blocks = [found.get(rank) for rank in range(ranks)]
    if any(node is None or shape_of(node)[dim] != block for node in blocks):
        return None
    return blocks  # type: ignore[return-value]


def block_source(node: Node) -> tuple[Node, int] | None:
    """The tensor and dim of which `node` is a block, for a getitem of a split and for a slice of step 1."""
    if node.target is operator.getitem:
        split = node.args[0]
        assert isinstance(split, Node)
        if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
            return None
        node, rest = split, split.args[2:] or (split.kwargs.get("dim", 0),)
    elif node.target is aten.slice.Tensor and len(node.args) < 5:
        rest = node.args[1:2] or (0,)
    else:
        return None
    whole, dim = node.args[0], rest[0]
    assert isinstance(whole, Node)
    assert isinstance(dim, int)
    return whole, dim % len(shape_of(whole))


def block_start(block: Node) -> Size:
    """Where a block, which has a `block_source`, starts in it."""
    if block.target is aten.slice.Tensor:
        return as_size(block.args[2] if len(block.args) > 2 else 0)
    split, index = block.args
    assert isinstance(split, Node)
    assert isinstance(index, int)
    sizes = split.args[1]
    before = sizes[:index] if isinstance(sizes, (list, tuple)) else [sizes] * index
    return as_size(sum(map(as_size, before)))


def through_copies(node: Node) -> list[Node]:
    """`node` and the copies that follow it, each the only reader of the one before."""
    chain = [node]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        if user.target not in _COPIES or _copied(user) is not chain[-1]:
            break
        chain.append(user)
    return chain


def back_through_copies(node: Node) -> list[Node]:
    """`node`, and what it is a copy of, up to what is none."""
    chain = [node]
    while chain[-1].target in _COPIES and isinstance(source := _copied(chain[-1]), Node):
        chain.append(source)
    return chain


def _copied(copy: Node) -> object:
    """What a copy reads; `aten.copy(destination, source)` names it second. A cast is no copy."""
    source = copy.args[1] if copy.target is aten.copy.default else copy.args[0]
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    same = source.meta["val"].dtype == copy.meta["val"].dtype and shape_of(source) == shape_of(copy)
    return source if same else None
