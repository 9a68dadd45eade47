"""Which tensors of a graph are one memory: a rewrite must not let two results share what they did not share before."""

from __future__ import annotations

import operator

from torch.fx import Node

from .rules import RESHAPES, VIEWS


def is_view(node: Node, *, of_reshapes: bool) -> bool:
    """Whether a node is its input's memory; `of_reshapes`: say so of a reshape, too, which may copy."""
    target = node.target
    return target is operator.getitem or (target in VIEWS and (of_reshapes or target not in RESHAPES))


def memory_of(node: Node, *, of_reshapes: bool) -> Node:
    """The node that made the memory in which a tensor lies."""
    while is_view(node, of_reshapes=of_reshapes):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def is_returned(node: Node) -> bool:
    """Whether its memory leaves the graph: the caller may write to it."""
    return any(user.op == "output" or (is_view(user, of_reshapes=True) and is_returned(user)) for user in node.users)
