"""fo-compiler: a torch.compile backend that hides communication under matmuls.

    torch.compile(model, backend="flashoverlap")

or, around code that calls torch.compile itself,

    with fo_compiler.installed():
        train()

Importing this package is cheap; names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import AgreementError, FlashOverlapError, OptionError, TransferError
    from .explain import explain
    from .install import installed
    from .options import Options
    from .passes.overlap_pass import FlashOverlapPass
    from .passes.rules import register_rule
    from .records import Record, Report, record

__version__ = "0.1.0"

_HOMES = {
    "AgreementError": "errors",
    "FlashOverlapError": "errors",
    "FlashOverlapPass": "passes.overlap_pass",
    "OptionError": "errors",
    "Options": "options",
    "Record": "records",
    "Report": "records",
    "TransferError": "errors",
    "explain": "explain",
    "installed": "install",
    "record": "records",
    "register_rule": "passes.rules",
}
__all__ = [
    "AgreementError",
    "FlashOverlapError",
    "FlashOverlapPass",
    "OptionError",
    "Options",
    "Record",
    "Report",
    "TransferError",
    "explain",
    "installed",
    "record",
    "register_rule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
