"""Triton, with the types that its decorator lacks. Only kernel modules import this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-untyped]

jit: Callable[[Callable[..., Any]], Any] = triton.jit

# Under TRITON_INTERPRET=1, read when a kernel is decorated, kernels run on CPU tensors; inline PTX does not exist there.
INTERPRETED: bool = triton.knobs.runtime.interpret
