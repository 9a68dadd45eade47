"""Whole regions tried out: what a rewrite gains here, against what the machine's parts predict.

Links, matmuls and sums are each measured alone, over and over, in memory that is there already. In a region they follow each
other with cold caches, and what a slice needs may be new memory. By how much that matters differs from machine to machine and
from collective to collective, so it is measured, too: the last step of a calibration (`Calibrator.machine`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .schedule import FAMILIES, Kind
from .schedule.choose import Choice, Region, choose
from .schedule.machine import Machine
from .torch_adapter import compile_error, functional_collective, with_own_code

if TYPE_CHECKING:
    from .calibration import Calibrator

ROWS = 1024  # of one rank's slice
COLUMNS = tuple(2**i for i in range(4, 12))  # of the side of the matmul that does not travel
TURNS = 3  # times the calibration's repeats
MOST = 0.9  # of a margin

_all_gather = functional_collective("all_gather_single")
_reduce_scatter = functional_collective("reduce_scatter_single")
_all_reduce = functional_collective("all_reduce")
_all_to_all = functional_collective("all_to_all_single")
Program = Callable[[Tensor, Tensor, Any], Tensor]  # shards and a factor, and the group's name
PROGRAMS: dict[Kind, Program] = {
    Kind.ALL_GATHER: lambda x, w, group: torch.mm(_all_gather(x, 0, group), w),
    Kind.REDUCE_SCATTER: lambda x, w, group: _reduce_scatter(torch.mm(x, w), "sum", 0, group),
    Kind.ALL_REDUCE: lambda x, w, group: _all_reduce(torch.mm(x, w), "sum", group),
    Kind.ALL_TO_ALL: lambda x, w, group: torch.mm(_all_to_all(x, None, None, group), w),
}


@dataclass(frozen=True)
class Trial:
    """What a rewritten region gains, as a share of the time that it takes where it is left alone."""

    predicted: float
    measured: float

    @property
    def shortfall(self) -> float:
        """By how much less it gained than predicted; not below 0."""
        return max(0.0, self.predicted - self.measured)


@dataclass(frozen=True)
class _Case:
    """A matmul whose compute takes about as long as its collective: [M, K] @ [K, N], `width` columns travel."""

    kind: Kind
    ranks: int
    width: int
    columns: int

    @property
    def family(self) -> str:
        """The simplest schedule."""
        return next(iter(FAMILIES[self.kind]))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K, N of the whole."""
        narrow = (self.width, self.columns)
        return (ROWS * self.ranks, *(narrow if self.kind.arrives_first else reversed(narrow)))

    def choice(self, machine: Machine, dtype: torch.dtype) -> Choice:
        """What is predicted for it in one slice a rank."""
        m, k, n = self.sizes
        slice_bytes = ROWS * self.width * dtype.itemsize
        region = Region(
            lambda slices: machine.matmul_us(int(ROWS / slices), k, n, str(dtype)),
            slice_bytes,
            machine.matmul_us(m, k, n, str(dtype)),
            finish_us=machine.copy_us(self.ranks * slice_bytes) if self.kind is Kind.ALL_REDUCE else 0.0,
        )
        return choose(self.kind, machine, self.ranks, region, families=[self.family], slices_per_rank=[1])


def try_regions(
    calibrator: Calibrator, machine: Machine, size_bytes: int, dtype: torch.dtype, kinds: Iterable[Kind]
) -> tuple[dict[Kind, Trial], list[str]]:
    """A region of each kind, its slices of `size_bytes`, compiled and timed on all ranks of the default group.

    Where torch cannot compile (it may find no C++ compiler) there is no trial, but a note: the rest of a calibration is of use.
    """
    trials, notes = {}, []
    for kind in kinds:
        try:
            trials[kind] = _try(calibrator, machine, size_bytes, dtype, kind)
        except compile_error() as error:
            notes.append(
                f"{kind}: no region was tried out, as it did not compile: {str(error).strip().splitlines()[0]}"
            )
    return trials, notes


def _try(calibrator: Calibrator, machine: Machine, size_bytes: int, dtype: torch.dtype, kind: Kind) -> Trial:
    width = max(1, size_bytes // ROWS // dtype.itemsize)
    cases = [_Case(kind, calibrator.ranks, width, columns) for columns in COLUMNS]
    choices = [(case, case.choice(machine, dtype)) for case in cases]
    case, choice = min(choices, key=lambda found: abs(found[1].plain_us - 2 * found[1].communication_us))
    m, k, n = case.sizes
    x = torch.ones(m // case.ranks if kind is Kind.ALL_GATHER else m, k, dtype=dtype, device=calibrator.device)
    w = torch.ones(k, n, dtype=dtype, device=calibrator.device)
    rewritten: dict[str, Any] = {"rewrite": "always", "schedule": case.family, "slices_per_rank": 1}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "machine.json"
        machine.save(path)
        ways: list[Any] = [
            torch.compile(
                with_own_code(PROGRAMS[kind]),
                backend="flashoverlap",
                dynamic=False,
                options={"machine": str(path), **options},
            )
            for options in ({"rewrite": "never"}, rewritten)
        ]
        for way in ways:
            way(x, w, calibrator.group_name)
    runs = [(partial(way, x, w, calibrator.group_name), 1) for way in ways]
    plain_us, ours_us = calibrator.slowest_us(runs, TURNS * calibrator.repeats)
    assert choice.best is not None
    return Trial(1 - choice.best.predicted_us / choice.plain_us, 1 - ours_us / plain_us)


def with_margins(machine: Machine, trials: dict[Kind, Trial]) -> Machine:
    """The machine, on which a prediction has to gain no less than it was off by here."""
    shortfalls = {kind.value: min(trial.shortfall, MOST) for kind, trial in trials.items()}
    collectives = (replace(measured, margin=shortfalls.get(measured.kind, 0.0)) for measured in machine.collectives)
    return replace(machine, collectives=tuple(collectives))
