"""The `fo-compiler` command. One module a sub-command in `fo_compiler/commands/`; only the one that runs is imported."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .errors import FlashOverlapError

# Each module in fo_compiler/commands/ has `add_arguments(parser)` and `run(args) -> int` (the exit status).
COMMANDS = {
    "calibrate": "measure links, matmuls and contention on the real process group, and write a machine file",
    "cross": "compile a model for a GPU that is not there: programs, PTX, cubins and a table of kernels",
    "env": "versions, devices and effective options, for a bug report",
    "plan": "predict the schedule of a region on a machine: timeline, times, lower bound and why",
    "trace": "predicted and measured timelines of the regions of a run, in one Chrome trace",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command. Exit status 2, with the reason on stderr, for what the user got wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="fo-compiler", description="Hide communication under matmuls.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name == chosen:
            importlib.import_module(f"{__package__}.commands.{name}").add_arguments(command)
    args = parser.parse_args(argv)
    module = importlib.import_module(f"{__package__}.commands.{args.command}")
    try:
        return int(module.run(args))
    except FlashOverlapError as error:
        print(f"fo-compiler {args.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:  # no file of the user's
            raise
        print(f"fo-compiler {args.command}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
