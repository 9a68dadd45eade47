"""Options of the backend: one frozen dataclass, from a dict or from the environment, strictly checked."""

from __future__ import annotations

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
_COUNTS = ("slices_per_rank", "depth")


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
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise OptionError.wrong(name, f"one of {', '.join(map(repr, choices))}", value)
        for name in _COUNTS:
            count = getattr(self, name)
            if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
                raise OptionError.wrong(name, "a whole number of at least 1, or None", count)
        if self.compute_streams not in (1, 2) or isinstance(self.compute_streams, bool):
            raise OptionError.wrong("compute_streams", "1 or 2", self.compute_streams)
        if self.margin is not None and (not _is_number(self.margin) or not 0 <= self.margin < 1):
            raise OptionError.wrong("margin", "a number from 0 to 1, or None", self.margin)
        if self.max_buffer_mb is not None and (not _is_number(self.max_buffer_mb) or not self.max_buffer_mb >= 0):
            raise OptionError.wrong("max_buffer_mb", "a number of at least 0, or None", self.max_buffer_mb)
        if self.machine is not None and not isinstance(self.machine, str):
            raise OptionError.wrong(
                "machine", "the name of a preset or the path of a machine file, or None", self.machine
            )
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


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in Options.names():
        variable = f"FO_{name.upper()}"
        text = os.environ.get(variable)
        if not text:
            continue
        if name in _COUNTS:
            if not text.isdecimal() or int(text) < 1:
                raise OptionError(
                    f"environment variable {variable}: expected a whole number of at least 1, got {text!r}."
                )
            values[name] = int(text)
        elif name == "compute_streams":
            if text not in ("1", "2"):
                raise OptionError(f"environment variable {variable}: expected 1 or 2, got {text!r}.")
            values[name] = int(text)
        elif name in ("margin", "max_buffer_mb"):
            try:
                values[name] = float(text)
            except ValueError as error:
                raise OptionError(f"environment variable {variable}: expected a number, got {text!r}.") from error
        elif name in _CHOICES and text not in _CHOICES[name]:
            choices = ", ".join(map(repr, _CHOICES[name]))
            raise OptionError(f"environment variable {variable}: expected one of {choices}, got {text!r}.")
        else:
            values[name] = text
    return values
