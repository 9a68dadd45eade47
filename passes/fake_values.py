"""Fake values of new nodes: what an op yields, remembered for arguments that look the same.

Slices are alike, and so are layers: most nodes that a rewrite makes look like an earlier one. To ask torch takes 0.2 to 1 ms
a node, also where torch itself remembers the answer; this takes a tenth of that.

Only sizes and strides are remembered. Each node gets a tensor of its own, in memory of its own, or as a view in that of what
it is a view of: by memory Inductor tells what may be written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.fx import Graph, Node

from ..torch_adapter import is_plain_fake, new_fake, share_memory, without_guards


@dataclass(frozen=True)
class _Result:
    """A tensor that an op yields; `view_of` is the one of its tensor arguments whose memory it is in, if any."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    view_of: int | None

    def tensor(self, mode: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        memory = None if self.view_of is None else tensors[self.view_of]
        return new_fake(mode, self.shape, self.stride, self.dtype, self.device, memory, self.offset)


class _Unlike(Exception):
    """An argument or a result that is not all said by sizes, strides and numbers."""


_results: WeakKeyDictionary[Graph, dict[Hashable, _Result]] = WeakKeyDictionary()


def value_of(
    graph: Graph, mode: Any, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What an op yields that is called with nodes of `graph`, in a fake mode. No guard is added.

    Without a mode (None) the op is called on the values as they are.
    """
    tensors: list[torch.Tensor] = []
    try:
        # The dtype that an op gives to numbers, where it is told none.
        key = (target, torch.get_default_dtype(), *_arguments(target, args, kwargs, mode, tensors))
    except _Unlike:
        return _called(mode, target, args, kwargs)
    results = _results.setdefault(graph, {})
    known = results.get(key)
    if known is not None:
        return known.tensor(mode, tensors)
    value = _called(mode, target, args, kwargs)
    with suppress(_Unlike):
        results[key] = _result(value, mode, tensors)
    return value


def _called(mode: Any, target: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    values, named = fx.map_arg((args, dict(kwargs)), _value)
    with mode or nullcontext(), without_guards(mode):
        return target(*values, **named)


def _value(node: Node) -> Any:
    return node.meta["val"]


@lru_cache(maxsize=1024)
def _label(target: Any) -> int | None:
    """Which argument of an op names it in errors and profiles: no result depends on that."""
    schema = getattr(target, "_schema", None)
    names = [] if schema is None else [formal.name for formal in schema.arguments]
    return names.index("label") if "label" in names else None


def _arguments(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: Any, tensors: list[torch.Tensor]
) -> tuple[Hashable, ...]:
    """What the result depends on; the tensors among it are put into `tensors`, in order. Raises _Unlike."""
    label = _label(target)
    looks = [_look(value, mode, tensors) for index, value in enumerate(args) if index != label]
    return (*looks, *((name, _look(kwargs[name], mode, tensors)) for name in sorted(kwargs)))


def _look(value: Any, mode: Any, tensors: list[torch.Tensor]) -> Hashable:
    if isinstance(value, Node):
        value = value.meta["val"]
    if isinstance(value, torch.Tensor):
        if not is_plain_fake(value, mode):
            raise _Unlike
        tensors.append(value)
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.storage_offset()
    if isinstance(value, (tuple, list)):
        return tuple(_look(item, mode, tensors) for item in value)
    if type(value) in _NUMBERS:
        return type(value), value  # to an op 1, 1.0 and True are not the same
    if isinstance(value, _NAMES):
        return value
    raise _Unlike


_NUMBERS = (int, float, bool)
_NAMES = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _result(value: Any, mode: Any, tensors: list[torch.Tensor]) -> _Result:
    """Raises _Unlike where it would not be made again as it is."""
    if not isinstance(value, torch.Tensor) or not is_plain_fake(value, mode) or any(value is t for t in tensors):
        raise _Unlike
    view_of = next((index for index, t in enumerate(tensors) if share_memory(value, t)), None)
    offset = int(value.storage_offset())
    result = _Result(tuple(value.shape), value.stride(), value.dtype, value.device, offset, view_of)
    if view_of is None and result.tensor(mode, tensors).untyped_storage().nbytes() != value.untyped_storage().nbytes():
        raise _Unlike
    return result
