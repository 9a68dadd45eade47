"""`installed`: our pass inside every compile by plain Inductor, for programs that call torch.compile themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .backend import has_our_pass, with_our_pass
from .errors import OptionError
from .options import Options
from .records import Report, record
from .schedule.presets import find_machine
from .torch_adapter import every_inductor_compile


@contextmanager
def installed(**options: Any) -> Iterator[Report]:
    """Run our pass in each graph that Inductor compiles inside the block, and collect the records.

        with fo_compiler.installed(rewrite="auto") as report:
            train()
        print(report)

    `options` are the fields of `fo_compiler.Options`. A graph counts where it is compiled, that is at its first call; its
    backward graph goes with it, whenever that is compiled. Custom post-grad passes of the user run before ours, and a
    compile that has our pass already keeps that one: of nested blocks the innermost counts. Afterwards nothing of it is
    left, but that compiled code stays compiled.

    Raises OptionError for an option that is unknown or has a wrong value, MachineError for an unknown machine.
    """
    ours = Options.create(options)
    if ours.agreement == "plain":  # a pass compiles nothing, so it has no plain graph to fall back to
        raise OptionError.wrong("agreement", "'error' or 'off' (only backend='flashoverlap' knows 'plain')", "plain")
    if ours.machine is not None:
        find_machine(ours.machine)

    def with_the_pass(patches: dict[str, Any]) -> dict[str, Any]:
        return patches if has_our_pass(patches) else with_our_pass(patches, ours)

    with every_inductor_compile(with_the_pass), record() as report:
        yield report
