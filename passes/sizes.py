"""Sizes that may be symbolic, asked and computed without a guard.

A size is an int or a sympy expression of the symbols of torch's shape environment. Two questions are asked: are two sizes
equal, and does one divide another? The answer is "no" unless it is "yes" for every value of the symbols: nothing here looks at
the example that a graph was compiled with, so one compile serves all sizes.

What the program itself asks of a size is known, though: a reduce-scatter over 4 ranks has made torch guard on `s % 4 == 0`.
Such an `s` is read as `4 * (s // 4)`, and `s // 4` as any other whole number.

A rewritten graph needs sizes as nodes. All are computed from the graph's inputs, at its start (`SizeNodes`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from math import gcd, lcm, prod
from typing import Any, TypeAlias, Union

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph, Node

from ..torch_adapter import floor_division, known_divisible, size_hint, symbolic_expression

aten = torch.ops.aten

Size: TypeAlias = Union[int, "sympy.Expr"]


class UnknownSize(Exception):
    """A size cannot be computed from the inputs of a graph, or nothing is known of its value; the message says which."""


def as_size(value: Any) -> Size:
    """The size that an int, a SymInt, a node that yields one, or an expression stands for."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, torch.SymInt):
        divisible = known_divisible(value)
        value = symbolic_expression(value)
        if divisible and isinstance(value, sympy.Expr):
            return _in_multiples(value, frozenset(divisible))
    return _canonical(value) if isinstance(value, sympy.Expr) else value


