"""The Triton kernels, as functions on tensors. Names load on first use: importing this needs neither torch nor Triton.

matmul_into    a slice of a matmul, written into its place of the joined output
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .matmul_into import matmul_into, matmul_into_launch, matmul_into_reference

_HOMES = {
    "matmul_into": "matmul_into",
    "matmul_into_launch": "matmul_into",
    "matmul_into_reference": "matmul_into",
}
__all__ = [
    "matmul_into",
    "matmul_into_launch",
    "matmul_into_reference",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # A function may have the name of its module, which importing has just put here: the function replaces it.
    module = importlib.import_module(f".{_HOMES[name]}", __name__)
    value = globals()[name] = getattr(module, name)
    return value
