"""Machines for tests of rewrites."""

from __future__ import annotations

from pathlib import Path

from fo_compiler.schedule.machine import simple_machine
from fo_compiler.schedule.matmul import Roofline
from fo_compiler.schedule.network import Matrix


def one_slow_link(directory: Path, ranks: int) -> str:
    """The file of a machine on which every ring is slow."""
    bandwidth = tuple(tuple(0.01 if {a, b} == {1, 2} else 1.0 for b in range(ranks)) for a in range(ranks))
    path = directory / "one_slow_link.json"
    matmul = Roofline({"fp64": 1.0}, memory_GBps=1e3, units=1)
    simple_machine("one slow link", network=Matrix(((0.0,) * ranks,) * ranks, bandwidth), matmul=matmul).save(path)
    return str(path)
