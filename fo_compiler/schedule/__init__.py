"""Schedules as data: families, verification and interpretation. Knows neither FX nor torch.distributed."""

from .families import FAMILIES, FAMILY_NAMES, TWO_LEVEL, build
from .ir import COLLECTIVES, Action, Add, Compute, Kind, Post, Program, Recv, Schedule, Send, Store, Stream, Wait
from .verify import verify

__all__ = [
    "COLLECTIVES",
    "FAMILIES",
    "FAMILY_NAMES",
    "TWO_LEVEL",
    "Action",
    "Add",
    "Compute",
    "Kind",
    "Post",
    "Program",
    "Recv",
    "Schedule",
    "Send",
    "Store",
    "Stream",
    "Wait",
    "build",
    "verify",
]
