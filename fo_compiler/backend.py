"""The torch.compile backend `flashoverlap`: Inductor, with our pass in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from .options import split_options
from .torch_adapter import (
    as_pass_list,
    compile_with_inductor,
    configured_post_passes,
    inductor_option_names,
    mode_options,
)

_POST_PASS = "post_grad_custom_post_pass"


def flashoverlap(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph. `options` may hold ours (`fo_compiler.Options`) and Inductor's; `mode` is Inductor's.

    Raises OptionError for an option that is unknown or has a wrong value.
    """
    from .passes.overlap_pass import FlashOverlapPass

    ours, inductors = split_options(options, inductor_option_names)
    others = as_pass_list(inductors.pop(_POST_PASS)) if _POST_PASS in inductors else configured_post_passes()
    others = [other for other in others if not isinstance(other, FlashOverlapPass)]
    patches = {**mode_options(mode), **inductors, _POST_PASS: FlashOverlapPass(ours, before=tuple(others))}
    return compile_with_inductor(gm, example_inputs, patches)
