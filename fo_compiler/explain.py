"""`explain`: what the backend does with a model, and why, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .records import Report, record
from .torch_adapter import tree_leaves


def explain(model: Any, *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Report:
    """Compile `model` for these arguments, run it forward and backward once, and report every collective.

    The arguments are the model's; `options` are the backend's. All ranks have to call it together, since the model
    runs. It leaves no gradient behind, and restores buffers and the random state. `model` itself is not compiled by it.
    """
    is_module = isinstance(model, nn.Module)
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()} if is_module else {}
    compiled: Callable[..., Any] = torch.compile(model, backend="flashoverlap", options=dict(options or {}))
    try:
        with record() as report, torch.random.fork_rng():
            outputs = _need_gradients(compiled(*args, **kwargs))
            sources = _need_gradients((args, kwargs, list(model.parameters()) if is_module else []))
            if outputs and sources:
                # Unlike backward(), this accumulates into no .grad and runs no hook of a parameter.
                seeds = [torch.ones_like(output) for output in outputs]
                torch.autograd.grad(outputs, sources, seeds, allow_unused=True)
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers() if is_module else ():
                buffer.copy_(buffers[name])
    return report


def _need_gradients(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
