"""Remembered values: the same as torch's, in memory of the same tensors; and none where sizes and strides do not say all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fo_compiler.passes import fake_values
from fo_compiler.passes.fake_values import value_of
from fo_compiler.runtime import ops
from fo_compiler.torch_adapter import share_memory

aten = torch.ops.aten


class Graphs:
    """A graph with inputs on one fake mode, and how often torch was asked for a value."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.graph = Graph()
        self.asked = 0
        called = fake_values._called

        def counted(*args: Any) -> Any:
            self.asked += 1
            return called(*args)

        monkeypatch.setattr(fake_values, "_called", counted)

    def input(self, *shape: int, dtype: torch.dtype = torch.float32, like: Callable[[Any], Any] = lambda t: t) -> Node:
        node = self.graph.placeholder("x")
        with self.mode:
            node.meta["val"] = like(torch.empty(shape, dtype=dtype))
        return node

    def value(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return value_of(self.graph, self.mode, target, args, kwargs)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    return Graphs(monkeypatch)


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    look = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
    return *look, tensor.untyped_storage().nbytes(), tensor.requires_grad


CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (aten.mm.default, ("x", "x"), {}),
    (aten.slice.Tensor, ("x", 0, 2, 4), {}),
    (aten.slice.Tensor, ("x", 1, 2, 4), {}),
    (aten.reshape.default, ("x", [2, 4, 8]), {}),
    (aten.permute.default, ("x", [1, 0]), {}),
    (aten.expand.default, ("x", [3, 8, 8]), {}),
    (aten.cat.default, (["x", "x"], 1), {}),
    (aten.add.Tensor, ("x", 2), {"alpha": 3}),
    (aten.sum.dim_IntList, ("x", [0]), {"dtype": torch.float64}),
    (aten.clone.default, ("x",), {"memory_format": torch.contiguous_format}),
    (aten.full.default, ([4, 2], 1.0), {"dtype": torch.int64, "device": torch.device("cpu")}),
    (ops.exchange, ("x", 1, 2, "group", "label"), {"shape": [3, 5]}),
    (ops.wait, ("x", "x"), {}),
]


@pytest.mark.parametrize(("target", "args", "kwargs"), CALLS, ids=[str(call[0]) + str(call[1][1:]) for call in CALLS])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_second_value_is_like_the_first_in_memory_of_its_own_input(
    graphs: Graphs, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], transposed: bool
) -> None:
    found = []
    for _ in range(2):
        # A part of a larger tensor, so that it starts somewhere in its memory.
        node = graphs.input(16, 8, like=lambda t: t[8:].t() if transposed else t[8:])
        nodes = torch.utils._pytree.tree_map(lambda a, node=node: node if a == "x" else a, args)
        found.append((node.meta["val"], graphs.value(target, *nodes, **kwargs)))
    assert graphs.asked == 1
    (source, first), (other, second) = found
    assert _look(second) == _look(first)
    assert share_memory(second, other) == share_memory(first, source)
    assert not share_memory(second, first)
    with graphs.mode:
        assert (second + 1).shape == first.shape  # an ordinary tensor of the mode


def test_what_a_result_depends_on_is_asked_for_each_value_of_it(graphs: Graphs) -> None:
    whole, parts = graphs.input(8, 8, dtype=torch.int64), graphs.input(8, 8)
    assert graphs.value(aten.add.Tensor, whole, 1).dtype == torch.int64
    assert graphs.value(aten.add.Tensor, whole, 1.0).dtype == torch.float32
    assert graphs.value(aten.add.Tensor, parts, 1).dtype == torch.float32
    assert graphs.value(aten.div.Tensor_mode, whole, 2, rounding_mode="floor").dtype == torch.int64
    assert graphs.value(aten.div.Tensor_mode, whole, 2, rounding_mode=None).dtype == torch.float32
    assert graphs.value(aten.slice.Tensor, whole, 0, 2, 4).storage_offset() == 16
    assert graphs.value(aten.slice.Tensor, whole, 0, 4, 6).storage_offset() == 32
    assert graphs.asked == 7


def test_the_label_of_a_transfer_is_not_asked_about(graphs: Graphs) -> None:
    node = graphs.input(8, 8)
    for label in ("one", "other"):
        graphs.value(ops.exchange, node, 1, 1, "group", label)
    assert graphs.asked == 1


def test_of_two_graphs_each_asks_for_itself(graphs: Graphs) -> None:
    node = graphs.input(8, 8)
    graphs.value(aten.t.default, node)
    graphs.graph = Graph()
    graphs.value(aten.t.default, node)
    assert graphs.asked == 2


def _with_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


@pytest.mark.parametrize("like", [_with_grad, lambda t: t.to(torch.complex64).conj()], ids=["grad", "conj"])
def test_a_tensor_that_is_more_than_its_sizes_is_asked_about_each_time(graphs: Graphs, like: Any) -> None:
    node = graphs.input(8, 8, like=like)
    for _ in range(2):
        graphs.value(aten.mul.Tensor, node, 2)
    assert graphs.asked == 2


def test_symbolic_sizes_are_asked_about_each_time(graphs: Graphs) -> None:
    node = graphs.graph.placeholder("x")
    node.meta["val"] = graphs.mode.from_tensor(torch.empty(6, 4), static_shapes=False)
    for _ in range(2):
        assert isinstance(graphs.value(aten.mul.Tensor, node, 2).shape[0], torch.SymInt)
    assert graphs.asked == 2


def test_a_result_that_is_an_argument_or_a_part_of_memory_of_its_own_is_not_remembered(graphs: Graphs) -> None:
    node = graphs.input(8, 8)
    pair = graphs.graph.placeholder("pair")
    pair.meta["val"] = (node.meta["val"], node.meta["val"])

    def first_half(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()[:4]

    for _ in range(2):
        assert graphs.value(getitem, pair, 0) is node.meta["val"]
        assert graphs.value(first_half, node).untyped_storage().nbytes() == 8 * 8 * 4
    assert graphs.asked == 4
