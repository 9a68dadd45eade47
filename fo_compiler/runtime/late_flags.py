"""What the host learns of a wait in a kernel that gave up: `late` of `codegen/kernels/flags.py`, made a TransferError.

    late = LateFlags(labels, group, device)      labels[i]: the transfer that raises flag i; None where none does
    ... launch a kernel that marks `late.marks` ...
    late.watch()                                 behind it on the stream: bring the marks to the host, which waits for nothing
    late.check()                                 raises for the marks that have come

A kernel that gave up has computed garbage, about the group's time-out after a peer died. Marks stay until they are told, so a
check needs no event: it sees them or the next one does. Every run of a graph starts with a check of all (`ops.announce`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from .failures import transfer_failure

_watched: weakref.WeakSet[LateFlags] = weakref.WeakSet()
_lock = threading.Lock()


class LateFlags:
    """The marks of one region's flags, on the device and as the host has seen them last."""

    def __init__(self, labels: Sequence[str | None], group_name: str, device: torch.device) -> None:
        self.labels = tuple(labels)
        self.group_name = group_name
        self.marks = torch.zeros(len(labels), dtype=torch.int32, device=device)
        # Pinned, so that the copy neither waits nor is left out of a captured graph.
        self._seen = torch.zeros(len(labels), dtype=torch.int32, pin_memory=device.type == "cuda")
        with _lock:
            _watched.add(self)

    def watch(self) -> None:
        """Copy the marks to the host, behind what the current stream holds."""
        self._seen.copy_(self.marks, non_blocking=True)

    def check(self) -> None:
        """Raise TransferError where a flag was given up; the next check tells of later ones only."""
        if not self._seen.any():
            return
        late = [label for label, mark in zip(self.labels, self._seen.tolist(), strict=True) if mark and label]
        self._seen.zero_()
        with suppress(RuntimeError):  # of a device that has given up a transfer, too: nothing runs on it any more
            self.marks.zero_()
        more = f" (and {len(late) - 1} more of this region)" if len(late) > 1 else ""
        raise transfer_failure(
            "did not arrive",
            f"{late[0]}{more}",
            self.group_name,
            "a kernel gave up its wait for the flag; what it computed is wrong",
        )


def check_late_flags() -> None:
    """Raise TransferError for any region whose kernel gave up a wait."""
    if _watched:
        with _lock:
            watched = list(_watched)
        for late in watched:
            late.check()
