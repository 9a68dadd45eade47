"""Graphs for tests: a function of tensors with functional collectives, captured as the passes see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

c10d = torch.ops._c10d_functional


def all_gather(x: Tensor, dim: int, ranks: int, group: str = "0") -> Tensor:
    """The DTensor form: gather along dim 0, then split and cat along `dim`."""
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), ranks, group))
    return gathered if dim == 0 else torch.cat(torch.chunk(gathered, ranks, 0), dim)


def reduce_scatter(x: Tensor, dim: int, ranks: int, group: str = "0", op: str = "sum") -> Tensor:
    if dim != 0:
        x = torch.cat(torch.chunk(x, ranks, dim), 0)
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x.contiguous(), op, ranks, group))


def all_reduce(x: Tensor, group: str = "0", op: str = "sum") -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, op, group))


def all_to_all(x: Tensor, ranks: int, group: str = "0") -> Tensor:
    """Block i of dim 0 goes to rank i, and that of rank i comes into its place."""
    splits = [x.shape[0] // ranks] * ranks
    return c10d.wait_tensor(c10d.all_to_all_single(x.contiguous(), splits, splits, group))


def symbolic(tensor: Tensor, dims: Sequence[int], index: int, mode: FakeTensorMode) -> Tensor:
    """Fake input `index`: its sizes along `dims` are symbols, the others those of `tensor`. Equal sizes share a symbol."""
    kinds = [DimDynamic.DUCK if dim in dims else DimDynamic.STATIC for dim in range(tensor.dim())]
    context = StatelessSymbolicContext(dynamic_sizes=kinds)
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"input{index}"))


def capture(
    function: Callable[..., Any], inputs: Sequence[Tensor], dynamic: Mapping[int, Sequence[int]] | None = None
) -> fx.GraphModule:
    """The ATen graph of a function, with fake tensors in its meta, views as reshapes: as after post-grad passes.

    `dynamic` names the dims of input i that are symbolic.
    """
    if dynamic is None:
        gm = make_fx(function, tracing_mode="fake")(*inputs)
    else:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        gm = make_fx(function, tracing_mode="symbolic")(
            *(symbolic(tensor, dynamic.get(index, ()), index, mode) for index, tensor in enumerate(inputs))
        )
    for node in gm.graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm
