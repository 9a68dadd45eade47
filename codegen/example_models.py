"""Models for `fo-compiler cross`: one that is built in, or a function of yours.

The function takes the number of ranks, and gives a model on the meta device, sharded over them, with its inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CommandError

Example = Callable[[int], tuple[nn.Module, list[Tensor]]]


def mlp(ranks: int) -> tuple[nn.Module, list[Tensor]]:
    """all-gather -> matmul -> relu -> matmul -> reduce-scatter, bf16; x: [4096 / ranks, 4096], hidden 4096 / ranks a rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(4096, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 4096, bias=False)
        ).bfloat16()
        x = torch.empty(4096 // ranks, 4096, dtype=torch.bfloat16)
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    return parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan), [x]


EXAMPLES: dict[str, Example] = {"mlp": mlp}


def find_example(name: str) -> Example:
    """A built-in model by its name, or `module:function`, or `file.py:function`. Raises CommandError."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    where, colon, function = name.rpartition(":")
    if not colon:
        raise CommandError(f"model: expected {', '.join(EXAMPLES)}, module:function or file.py:function, got {name!r}.")
    try:
        module = load_file(where) if where.endswith(".py") else importlib.import_module(where)
        found = getattr(module, function)
    except (ImportError, OSError, AttributeError) as error:
        raise CommandError(f"model: {name!r} could not be loaded: {error}.") from error
    if not callable(found):
        raise CommandError(f"model: expected {name!r} to be a function of the number of ranks, got {found!r}.")
    return found  # type: ignore[no-any-return]


def load_file(where: str) -> Any:
    """A Python file as a module. Raises OSError or ImportError."""
    path = Path(where).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
