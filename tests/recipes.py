"""Random programs as data: a list of steps that hypothesis draws and shrinks, played on tensors by `play`.

The same recipe is captured as a graph, compiled by the whole backend, or run eagerly; forward alone, or with its gradients.
Sizes are 0 to 17 and odd ones; several groups, outputs and collectives, also those of user code that write into a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.graphs import all_gather, all_reduce, all_to_all, reduce_scatter

aten = torch.ops.aten
LARGEST = 4096  # elements


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
        ctx.saved = dim, ranks, group
        return all_gather(x, dim, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, *ctx.saved), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: int, group: str, op: str) -> Tensor:
        ctx.saved, ctx.scale = (dim, ranks, group), ranks if op == "avg" else 1
        return reduce_scatter(x, dim, ranks, group, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return all_gather(grad, *ctx.saved) / ctx.scale, None, None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return all_reduce(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.contiguous(), ctx.group), None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.saved = ranks, group
        return all_to_all(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_to_all(grad.contiguous(), *ctx.saved), None, None


class _ReduceInPlace(torch.autograd.Function):
    """`dist.all_reduce(t)` as a graph has it: what was reduced is copied into the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        mine = x.clone(memory_format=torch.contiguous_format)
        return aten.copy.default(mine, all_reduce(mine, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.contiguous(), ctx.group), None


class _GatherInto(torch.autograd.Function):
    """`dist.all_gather_into_tensor(out, x)` as a graph has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.saved = 0, ranks, group
        into = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        return aten.copy.default(into, all_gather(x, 0, ranks, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, *ctx.saved), None, None


@dataclass(frozen=True)
class Recipe:
    """`steps`: name, and numbers that a step reads as it likes. `groups`: name -> its size, on every rank."""

    sizes: tuple[int, ...]
    steps: tuple[tuple[str, int, int], ...]
    groups: tuple[tuple[str, int], ...]
    dtype: torch.dtype = torch.float64


def play(recipe: Recipe, x: Tensor, weights: Callable[..., Tensor]) -> list[Tensor]:
    """Run the steps on `x`. `weights(*shape)` gives the next parameter. A step that does not fit is left out."""
    earlier: list[Tensor] = [x]
    outputs: list[Tensor] = []
    for name, a, b in recipe.steps:
        group, ranks = recipe.groups[b % len(recipe.groups)]
        dim = a % max(1, x.dim())
        match name:
            case "gather" if x.numel() * ranks <= LARGEST:
                x = _Gather.apply(x, dim, ranks, group)
            case "gather into" if x.numel() * ranks <= LARGEST:
                x = _GatherInto.apply(x, ranks, group)
            case "scatter" | "scatter mean":
                x = _divisible(x, dim, ranks)
                x = _Scatter.apply(x, dim, ranks, group, "avg" if name == "scatter mean" else "sum")
            case "reduce":
                x = _Reduce.apply(x, group)
            case "reduce in place":
                x = _ReduceInPlace.apply(x, group)
            case "swap":
                x = _Swap.apply(_divisible(x, 0, ranks), ranks, group)
            case "matmul":
                x = x @ weights(x.shape[-1], 1 + a % 9) if x.dim() > 1 else x
            case "linear":
                width = (1 + a % 3) * ranks
                x = F.linear(x, weights(width, x.shape[-1]), weights(width)) if x.dim() > 1 else x
            case "matmul left" if x.dim() == 2:
                x = weights(1 + a % 5, x.shape[0]) @ x
            case "bmm" if x.dim() == 3:
                x = torch.bmm(x, weights(x.shape[0], x.shape[2], 1 + a % 5))
            case "tanh":
                x = torch.tanh(x)
            case "scale":
                x = x * 0.5 + 1
            case "bias":
                x = x + weights(x.shape[-1])
            case "residual":
                same = [other for other in earlier if other.shape == x.shape]
                x = x + same[a % len(same)] if same else x
            case "softmax":
                x = torch.softmax(x, -1)
            case "norm" if x.shape[-1]:
                x = F.layer_norm(x, x.shape[-1:], weights(x.shape[-1]))
            case "sum" if x.dim() > 2:
                x = x.sum(dim)
            case "cast":
                x = x.float().to(x.dtype)
            case "transpose":
                x = x.transpose(dim, -1)
            case "flatten" if x.dim() > 2:
                x = x.flatten(dim, min(dim + 1, x.dim() - 1))
            case "unsqueeze" if x.dim() < 4:
                x = x.unsqueeze(dim)
            case "cut" if x.shape[dim] > 1:
                x = x.narrow(dim, 1, x.shape[dim] - 1)
            case "halves" if x.shape[dim] % 2 == 0:
                first, second = x.chunk(2, dim) if x.shape[dim] else (x, x)
                x = first * second
            case "output":
                outputs.append(x)
        earlier.append(x)
    return [*outputs, x]


def _divisible(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x if x.shape[dim] % ranks == 0 else torch.cat([x] * ranks, dim)


COLLECTIVES = [
    "gather",
    "gather",
    "gather into",
    "scatter",
    "scatter",
    "scatter mean",
    "reduce",
    "reduce in place",
    "swap",
]
MATMULS = ["matmul", "matmul", "linear", "linear", "matmul left", "bmm"]
REST = [
    "tanh", "scale", "bias", "residual", "softmax", "norm", "sum", "transpose", "flatten", "unsqueeze", "cut", "halves", "output",
]  # fmt: skip
GROUPS: dict[int, Mapping[str, Sequence[Sequence[int]]]] = {
    2: {"0": [[0, 1]]},
    3: {"0": [[0, 1, 2]], "one": [[0], [1], [2]]},
    4: {"0": [[0, 1, 2, 3]], "rows": [[0, 1], [2, 3]], "columns": [[0, 2], [1, 3]]},
}


SIZES = st.one_of(st.integers(1, 4), st.sampled_from([2, 3, 4, 6, 12]), st.integers(0, 17))


@st.composite
def recipes(draw: Callable[[st.SearchStrategy[Any]], Any], ranks: int, casts: bool = True, blocks: int = 3) -> Recipe:
    """Blocks of a collective and a matmul, in either order, with other steps between them."""
    sizes = draw(st.lists(SIZES, min_size=2, max_size=3))
    if prod(sizes) > LARGEST // 4:
        sizes = sizes[:2]
    number = st.integers(0, 11)
    rest = st.lists(st.sampled_from(REST + ["cast"] * casts), max_size=2)
    names: list[str] = []
    for _ in range(draw(st.integers(1, blocks))):
        collective, matmul = draw(st.sampled_from(COLLECTIVES)), draw(st.sampled_from(MATMULS))
        first, second = (collective, matmul) if draw(st.booleans()) else (matmul, collective)
        names += [*draw(rest), first, *draw(rest), second]
    names += draw(rest)
    groups = tuple((name, len(members[0])) for name, members in GROUPS[ranks].items())
    return Recipe(tuple(sizes), tuple((name, draw(number), draw(number)) for name in names), groups)


def shapes_of(recipe: Recipe) -> list[tuple[int, ...]]:
    """The shapes of the input and of the parameters that a recipe asks for, in order."""
    shapes = [recipe.sizes]
    with FakeTensorMode():

        def weights(*shape: int) -> Tensor:
            shapes.append(shape)
            return torch.empty(shape, dtype=recipe.dtype)

        play(recipe, torch.empty(recipe.sizes, dtype=recipe.dtype), weights)
    return shapes


def inputs_of(recipe: Recipe, ranks: int, seed: int) -> list[list[Tensor]]:
    """By rank, the input and the parameters: other values on every rank."""
    generator, shapes = torch.Generator().manual_seed(seed), shapes_of(recipe)
    return [
        [torch.randn(shape, generator=generator, dtype=torch.float64).to(recipe.dtype) for shape in shapes]
        for _ in range(ranks)
    ]


def forward_of(recipe: Recipe) -> Callable[..., tuple[Tensor, ...]]:
    """f(x, *weights): the outputs."""

    def forward(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        left = iter(weights)
        return tuple(play(recipe, x, lambda *shape: next(left)))

    return forward


def step_of(recipe: Recipe) -> Callable[..., tuple[Tensor, ...]]:
    """f(x, *weights): the outputs, and the gradients of a weighted sum of them."""
    forward = forward_of(recipe)

    def step(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        outputs = forward(*leaves)
        loss = sum((output * (index + 1)).sum() for index, output in enumerate(outputs))
        assert isinstance(loss, Tensor)
        return *(output.detach() for output in outputs), *torch.autograd.grad(loss, leaves, materialize_grads=True)

    return step
