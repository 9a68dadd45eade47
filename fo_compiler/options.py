"""Options of the backend: one frozen dataclass, from a dict or from the environment, strictly checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import OptionError
from .schedule import FAMILY_NAMES

_CHOICES: dict[str, tuple[str, ...]] = {
    "rewrite": ("auto", "always", "never"),
    "schedule": ("auto", *FAMILY_NAMES),
}


@dataclass(frozen=True)
class Options:
    """How regions are chosen and rewritten.

    Each field is also read from the environment variable `FO_` + its name in capitals; an explicit option wins.
    """

    rewrite: str = "auto"
    """`auto`: where it is predicted to pay; `always`: every legal region (for tests and inspection); `never`."""

    schedule: str = "auto"
    """Schedule family of every region: `auto`, `ring` or `direct`."""

    slices_per_rank: int | None = None
    """Slices that each rank's shard is cut into, at most; None: chosen by the scheduler."""

    dump_dir: str | None = None
    """Directory for the graphs before and after, the drawings and the timelines of every compile; None: no dumps."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise OptionError.wrong(name, f"one of {', '.join(map(repr, choices))}", value)
        m = self.slices_per_rank
        if m is not None and (not isinstance(m, int) or isinstance(m, bool) or m < 1):
            raise OptionError.wrong("slices_per_rank", "a whole number of at least 1, or None", m)
        if self.dump_dir is not None and not isinstance(self.dump_dir, (str, os.PathLike)):
            raise OptionError.wrong("dump_dir", "a path, or None", self.dump_dir)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    @classmethod
    def create(cls, given: Mapping[str, Any] | None = None) -> Options:
        """Options from `given`, the rest from the environment. Raises OptionError."""
        values = _from_environment()
        for name, value in (given or {}).items():
            if name not in cls.names():
                raise OptionError.unknown(name, cls.names())
            values[name] = value
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def split_options(
    given: Mapping[str, Any] | None, inductor_names: Callable[[], set[str]]
) -> tuple[Options, dict[str, Any]]:
    """Our options, and Inductor's that stand in the same dict. Raises OptionError for a name that neither knows."""
    ours: dict[str, Any] = {}
    inductors: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if not isinstance(name, str):
            raise OptionError(f"options: expected names as strings, got {name!r}.")
        name = name.replace("-", "_")
        if name in Options.names():
            ours[name] = value
        elif name in inductor_names():
            inductors[name] = value
        else:
            raise OptionError.unknown(name, Options.names())
    return Options.create(ours), inductors


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in Options.names():
        variable = f"FO_{name.upper()}"
        text = os.environ.get(variable)
        if not text:
            continue
        if name == "slices_per_rank":
            if not text.isdecimal() or int(text) < 1:
                raise OptionError(
                    f"environment variable {variable}: expected a whole number of at least 1, got {text!r}."
                )
            values[name] = int(text)
        elif name in _CHOICES and text not in _CHOICES[name]:
            choices = ", ".join(map(repr, _CHOICES[name]))
            raise OptionError(f"environment variable {variable}: expected one of {choices}, got {text!r}.")
        else:
            values[name] = text
    return values
