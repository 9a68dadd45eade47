"""Options of the backend: one frozen dataclass, from a dict or from the environment, strictly checked."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from .errors import OptionError
from .schedule import FAMILY_NAMES
from .schedule.taper import TAPERED

LIBRARY = "library"  # its own collective, on slices: of all-reduces

_CHOICES: dict[str, tuple[str, ...]] = {
    "rewrite": ("auto", "always", "never"),
    "schedule": ("auto", *FAMILY_NAMES, TAPERED, LIBRARY),
    "transport": ("auto", "c10d", "copy_engine"),
    "slice_matmul": ("auto", "library", "triton", "whole"),
    "agreement": ("error", "plain", "off"),
}


def _is_number(value: object, whole: bool = False) -> bool:
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_number(value, whole=True) and value >= 1  # type: ignore[operator]


# Option -> what it has to be, and whether a value is that.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **{name: (f"one of {', '.join(map(repr, values))}", values.__contains__) for name, values in _CHOICES.items()},
    **dict.fromkeys(
        ("slices_per_rank", "depth"),
        ("a whole number of at least 1, or None", lambda value: value is None or _is_count(value)),
    ),
    "compute_streams": ("1 or 2", lambda value: _is_count(value) and value <= 2),
    "margin": (
        "a number of at least 0 and below 1, or None",
        lambda value: value is None or (_is_number(value) and 0 <= value < 1),
    ),
    "max_buffer_mb": (
        "a number of at least 0, or None",
        lambda value: value is None or (_is_number(value) and value >= 0),
    ),
    "machine": (
        "the name of a preset or the path of a machine file, or None",
        lambda value: value is None or isinstance(value, str),
    ),
    "dump_dir": (
        "a path that is not empty, or None",
        lambda value: value is None or (isinstance(value, (str, os.PathLike)) and os.fspath(value) != ""),
    ),
}
# How the text of an environment variable is read.
_READ: dict[str, Callable[[str], Any]] = {
    "slices_per_rank": int, "depth": int, "compute_streams": int, "margin": float, "max_buffer_mb": float,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How regions are chosen and rewritten.

    Each field is also read from the environment variable `FO_` + its name in capitals; an explicit option wins.
    """

    rewrite: str = "auto"
    """`auto`: where it is predicted to pay; `always`: every legal region (for tests and inspection); `never`."""

    schedule: str = "auto"
    """Schedule family of every region that has it: `auto`, `ring`, `bidirectional`, `direct`, `tapered` (pieces that shrink), or
    `library` (its own collective, slice by slice; of all-reduces)."""

    slices_per_rank: int | None = None
    """Slices that each rank's shard is cut into, at most (in a tapered schedule: those of which pieces are made); None: chosen by
    the scheduler."""

    depth: int | None = None
    """Matmuls (attention counts as one) that a region may hold one behind the other; None: what saves most time."""

    machine: str | None = None
    """Machine that times are predicted for: a preset's name or a calibrated file; None: a default for the device."""

    margin: float | None = None
    """What a prediction has to gain, as a share of the plain time, before `auto` touches a graph; None: the machine's, which is
    0.05, or more where `fo-compiler calibrate` saw times vary more."""

    max_buffer_mb: float | None = None
    """Largest extra memory of one region's transfers, in MB (1e6 bytes); None: no limit."""

    compute_streams: int = 1
    """Streams on CUDA that the matmuls of slices run on: 1, the caller's, or 2 of their own, in turn."""

    transport: str = "c10d"
    """How tensors travel between CUDA devices: `c10d` (NCCL), `copy_engine` (symmetric memory, for GPUs that map each
    other's memory), or `auto`: the copy engine where every pair of the group has it and it is predicted to be faster. It is not
    the default as long as `make gpu-check` has not passed on such GPUs."""

    slice_matmul: str = "auto"
    """What multiplies a slice: `library`: an op of ours around torch.mm, which writes in place; `triton`: our kernel, on CUDA;
    `auto`: Inductor's matmul, or with two `compute_streams` the library's. `whole`: as `auto`, but an all-gather or a
    reduce-scatter with one matmul, whose transfers are the copy engine's, is one kernel where that is predicted to be faster
    (with rewrite='always' wherever it can). It has not run on a GPU yet, so it has to be asked for."""

    agreement: str = "error"
    """When ranks decided differently about a graph that is about to run first: `error` on every rank; `plain`: all use the
    plain collectives instead, in a graph that the backend calls itself, which is the forward of what is compiled (a backward
    graph is called by autograd, and the pass alone calls none: there it is an error, too); `off`: not compared."""

    dump_dir: str | None = None
    """Directory for the graphs before and after, the drawings and the timelines of every compile; None: no dumps."""

    def __post_init__(self) -> None:
        for name, (expected, fits) in _RULES.items():
            if not fits(getattr(self, name)):
                raise OptionError.wrong(name, expected, getattr(self, name))

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
    if not isinstance(given, Mapping) and given is not None:
        raise OptionError(f"options: expected a dict, got {given!r}.")
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
            raise OptionError.unknown(name, Options.names(), inductors=True)
    return Options.create(ours), inductors


def _from_environment() -> dict[str, Any]:
    variables = {f"FO_{name.upper()}": name for name in Options.names()}
    for given in os.environ:
        close = difflib.get_close_matches(given, variables, n=1, cutoff=0.85) if given.startswith("FO_") else []
        if close and given not in variables:
            raise OptionError(f"environment variable {given}: not known. Did you mean {close[0]}?")
    values: dict[str, Any] = {}
    for variable, name in variables.items():
        text = os.environ.get(variable)
        if not text:
            continue
        try:
            value = _READ.get(name, str)(text)
        except ValueError:
            value = text
        expected, fits = _RULES[name]
        if not fits(value):
            raise OptionError(
                f"environment variable {variable}: expected {expected.removesuffix(', or None')}, got {text!r}."
            )
        values[name] = value
    return values