@lru_cache(maxsize=4096)
def _in_multiples(size: sympy.Expr, divisible: frozenset[sympy.Expr]) -> Size:
    """A size with `4 * (s // 4)` for each symbol `s` of which a divisor is known."""
    divisors: dict[sympy.Symbol, int] = {}
    for remainder in divisible:
        value, modulus = remainder.args
        factor, rest = value.as_coeff_Mul()
        if rest.is_Symbol and factor.is_Integer and modulus.is_Integer:
            divisors[rest] = lcm(divisors.get(rest, 1), int(modulus) // gcd(int(factor), int(modulus)))
    return _canonical(size.xreplace({s: n * floor_division(s, n) for s, n in divisors.items()}))


@lru_cache(maxsize=4096)
def _canonical(size: Size) -> Size:
    expanded = sympy.expand(size)
    return int(expanded) if expanded.is_Integer else expanded


def stride_size(stride: Any) -> Size:
    """A stride, without the `Max(1, size)` in it: they say what it is in an empty tensor, where it does not matter."""
    size = as_size(stride)
    if isinstance(size, int):
        return size
    largest = (part for part in sympy.preorder_traversal(size) if part.func.__name__ == "Max" and len(part.args) == 2)
    return _canonical(size.xreplace({part: sum(part.args) - 1 for part in largest if 1 in part.args}))


def product(sizes: Iterable[Size]) -> Size:
    result = prod(sizes)
    return result if isinstance(result, int) else _canonical(result)


@lru_cache(maxsize=4096)
def quotient(size: Size, divisor: Size) -> Size | None:
    """`size / divisor` where that is a whole number for all values of the symbols, else None."""
    if divisor == 0:
        return None
    if isinstance(size, int) and isinstance(divisor, int):
        return None if size % divisor else size // divisor
    ratio = _canonical(sympy.cancel(sympy.sympify(size) / divisor))
    return ratio if isinstance(ratio, int) or ratio.is_integer else None


def floor_quotient(size: Size, divisor: int) -> Size:
    """`size // divisor`, for sizes of which nothing is known, too."""
    return size // divisor if isinstance(size, int) else _canonical(floor_division(size, divisor))


def at_least(size: Size, other: Size) -> bool:
    """Whether `size >= other` for all values of the symbols."""
    difference = as_size(size - other)
    return difference >= 0 if isinstance(difference, int) else bool(difference.is_nonnegative)


def hint(value: int | torch.SymInt, size: Size | None = None) -> int:
    """The size that the graph was compiled with, or that of a `size` with its symbols: for predictions, not for proofs.

    Raises UnknownSize if it depends on data.
    """
    if isinstance(value, int):
        return value
    known = size_hint(value, size)
    if known is None:
        raise UnknownSize(
            f"size {value if size is None else size} depends on data, so the gain of a rewrite is unknown"
        )
    return known


# How the functions that torch puts into sizes are computed by nodes; all else is a polynomial.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}


def _terms(size: sympy.Expr) -> tuple[Callable[..., Any], list[Size]]:
    """How a size is computed: a function of two arguments, and what it joins from left to right."""
    if size.is_Pow and size.exp.is_Integer and size.exp > 1:
        return operator.mul, [size.base] * int(size.exp)
    combine = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(size.func) or _FUNCTIONS.get(size.func.__name__)
    if combine is None or any(term.is_Rational and not term.is_Integer for term in size.args):
        raise UnknownSize(f"there is no rule to compute the size {size} in a graph")
    return combine, list(size.args)


class SizeNodes:
    """The nodes of a graph that yield its symbolic sizes. Those that are missing are added behind the inputs."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    # Not looked for before a symbolic size is asked for: most graphs have none.
    @cached_property
    def _inputs(self) -> list[Node]:
        return list(self._graph.find_nodes(op="placeholder"))

    @cached_property
    def _nodes(self) -> dict[Size, Node]:
        nodes: dict[Size, Node] = {}
        for node in (*self._inputs, *_sizes_behind(self._inputs[-1] if self._inputs else self._graph.output_node())):
            if isinstance(node.meta.get("val"), torch.SymInt):
                nodes.setdefault(_key(node), node)
        return nodes

    @cached_property
    def _last(self) -> Node:
        """The node behind which the next one is added."""
        last = self._inputs[-1] if self._inputs else self._graph.output_node()
        return [last, *_sizes_behind(last)][-1]

    def __getitem__(self, size: Size) -> int | Node:
        """A size as an argument of a node. Raises UnknownSize if it does not follow from the graph's inputs."""
        if isinstance(size := as_size(size), int):
            return size
        if size not in self._nodes:
            source = self._source(size)
            self._nodes[size] = self._expression(size) if source is None else self._part(*source)
        return self._nodes[size]

    def of(self, node: Node) -> int | Node:
        """The size that `node` yields, without `node`. Raises UnknownSize as above."""
        key = _key(node)
        return self._nodes[key] if key in self._nodes else self[as_size(node)]

    def check(self, sizes: Iterable[Size]) -> None:
        """Raise UnknownSize if some size, or a part of it, could not be computed."""
        for size in sizes:
            if not isinstance(size, int) and size not in self._nodes and self._source(size) is None:
                self.check(map(as_size, _terms(size)[1]))

    def _source(self, size: sympy.Expr) -> tuple[Node, int, int] | None:
        """For a symbol, or a quotient of one: an input, a dim if it is a tensor, and how many times `size` it is."""
        if not size.is_Symbol and size.func.__name__ != "FloorDiv":
            return None
        for node in self._inputs:
            value = node.meta.get("val")
            for dim, given in enumerate(value.shape if isinstance(value, torch.Tensor) else (value,)):
                if isinstance(given, torch.SymInt):
                    for read in (symbolic_expression(given), as_size(given)):
                        if isinstance(factor := quotient(_canonical(read), size), int):
                            return node, dim, factor
        if size.is_Symbol:
            raise UnknownSize(f"size {size} does not follow from the inputs of the graph")
        return None

    def _part(self, node: Node, dim: int, factor: int) -> Node:
        """An input, a size of an input, or an exact fraction of one of these."""
        whole = self._call(aten.sym_size.int, node, dim) if isinstance(node.meta["val"], torch.Tensor) else node
        return whole if factor == 1 else self._call(operator.floordiv, whole, factor)

    def _expression(self, size: sympy.Expr) -> Node:
        combine, terms = _terms(size)
        result, *rest = map(self.__getitem__, terms)
        for term in rest:
            result = self._call(combine, result, term)
        assert isinstance(result, Node)
        return result

    def _call(self, target: Callable[..., Any], *args: Any) -> Node:
        with self._graph.inserting_after(self._last):
            node = self._graph.call_function(target, args)
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
        node.meta["val"] = target(*values)
        self._last = node
        return node


def _key(node: Node) -> Size:
    """A size as `SizeNodes` finds it again.

    A known multiple that is not written as one, `s`, stands for itself. Its parts are computed from `s // 4`, so that for
    torch, too, they have equal sizes: of `s - 3 * (s // 4)` and `s // 4` it would have to ask, and guard.
    """
    size, written = as_size(node), _canonical(symbolic_expression(node.meta["val"]))
    return written if isinstance(written, int) or _is_bare(written, size) else size


def _is_bare(written: sympy.Expr, size: Size) -> bool:
    """Whether a symbol stands outside of the quotients of a size, and not in what the size is known to be."""
    quotients = {part: sympy.S.One for part in sympy.preorder_traversal(written) if part.func.__name__ == "FloorDiv"}
    return written != size and bool(written.xreplace(quotients).free_symbols)


def _sizes_behind(last_input: Node) -> Iterator[Node]:
    """The nodes that follow the inputs, as long as they yield sizes."""
    node = last_input.next
    while node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt):
        yield node
        node = node.next


def drop_unused_sizes(graph: Graph) -> None:
    """Take out size nodes that nothing reads: those of edits that were taken back."""
    inputs = graph.find_nodes(op="placeholder")
    for node in reversed(list(_sizes_behind(inputs[-1])) if inputs else []):
        if not node.users:
            graph.erase_node(node)


def sizes_from_inputs(graph: Graph) -> None:
    """Compute every size that is read off a tensor from the graph's inputs instead.

    So no size needs a tensor that a rewrite takes apart, such as the gathered one.
    """
    read_off = graph.find_nodes(op="call_function", target=aten.sym_size.int)
    nodes = SizeNodes(graph)
    for node in read_off:
        try:
            size = nodes.of(node)
        except UnknownSize:  # it depends on data
            continue
        if isinstance(size, Node) and size is not node:
            node.replace_all_uses_with(size)
            graph.erase_node(node)
