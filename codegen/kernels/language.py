"""Triton, with the types that its decorator lacks. Only kernel modules import this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton  # type: ignore[import-untyped]

jit: Callable[[Callable[..., Any]], Any] = triton.jit


def jit_for_any_address(*pointers: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit`, but one kernel whether or not `pointers` are multiples of 16 bytes: what was loaded for one serves all."""
    unaligned: Sequence[str] = pointers
    decorate: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize_on_alignment=unaligned)
    return decorate


# Under TRITON_INTERPRET=1, read when a kernel is decorated, kernels run on CPU tensors; inline PTX does not exist there.
INTERPRETED: bool = triton.knobs.runtime.interpret
