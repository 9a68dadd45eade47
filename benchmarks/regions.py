"""What is measured: one region (collectives and matmuls) as a module, and its sizes.

Compute comes in two kinds. `matmul` is a real one. `standin` is an op of this benchmark that sleeps in proportion to its
rows instead of multiplying, so that more ranks than cores are meaningful: the cores are free for the transfers, as they
are beside an accelerator. The product is told about the op with `fo_compiler.register_rule`, as any user can.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import fo_compiler
from fo_compiler.torch_adapter import functional_collective

all_gather = functional_collective("all_gather_single")
reduce_scatter = functional_collective("reduce_scatter_single")

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "chain")
COMPUTES = ("standin", "matmul")
ROWS = 512  # of one rank's slice


@dataclass(frozen=True)
class Case:
    """One region: `slice_mb` (MiB) of one rank's part of the collective, `slice_ms` of compute on one part."""

    kind: str
    ranks: int
    slice_mb: float
    slice_ms: float
    compute: str = "standin"
    columns: int = 16  # of the narrow side of the matmul; for `matmul`, what makes it last `slice_ms`

    @property
    def slice_bytes(self) -> int:
        return ROWS * 4 * self.width

    @property
    def width(self) -> int:
        """Columns of the tensor that travels."""
        return max(1, round(self.slice_mb * 2**20 / ROWS / 4))

    @property
    def rows(self) -> int:
        """Rows of the whole tensor."""
        return ROWS * self.ranks

    @property
    def matmuls(self) -> int:
        return 2 if self.kind == "chain" else 1

    @property
    def crossings(self) -> int:
        """How often the ranks - 1 slices cross each link: there and back in an all-reduce and in a chain."""
        return 2 if self.kind in ("all_reduce", "chain") else 1

    @property
    def gathers(self) -> bool:
        """Whether what the first matmul reads comes from the other ranks."""
        return self.kind in ("all_gather", "all_to_all", "chain")

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, K, N of the (first) matmul, whole: a tensor that travels is [M, width]."""
        return (self.rows, self.width, self.columns) if self.gathers else (self.rows, self.columns, self.width)

    def lasting(self, us_per_column: float) -> Case:
        """The case with as many columns as make the compute on one slice last `slice_ms`."""
        columns = self.slice_ms * 1e3 / us_per_column / self.matmuls
        return replace(self, columns=max(16, round(columns / 16) * 16))


# --- the stand-in ---------------------------------------------------------------------------------------------------

# How long the stand-in takes; outside of the graph, so that one compiled module serves all of them.
_us_per_row = 0.0


def set_pace(case: Case) -> None:
    """Let the stand-ins of this process last as long as the case says."""
    global _us_per_row
    _us_per_row = case.slice_ms * 1e3 / ROWS / case.matmuls


_LIBRARY = torch.library.Library("fo_bench", "DEF")
_LIBRARY.define("timed_matmul(Tensor x, Tensor w) -> Tensor", tags=(torch.Tag.flexible_layout,))


def _timed_matmul(x: Tensor, w: Tensor) -> Tensor:
    end = time.perf_counter() + x.shape[0] * _us_per_row * 1e-6
    result = x.new_empty(x.shape[0], w.shape[1])
    time.sleep(max(0.0, end - time.perf_counter()))
    return result


def _timed_matmul_fake(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


_LIBRARY.impl("timed_matmul", _timed_matmul, "CompositeExplicitAutograd")
torch.library.register_fake("fo_bench::timed_matmul", _timed_matmul_fake, lib=_LIBRARY)
timed_matmul = torch.ops.fo_bench.timed_matmul.default
fo_compiler.register_rule(timed_matmul, "mk,kn->mn", is_matmul=True)


# --- the region -----------------------------------------------------------------------------------------------------


class Region(nn.Module):
    """R ranks, M rows in all, W = width, C = columns:

    all_gather      x_shard [M / R, W] -> all-gather -> @ w [W, C]                       -> [M, C]
    all_to_all      x [M, W]           -> all-to-all of R blocks of rows -> @ w [W, C]   -> [M, C]
    reduce_scatter  x [M, C]           -> @ w [C, W] -> reduce-scatter                   -> [M / R, W]
    all_reduce      x [M, C]           -> @ w [C, W] -> all-reduce                       -> [M, W]
    chain           x_shard [M / R, W] -> all-gather -> @ w [W, C] -> @ v [C, W] -> reduce-scatter -> [M / R, W]
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        _, k, n = case.shape
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("w", torch.randn(k, n, generator=generator))
        self.register_buffer("v", torch.randn(n, k, generator=generator))

    def multiply(self, x: Tensor, w: object) -> Tensor:
        assert isinstance(w, Tensor)
        result: Tensor = torch.mm(x, w) if self.case.compute == "matmul" else timed_matmul(x, w)
        return result

    def body(self, x: Tensor) -> Tensor:
        """The compute between the collectives."""
        x = self.multiply(x, self.w)
        return self.multiply(x, self.v) if self.case.kind == "chain" else x

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        kind = self.case.kind
        if kind in ("all_gather", "chain"):
            x = all_gather(x, 0, group)
        elif kind == "all_to_all":
            x = funcol.all_to_all_single(x, None, None, group)
        x = self.body(x)
        if kind in ("reduce_scatter", "chain"):
            x = reduce_scatter(x, "sum", 0, group)
        elif kind == "all_reduce":
            x = funcol.all_reduce(x, "sum", group)
        return x


def example_input(case: Case) -> Tensor:
    """This rank's x."""
    m, k, _ = case.shape
    generator = torch.Generator().manual_seed(2 + dist.get_rank())
    return torch.randn(ROWS if case.kind in ("all_gather", "chain") else m, k, generator=generator)
