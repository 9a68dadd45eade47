"""Every error that this package raises on purpose: one class a mistake, each saying what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FlashOverlapError(Exception):
    """Base class, so that a caller can catch everything that is ours."""


class OptionError(FlashOverlapError, ValueError):
    """An option or environment variable has an unknown name, a wrong type or a wrong value."""

    @classmethod
    def unknown(cls, name: str, ours: Iterable[str], inductors: bool = False) -> OptionError:
        """`inductors`: Inductor was asked for the option, too."""
        ours = sorted(ours)
        close = difflib.get_close_matches(name, ours, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        if not inductors:
            return cls(
                f"fo_compiler has no option {name!r}.{hint} Options: {', '.join(ours)}. "
                "Inductor's own belong into the options of torch.compile."
            )
        return cls(
            f"backend 'flashoverlap' has no option {name!r}, and neither has Inductor.{hint} "
            f"Options of ours: {', '.join(ours)}. "
            "Inductor's own are listed by torch._inductor.list_options()."
        )

    @classmethod
    def wrong(cls, name: str, expected: str, got: object) -> OptionError:
        return cls(f"option {name!r}: expected {expected}, got {got!r}.")


class CommandError(FlashOverlapError):
    """A `fo-compiler` command was called in a way in which it cannot work."""


class ScheduleError(FlashOverlapError):
    """A schedule breaks one of its invariants (`schedule.verify`). A bug in the family that built it."""


class MachineError(FlashOverlapError, ValueError):
    """A machine description is incomplete, wrong, or does not fit the group it is used for."""

    @classmethod
    def wrong(cls, where: str, expected: str, got: object, hint: str = "") -> MachineError:
        hint = hint or "write a fresh file with `fo-compiler calibrate`, or name a preset"
        return cls(f"machine: {where}: expected {expected}, got {got!r}; {hint}.")

    @classmethod
    def unknown(cls, name: str, known: Iterable[str]) -> MachineError:
        known = list(known)
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return cls(f"machine: {name!r} is not known.{hint} Known: {', '.join(known)}.")


class KernelError(FlashOverlapError, ValueError):
    """A kernel was asked for what it cannot do: a dtype, shape, stride or device."""

    @classmethod
    def wrong(cls, where: str, expected: str, got: object) -> KernelError:
        return cls(f"kernel: {where}: expected {expected}, got {got}.")


class RewriteError(FlashOverlapError):
    """A rewritten graph breaks one of its invariants (`passes.graph_verifier`). A bug of ours: please report it."""


class TransferError(FlashOverlapError, RuntimeError):
    """A transfer between two ranks failed or did not finish in time."""


class AgreementError(FlashOverlapError, RuntimeError):
    """Ranks of a group are about to run different schedules, or do not run the same graph."""


class DecisionsDifferError(AgreementError):
    """All ranks came, and know that they decided differently: none of them runs the graph."""


class TorchVersionError(FlashOverlapError, ImportError):
    """The installed torch is older than those that are supported."""
