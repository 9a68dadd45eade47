"""Ranges for the profiler: each step of a region is seen twice, when it is posted and while its rank waits for it.

    fo_compiler post region ag0 of the forward graph (all_gather_into_tensor), step 1, group '0': rank 0 sends to 1, receives
    from 3, 65536 bytes
    fo_compiler wait region ag0 ...

They exist while a profiler records, and cost one question where none does.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..torch_adapter import profiling

_NO_RANGE = nullcontext()
_NAME = re.compile(
    r"fo_compiler (post|wait) region (\S+) of the (\S+) graph \((.*?)\), step (\d+), group '(.*?)': (.*), (\d+) bytes$"
)


def transfer_range(what: str, label: str, data: Tensor) -> AbstractContextManager[object]:
    """A range around posting or awaiting (`what`: "post", "wait") the transfers of a step: a tensor like `data` each way."""
    if not profiling():
        return _NO_RANGE
    return torch.profiler.record_function(f"fo_compiler {what} {label}, {data.numel() * data.element_size()} bytes")


def parse_range(name: str) -> dict[str, str] | None:
    """What a range is about: what, region, graph, collective, step, group, peers, bytes; None for a range that is not ours."""
    found = _NAME.match(name)
    return (
        dict(
            zip(
                ("what", "region", "graph", "collective", "step", "group", "peers", "bytes"),
                found.groups(),
                strict=True,
            )
        )
        if found
        else None
    )
