"""The torch.compile backend `flashoverlap`: Inductor, with our pass in it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from .errors import DecisionsDifferError
from .options import Options, split_options
from .schedule.presets import find_machine
from .torch_adapter import (
    as_pass_list,
    compile_with_inductor,
    configured_post_passes,
    inductor_option_names,
    mode_options,
)

log = logging.getLogger(__name__)

_POST_PASS = "post_grad_custom_post_pass"
Compiled = Callable[..., Any]


def flashoverlap(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile a captured graph. `options` may hold ours (`fo_compiler.Options`) and Inductor's; `mode` is Inductor's.

    Raises OptionError for an option that is unknown or has a wrong value, MachineError for an unknown machine.
    """
    ours, inductors = split_options(options, inductor_option_names)
    if ours.machine is not None:
        find_machine(ours.machine)
    patches = {**mode_options(mode), **inductors}
    if ours.agreement != "plain":
        return _compile(gm, example_inputs, patches, ours)
    spare = copy.deepcopy(gm)  # a compile owns its graph
    return _PlainIfRanksDiffer(
        _compile(gm, example_inputs, patches, ours),
        lambda: _compile(spare, example_inputs, patches, replace(ours, rewrite="never", agreement="off")),
    )


def _compile(gm: fx.GraphModule, example_inputs: list[Any], patches: Mapping[str, Any], ours: Options) -> Compiled:
    return compile_with_inductor(gm, example_inputs, with_our_pass(patches, ours))


def with_our_pass(patches: Mapping[str, Any], ours: Options) -> dict[str, Any]:
    """Configuration of a compile that has our pass once, behind the custom passes of the user."""
    from .passes.overlap_pass import FlashOverlapPass

    others: list[Callable[[fx.Graph], None]] = []
    for other in _post_passes(patches):
        others.extend(other.before if isinstance(other, FlashOverlapPass) else [other])
    return {**patches, _POST_PASS: FlashOverlapPass(ours, before=tuple(others))}


def has_our_pass(patches: Mapping[str, Any]) -> bool:
    """Whether a compile with this configuration runs our pass already."""
    from .passes.overlap_pass import FlashOverlapPass

    return any(isinstance(other, FlashOverlapPass) for other in _post_passes(patches))


def _post_passes(patches: Mapping[str, Any]) -> list[Callable[[fx.Graph], None]]:
    return as_pass_list(patches[_POST_PASS]) if _POST_PASS in patches else configured_post_passes()


class _PlainIfRanksDiffer:
    """A compiled graph that turns into its plain self on all ranks, if these decided differently about it."""

    def __init__(self, compiled: Compiled, compile_plain: Callable[[], Compiled]) -> None:
        self._compiled = compiled
        self._compile_plain: Callable[[], Compiled] | None = compile_plain

    def __call__(self, *args: Any) -> Any:
        if self._compile_plain is None:
            return self._compiled(*args)
        try:
            result = self._compiled(*args)
        except DecisionsDifferError as error:
            log.warning("all ranks use the plain collectives for this graph: %s", error)
            self._compiled = self._compile_plain()
            result = self._compiled(*args)
        self._compile_plain = None
        return result
