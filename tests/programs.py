"""Random separable programs, drawn by hypothesis: FX graphs around a collective, op by op from the rule table."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass
class Program:
    """A graph under construction: nodes carry fake tensors, inputs are remembered so that real ones can be made."""

    ranks: int
    dtype: torch.dtype
    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    inputs: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    leaves: list[fx.Node] = field(default_factory=list)

    def input(self, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
        dtype = dtype or self.dtype
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        with self.graph.inserting_after(last) if last else nullcontext():
            node = self.graph.placeholder(f"in{len(self.inputs)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        self.inputs.append((shape, dtype))
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def finish(self, outputs: list[fx.Node]) -> Program:
        self.graph.output(tuple(dict.fromkeys(outputs)))
        self.graph.eliminate_dead_code()
        return self

    @property
    def module(self) -> fx.GraphModule:
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def make_inputs(self, seed: int) -> list[list[Tensor]]:
        """Other values on every rank."""
        generator = torch.Generator().manual_seed(seed)
        return [
            [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape, dtype in self.inputs]
            for _ in range(self.ranks)
        ]


def shape(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)


def all_gather(p: Program, x: fx.Node, dim: int, group: str = "0", ranks: int | None = None) -> fx.Node:
    ranks = ranks or p.ranks
    gathered = p.call(c10d.all_gather_into_tensor.default, x, ranks, group)
    gathered = p.call(c10d.wait_tensor.default, gathered)
    if dim == 0:
        return gathered
    chunks = p.call(aten.split.Tensor, gathered, shape(x)[0])
    return p.call(aten.cat.default, [p.call(operator.getitem, chunks, rank) for rank in range(ranks)], dim)


def reduce_scatter(
    p: Program, x: fx.Node, dim: int, op: str = "sum", group: str = "0", ranks: int | None = None
) -> fx.Node:
    ranks = ranks or p.ranks
    if dim != 0:
        chunks = p.call(aten.split.Tensor, x, shape(x)[dim] // ranks, dim)
        x = p.call(aten.cat.default, [p.call(operator.getitem, chunks, rank) for rank in range(ranks)])
    elif not x.meta["val"].is_contiguous():
        x = p.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    scattered = p.call(c10d.reduce_scatter_tensor.default, x, op, ranks, group)
    return p.call(c10d.wait_tensor.default, scattered)


def flat(p: Program, x: fx.Node) -> fx.Node:
    """x as a matrix: the last dim, and all others."""
    sizes = shape(x)
    return p.call(aten.reshape.default, x, [prod(sizes[:-1]), sizes[-1]])


# --- steps: x -> x, of any separability -------------------------------------------------------------------------------


def _unary(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    op = draw(st.sampled_from([aten.relu.default, aten.tanh.default, aten.neg.default, aten.sigmoid.default]))
    return p.call(op, x)


def _scalar(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    return p.call(aten.mul.Tensor, x, 0.5)


def _binary(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    op = draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor]))
    sizes = shape(x)
    kept = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    other = [size if keep else 1 for size, keep in zip(sizes, kept, strict=True)]
    drop = draw(st.integers(0, len(sizes)))
    other = other[drop:] if all(s == 1 for s in other[:drop]) else other
    operands = (x, p.input(*other)) if draw(st.booleans()) else (p.input(*other), x)
    return p.call(op, *operands)


def _with_itself(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    return p.call(aten.where.self, p.call(aten.gt.Scalar, x, 0.0), x, p.call(aten.mul.Tensor, x, x))


def _clone(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    return p.call(draw(st.sampled_from([aten.clone.default, aten.alias.default])), x)


def _cast(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    wide = p.call(prims.convert_element_type.default, x, torch.float64)
    return p.call(prims.convert_element_type.default, wide, p.dtype)


def _permute(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    return p.call(aten.permute.default, x, draw(st.permutations(range(len(shape(x))))))


def _transpose(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    return p.call(aten.transpose.int, x, 0, -1) if len(shape(x)) > 1 else x


def _merge(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    sizes = shape(x)
    if len(sizes) < 2:
        return x
    dim = draw(st.integers(0, len(sizes) - 2))
    return p.call(aten.reshape.default, x, [*sizes[:dim], sizes[dim] * sizes[dim + 1], *sizes[dim + 2 :]])


def _divide(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    sizes = shape(x)
    dim = draw(st.integers(0, len(sizes) - 1))
    factors = [f for f in range(1, sizes[dim] + 1) if sizes[dim] % f == 0]
    first = draw(st.sampled_from(factors))
    if len(sizes) >= 5:
        return x
    return p.call(aten.reshape.default, x, [*sizes[:dim], first, sizes[dim] // first, *sizes[dim + 1 :]])


def _unsqueeze(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    dim = draw(st.integers(-len(shape(x)) - 1, len(shape(x))))
    return p.call(aten.unsqueeze.default, x, dim) if len(shape(x)) < 5 else x


def _squeeze(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    ones = [dim for dim, size in enumerate(shape(x)) if size == 1]
    if not ones or len(shape(x)) < 3:
        return x
    return p.call(aten.squeeze.dims, x, [draw(st.sampled_from(ones))])


def _expand(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    return p.call(aten.expand.default, x, [2 if size == 1 else size for size in shape(x)])


def _slice(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    dim = draw(st.integers(0, len(shape(x)) - 1))
    end = draw(st.integers(1, shape(x)[dim]))
    return p.call(aten.slice.Tensor, x, dim, 0, end)


def _split(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    dim = draw(st.integers(0, len(shape(x)) - 1))
    size = shape(x)[dim]
    if size % 2:
        return x
    pieces = p.call(aten.split.Tensor, x, size // 2, dim)
    return p.call(aten.add.Tensor, p.call(operator.getitem, pieces, 0), p.call(operator.getitem, pieces, 1))


def _select(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    if len(shape(x)) < 3:
        return x
    return p.call(aten.select.int, x, draw(st.integers(0, len(shape(x)) - 1)), 0)


def _cat(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    return p.call(aten.cat.default, [x, p.input(*shape(x))], draw(st.integers(0, len(shape(x)) - 1)))


def _pad(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    return p.call(aten.constant_pad_nd.default, x, [1, 0], 0.0)


def _reduce(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    if len(shape(x)) < 3:
        return x
    dim = draw(st.integers(0, len(shape(x)) - 1))
    op = draw(st.sampled_from([aten.sum.dim_IntList, aten.mean.dim, aten.amax.default]))
    return p.call(op, x, [dim], draw(st.booleans()))


def _variance(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    pair = p.call(aten.var_mean.correction, x, [-1], correction=0, keepdim=True)
    return p.call(aten.sub.Tensor, x, p.call(operator.getitem, pair, 1))


def _along(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    dim = draw(st.integers(-len(shape(x)), len(shape(x)) - 1))
    op, *rest = draw(
        st.sampled_from([(aten._softmax.default, False), (aten.cumsum.default,), (aten._log_softmax.default, False)])
    )
    return p.call(op, x, dim, *rest)


def _flip(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    return p.call(aten.flip.default, x, [draw(st.integers(0, len(shape(x)) - 1))])


def _layer_norm(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    last = shape(x)[-1]
    result = p.call(aten.native_layer_norm.default, x, [last], p.input(last), p.input(last), 1e-3)
    return p.call(operator.getitem, result, 0)


STEPS = [
    _unary, _scalar, _binary, _with_itself, _clone, _cast, _permute, _transpose, _merge, _divide, _unsqueeze, _squeeze,
    _expand, _slice, _split, _select, _cat, _pad, _reduce, _variance, _along, _flip, _layer_norm,
]  # fmt: skip
# Those that nearly always keep a cut: drawn more often, so that most programs have a region.
GENTLE = [_unary, _scalar, _binary, _cast, _clone, _permute, _merge, _unsqueeze]


def steps(p: Program, draw: Draw, x: fx.Node, at_most: int) -> fx.Node:
    for _ in range(draw(st.integers(0, at_most))):
        step = draw(st.sampled_from(GENTLE if draw(st.integers(0, 3)) else STEPS))
        if prod(shape(x)) <= 4096:
            x = step(p, draw, x)
        if draw(st.integers(0, 5)) == 0:
            p.leaves.append(x)
    return x


# --- matmuls ----------------------------------------------------------------------------------------------------------


def matmul(p: Program, draw: Draw, x: fx.Node) -> fx.Node:
    """A product with x as its first or second factor; any of its dims may turn out to be contracted."""
    width = draw(st.integers(1, 3)) * draw(st.sampled_from([1, p.ranks]))
    kind = draw(st.sampled_from(["mm", "mm right", "addmm", "addmm matrix", "linear", "bmm", "bmm right", "baddbmm"]))
    if "bmm" in kind and len(shape(x)) == 3:
        b, m, k = shape(x)
        if kind == "bmm right":
            return p.call(aten.bmm.default, p.input(b, width, m), x)
        weight = p.input(b, k, width)
        if kind == "bmm":
            return p.call(aten.bmm.default, x, weight)
        return p.call(aten.baddbmm.default, p.input(b, m, width), x, weight)
    if kind == "linear" and len(shape(x)) > 1:
        return p.call(aten.linear.default, x, p.input(width, shape(x)[-1]), p.input(width))
    matrix = flat(p, x)
    m, k = shape(matrix)
    if kind == "mm right":
        return p.call(aten.mm.default, p.input(width, m), matrix)
    weight = p.input(k, width)
    if kind == "addmm":
        return p.call(aten.addmm.default, p.input(width), matrix, weight, beta=0.5, alpha=2.0)
    if kind == "addmm matrix":
        return p.call(aten.addmm.default, p.input(m, width), matrix, weight)
    product = p.call(aten.mm.default, matrix, weight)
    return p.call(aten.reshape.default, product, [*shape(x)[:-1], width])


# --- programs ---------------------------------------------------------------------------------------------------------


@st.composite
def gather_programs(draw: Draw, ranks: st.SearchStrategy[int], dtypes: list[torch.dtype]) -> Program:
    """all-gather along any dim -> steps -> some consumers, most of them matmuls."""
    p = Program(draw(ranks), draw(st.sampled_from(dtypes)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    dim = draw(st.integers(0, len(sizes) - 1))
    x = steps(p, draw, all_gather(p, p.input(*sizes), dim), 3)
    outputs = []
    for _ in range(draw(st.integers(1, 3))):
        outputs.append(steps(p, draw, matmul(p, draw, steps(p, draw, x, 2)), 2))
    if draw(st.booleans()):
        outputs.append(p.call(aten.cumsum.default, x, 0))
    return p.finish([*outputs, *p.leaves])


def all_reduce(p: Program, x: fx.Node, op: str = "sum", group: str = "0") -> fx.Node:
    return p.call(c10d.wait_tensor.default, p.call(c10d.all_reduce.default, x, op, group))


@st.composite
def scatter_programs(draw: Draw, ranks: st.SearchStrategy[int], dtypes: list[torch.dtype]) -> Program:
    """matmul (or a sum of two) -> steps -> reduce-scatter along any dim that divides, or all-reduce."""
    p = Program(draw(ranks), draw(st.sampled_from(dtypes)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    dim = draw(st.integers(0, len(sizes) - 1))
    sizes[dim] *= p.ranks * draw(st.sampled_from([1, 1, 2, 4]))
    y = matmul(p, draw, steps(p, draw, p.input(*sizes), 1))
    if draw(st.booleans()):
        other = matmul(p, draw, p.input(*sizes))
        if shape(other) == shape(y):
            y = p.call(aten.add.Tensor, y, other)
    if draw(st.booleans()):
        p.leaves.append(y)
    y = steps(p, draw, y, 2)
    dims = [d for d, size in enumerate(shape(y)) if size % p.ranks == 0]
    if not dims:
        y = p.call(aten.cat.default, [y] * p.ranks, 0)
        dims = [0]
    op, dim = draw(st.sampled_from(["sum", "sum", "avg"])), draw(st.sampled_from([None, *dims, *dims]))
    result = all_reduce(p, y, op) if dim is None else reduce_scatter(p, y, dim, op)
    return p.finish([steps(p, draw, result, 1), *p.leaves])


@st.composite
def result_programs(draw: Draw, ranks: st.SearchStrategy[int], dtypes: list[torch.dtype]) -> Program:
    """matmul -> steps -> all-gather along any dim, which a matmul may read; single blocks of it may be read, too."""
    p = Program(draw(ranks), draw(st.sampled_from(dtypes)))
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 6]), min_size=2, max_size=3))
    y = steps(p, draw, matmul(p, draw, steps(p, draw, p.input(*sizes), 1)), 2)
    if draw(st.booleans()):
        p.leaves.append(y)
    gathered = all_gather(p, y, draw(st.integers(0, len(shape(y)) - 1)))
    if gathered.target is aten.cat.default and draw(st.booleans()):
        p.leaves.append(p.call(aten.neg.default, draw(st.sampled_from(gathered.args[0]))))
    results = [steps(p, draw, gathered, 1)]
    if draw(st.booleans()):
        results.append(matmul(p, draw, gathered))
    return p.finish([*results, *p.leaves])


# --- attention ----------------------------------------------------------------------------------------------------------


def attention(p: Program, draw: Draw, q: fx.Node, k: fx.Node, v: fx.Node) -> fx.Node:
    """Attention of [B, H, L, E] in one of its forms: the fused op, or bmm, softmax, bmm; the result is [B, H, L, F]."""
    (batch, heads, rows, _), keys = shape(q), shape(k)[2]
    causal = draw(st.booleans())
    if draw(st.integers(0, 2)) == 0 and shape(k)[1] == heads:
        q, k, v = (p.call(aten.reshape.default, x, [batch * heads, *shape(x)[2:]]) for x in (q, k, v))
        scores = p.call(aten.bmm.default, q, p.call(aten.permute.default, k, [0, 2, 1]))
        if causal:
            scores = p.call(aten.add.Tensor, scores, p.input(rows, keys))
        weights = p.call(aten._softmax.default, scores, -1, False)
        return p.call(aten.reshape.default, p.call(aten.bmm.default, weights, v), [batch, heads, rows, shape(v)[2]])
    kwargs: dict[str, Any] = {}
    if not causal and draw(st.booleans()):
        mask = [batch if draw(st.booleans()) else 1, heads if draw(st.booleans()) else 1, rows, keys]
        kwargs["attn_mask"] = p.input(*mask)
    if draw(st.booleans()):
        kwargs["scale"] = 0.3
    both = p.call(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, v, 0.0, causal, **kwargs)
    if draw(st.booleans()):
        p.leaves.append(p.call(operator.getitem, both, 1))
    return p.call(operator.getitem, both, 0)


def _heads(p: Program, draw: Draw, x: fx.Node, heads: int) -> fx.Node:
    """[B, L, H * E] -> [B, H, L, E]"""
    batch, rows, width = shape(x)
    return p.call(
        aten.permute.default, p.call(aten.reshape.default, x, [batch, rows, heads, width // heads]), [0, 2, 1, 3]
    )


@st.composite
def attention_programs(draw: Draw, ranks: st.SearchStrategy[int], dtypes: list[torch.dtype]) -> Program:
    """(all-gather | projection | nothing) -> attention -> output projection -> (reduce-scatter | all-reduce)"""
    p = Program(draw(ranks), draw(st.sampled_from(dtypes)))
    batch, groups, size = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2])), draw(st.integers(2, 3))
    few = draw(st.sampled_from([1, 1, 2, p.ranks]))
    heads = few * groups
    rows = p.ranks * draw(st.sampled_from([1, 2, 3, 4]))
    keys = draw(st.sampled_from([rows, rows, rows + 1, max(1, rows - 1)]))
    gathered = draw(st.sampled_from([None, 0, 1, 2]))  # the dim along which the query, and perhaps all three, arrives

    def operand(heads: int, length: int, all_three: bool) -> fx.Node:
        full = [batch * (p.ranks if gathered == 0 else 1), length, heads * size * (p.ranks if gathered == 1 else 1)]
        if (gathered == 2 and not all_three) or gathered is None:
            x = p.input(*full)
        else:
            dim = {0: 0, 1: 2, 2: 1}[gathered]
            full[dim] //= p.ranks
            x = all_gather(p, p.input(*full), dim)
        if draw(st.booleans()):
            width = shape(x)[-1]
            x = p.call(aten.reshape.default, p.call(aten.mm.default, flat(p, x), p.input(width, width)), shape(x))
        return _heads(p, draw, x, heads * (p.ranks if gathered == 1 else 1))

    q, k, v = operand(heads, rows, True), operand(few, keys, gathered != 2), operand(few, keys, gathered != 2)
    y = attention(p, draw, q, k, v)
    y = p.call(aten.permute.default, y, [0, 2, 1, 3])
    y = p.call(aten.reshape.default, y, [*shape(y)[:2], shape(y)[2] * shape(y)[3]])
    if draw(st.booleans()):
        p.leaves.append(y)
    if draw(st.integers(0, 3)):
        width = p.ranks * draw(st.integers(1, 2))
        product = p.call(aten.mm.default, flat(p, y), p.input(shape(y)[-1], width))
        y = p.call(aten.reshape.default, product, [*shape(y)[:-1], width])
    dims = [dim for dim, extent in enumerate(shape(y)) if extent % p.ranks == 0]
    dim = draw(st.sampled_from([None, *dims, *dims]))
    return p.finish([all_reduce(p, y) if dim is None else reduce_scatter(p, y, dim), *p.leaves])


@st.composite
def all_reduce_stacks(draw: Draw, ranks: st.SearchStrategy[int], dtypes: list[torch.dtype]) -> Program:
    """Layers of matmuls -> all-reduces whose results may be added -> residual add and steps, then a matmul."""
    p = Program(draw(ranks), draw(st.sampled_from(dtypes)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    sizes[draw(st.integers(0, len(sizes) - 1))] *= p.ranks * draw(st.sampled_from([1, 1, 2]))
    x = p.input(*sizes)
    for _ in range(draw(st.integers(1, 3))):
        op = draw(st.sampled_from(["sum", "sum", "avg"]))
        y = matmul(p, draw, steps(p, draw, x, 1))
        reduced = all_reduce(p, y, op)
        for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
            other = all_reduce(p, p.call(aten.mul.Tensor, y, p.input(*shape(y))), op)
            reduced = p.call(aten.add.Tensor, *draw(st.permutations([reduced, other])))
        if draw(st.booleans()):
            reduced = p.call(aten.add.Tensor, reduced, p.input(*shape(reduced)))
        if draw(st.booleans()):
            p.leaves.append(reduced)
        x = steps(p, draw, reduced, 2)
    return p.finish([matmul(p, draw, x), *p.leaves])


@st.composite
def chain_programs(draw: Draw, ranks: st.SearchStrategy[int], dtypes: list[torch.dtype]) -> Program:
    """all-gather -> steps, one or two matmuls -> reduce-scatter along any dim, sums of them too; others read the body."""
    p = Program(draw(ranks), draw(st.sampled_from(dtypes)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    dim = draw(st.integers(0, len(sizes) - 1))
    sizes[dim] *= draw(st.sampled_from([1, 2, 4]))
    x = all_gather(p, p.input(*sizes), dim)
    y = steps(p, draw, x, 1)
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        y = steps(p, draw, matmul(p, draw, y), 1)
    if draw(st.booleans()):
        p.leaves.append(p.call(aten.mm.default, p.input(2, shape(flat(p, x))[0]), flat(p, x)))
    dims = [d for d, size in enumerate(shape(y)) if size % p.ranks == 0]
    if not dims:
        return p.finish([y, *p.leaves])
    op = draw(st.sampled_from(["sum", "sum", "avg"]))
    out = draw(st.sampled_from([dims[0], *dims]))
    result = reduce_scatter(p, y, out, op)
    if draw(st.booleans()):
        other = reduce_scatter(p, p.call(aten.mul.Tensor, y, p.input(*shape(y))), out, op)
        result = p.call(aten.add.Tensor, result, other)
    return p.finish([steps(p, draw, result, 1), *p.leaves])


# --- eight bits ---------------------------------------------------------------------------------------------------------


@st.composite
def fp8_programs(draw: Draw, ranks: st.SearchStrategy[int], row_scales: bool) -> Program:
    """(all-gather of activations or weights, with their scales) -> _scaled_mm -> (reduce-scatter | all-reduce | nothing)"""
    fp8 = torch.float8_e4m3fn
    p = Program(draw(ranks), torch.float32)
    rows, inner, columns = (p.ranks * draw(st.integers(1, 3)), 16, 16 * p.ranks * draw(st.sampled_from([1, 2])))
    gathered = draw(st.sampled_from([None, "a", "b"]))
    by_row = row_scales and draw(st.booleans())

    def operand(name: str, count: int) -> tuple[fx.Node, fx.Node]:
        share = count // p.ranks if name == gathered else count
        x, scale = p.input(share, inner, dtype=fp8), p.input(share, 1)
        if name == gathered:
            x = all_gather(p, x, 0)
            scale = all_gather(p, scale, 0) if by_row else scale
        return x, scale if by_row else p.call(aten.mean.dim, scale, [0, 1])

    (a, scale_a), (b, scale_b) = operand("a", rows), operand("b", columns)
    if by_row:
        scale_b = p.call(aten.permute.default, scale_b, [1, 0])
    bias = p.input(columns) if draw(st.booleans()) else None
    b = p.call(aten.permute.default, b, [1, 0])
    y = p.call(aten._scaled_mm.default, a, b, scale_a, scale_b, bias, out_dtype=torch.float32)
    if draw(st.booleans()):
        y = p.call(aten.relu.default, y)
    end = draw(st.sampled_from([None, 0, 1, "all-reduce"]))
    if end == "all-reduce":
        y = all_reduce(p, y)
    elif isinstance(end, int):
        y = reduce_scatter(p, y, end)
    return p.finish([y])


# --- coalesced and repeated collectives -------------------------------------------------------------------------------------


def _gathered_list(p: Program, draw: Draw, x: fx.Node) -> list[fx.Node]:
    """`dist.all_gather(list, x)`: the blocks of all ranks, or copies of them."""
    whole = p.call(c10d.wait_tensor.default, p.call(c10d.all_gather_into_tensor.default, x, p.ranks, "0"))
    size = shape(x)[0]
    blocks = [p.call(aten.slice.Tensor, whole, 0, size * rank, size * (rank + 1)) for rank in range(p.ranks)]
    if draw(st.booleans()):
        blocks = [p.call(aten.copy.default, p.call(aten.empty_like.default, x), block) for block in blocks]
    return blocks


@st.composite
def several_programs(draw: Draw, ranks: st.SearchStrategy[int], dtypes: list[torch.dtype]) -> Program:
    """Some coalesced collectives, some that gather the same tensor, and lists that are joined more than once."""
    p = Program(draw(ranks), draw(st.sampled_from(dtypes)))

    def consume(x: fx.Node) -> fx.Node:
        return matmul(p, draw, x) if draw(st.booleans()) else p.call(aten.mul.Tensor, x, 0.5)

    def tensor() -> fx.Node:
        x = p.input(p.ranks * draw(st.integers(1, 2)), draw(st.integers(1, 3)))
        return p.call(aten.mm.default, x, p.input(shape(x)[1], p.ranks)) if draw(st.booleans()) else x

    outputs = []
    for kind in draw(
        st.lists(st.sampled_from(["gather", "scatter", "reduce", "repeat", "list"]), min_size=1, max_size=3)
    ):
        if kind == "list":
            blocks = _gathered_list(p, draw, tensor())
            for dim in draw(st.lists(st.integers(0, 1), min_size=1, max_size=2)):
                outputs.append(consume(p.call(aten.cat.default, blocks, dim)))
            outputs += blocks[: draw(st.integers(0, 2))]
        elif kind == "repeat":
            x = tensor()
            outputs += [consume(all_gather(p, x, draw(st.integers(0, 1)))) for _ in range(draw(st.integers(1, 3)))]
        else:
            parts = [tensor() for _ in range(draw(st.integers(1, 3)))]
            op, args = {
                "gather": (c10d.all_gather_into_tensor_coalesced.default, (p.ranks, "0")),
                "scatter": (c10d.reduce_scatter_tensor_coalesced.default, ("sum", p.ranks, "0")),
                "reduce": (c10d.all_reduce_coalesced.default, ("avg", "0")),
            }[kind]
            results = p.call(op, parts, *args)
            items = [p.call(operator.getitem, results, index) for index in range(len(parts))]
            outputs += [consume(p.call(c10d.wait_tensor.default, item)) for item in items]
    return p.finish([*outputs, *p.leaves])
