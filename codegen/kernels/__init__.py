"""The Triton kernels, as functions on tensors. Names load on first use: importing this needs neither torch nor Triton.

matmul_into             a slice of a matmul, written into its place of the joined output
sum_partials            the sum of N partial results in float32, rounded once
all_gather_matmul       a whole region: tiles wait for the flag of their slice
matmul_reduce_scatter   a whole region: each slice raises a flag when its last tile is done
wait_flags, set_flags   the same flags, for transports

`X_launch` makes the launch of `X` without starting it (`codegen/launch.py`); `X_reference` is the same in plain torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .flags import POLLS, set_flags, set_flags_launch, wait_flags, wait_flags_launch
    from .partial_sums import sum_partials, sum_partials_launch, sum_partials_reference
    from .slice_matmul import apply_epilogue, matmul_into, matmul_into_launch, matmul_into_reference
    from .whole_gather import all_gather_matmul, all_gather_matmul_launch, all_gather_matmul_reference, order_table
    from .whole_scatter import (
        matmul_reduce_scatter,
        matmul_reduce_scatter_launch,
        matmul_reduce_scatter_reference,
        scatter_tables,
    )

_HOMES = {
    "all_gather_matmul": "whole_gather",
    "all_gather_matmul_launch": "whole_gather",
    "all_gather_matmul_reference": "whole_gather",
    "order_table": "whole_gather",
    "POLLS": "flags",
    "set_flags": "flags",
    "set_flags_launch": "flags",
    "wait_flags": "flags",
    "wait_flags_launch": "flags",
    "apply_epilogue": "slice_matmul",
    "matmul_into": "slice_matmul",
    "matmul_into_launch": "slice_matmul",
    "matmul_into_reference": "slice_matmul",
    "matmul_reduce_scatter": "whole_scatter",
    "matmul_reduce_scatter_launch": "whole_scatter",
    "matmul_reduce_scatter_reference": "whole_scatter",
    "scatter_tables": "whole_scatter",
    "sum_partials": "partial_sums",
    "sum_partials_launch": "partial_sums",
    "sum_partials_reference": "partial_sums",
}
__all__ = [
    "POLLS",
    "all_gather_matmul",
    "all_gather_matmul_launch",
    "all_gather_matmul_reference",
    "apply_epilogue",
    "matmul_into",
    "matmul_into_launch",
    "matmul_into_reference",
    "matmul_reduce_scatter",
    "matmul_reduce_scatter_launch",
    "matmul_reduce_scatter_reference",
    "order_table",
    "scatter_tables",
    "set_flags",
    "set_flags_launch",
    "sum_partials",
    "sum_partials_launch",
    "sum_partials_reference",
    "wait_flags",
    "wait_flags_launch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return value
