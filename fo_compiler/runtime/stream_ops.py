"""The ops that a rewritten graph calls for compute on streams of its own.

    fo_compiler::slice_matmul(out, a, b, dim, start, kernel)   a @ b into its place of the joined output
    done = fo_compiler::fork(reads, event)                     record an event on the caller's stream
    fo_compiler::join(out, kept, after)                        the caller's stream waits for events

`stream`, `after` and `event` are as in `runtime/ops.py`. A tensor that a side stream uses is an argument of the op that
joins it, so that it lives until then: its memory is reused behind the join only. `slice_matmul` writes to its first
argument, and `join` says so of itself, so that whoever reads the result does it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from ..torch_adapter import allows_tf32
from . import streams

_LIBRARY = torch.library.Library("fo_compiler", "FRAGMENT")
_TAGS = (torch.Tag.flexible_layout,)  # any strides: no compiler copies what an op reads
_LIBRARY.define(
    "slice_matmul(Tensor(a!) out, Tensor a, Tensor b, int dim, int start, str kernel, *, "
    "int stream=0, int[] after=[], int event=-1) -> ()",
    tags=_TAGS,
)
_LIBRARY.define("fork(Tensor[] reads, *, int event) -> Tensor", tags=_TAGS)
_LIBRARY.define("join(Tensor(a!) out, Tensor[] kept, *, int[] after) -> ()", tags=_TAGS)


def _slice_matmul(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    dim: int,
    start: int,
    kernel: str,
    *,
    stream: int = streams.CALLER,
    after: Sequence[int] = (),
    event: int = streams.NO_EVENT,
) -> None:
    """out.narrow(dim, start, ...) = a @ b; a: [M, K], b: [K, N], out: [M of all slices, N], or [M, N of all] for dim 1.

    `kernel` is `library` for torch.mm, or `triton` for `codegen/kernels/slice_matmul.py` where it has the dtype.
    """
    place = out.narrow(dim, start, (a.shape[0], b.shape[1])[dim])
    with streams.launch(out.device, stream, after, event) if event != streams.NO_EVENT else nullcontext():
        if kernel == "triton" and a.is_cuda and a.dtype in _TRITON_DTYPES:
            from ..codegen.kernels.slice_matmul import matmul_into

            matmul_into(a, b, place, allow_tf32=allows_tf32())
        else:
            torch.mm(a, b, out=place)


_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _fork(reads: Sequence[Tensor], *, event: int) -> Tensor:
    with streams.launch(reads[0].device, streams.CALLER, (), event):
        return _token(reads)


def _token(reads: Sequence[Tensor], **_: object) -> Tensor:
    return torch.empty(1, dtype=torch.uint8, device=reads[0].device)


def _join(out: Tensor, kept: Sequence[Tensor], *, after: Sequence[int]) -> None:
    streams.join(out.device, after)


def _nothing(*_: object, **__: object) -> None:
    pass


_LIBRARY.impl("slice_matmul", _slice_matmul, "CompositeExplicitAutograd")
_LIBRARY.impl("fork", _fork, "CompositeExplicitAutograd")
_LIBRARY.impl("join", _join, "CompositeExplicitAutograd")
torch.library.register_fake("fo_compiler::slice_matmul", _nothing, lib=_LIBRARY)
torch.library.register_fake("fo_compiler::fork", _token, lib=_LIBRARY)
torch.library.register_fake("fo_compiler::join", _nothing, lib=_LIBRARY)

slice_matmul = torch.ops.fo_compiler.slice_matmul.default
fork = torch.ops.fo_compiler.fork.default
join = torch.ops.fo_compiler.join.default
has_side_effect(fork)  # nobody reads its result
