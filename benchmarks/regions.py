"""What is measured: one region (a collective and a matmul), and every way of running it.

Compute comes in two kinds. `matmul` is a real one. `standin` is an op of this benchmark that sleeps in proportion to its
rows instead of multiplying, so that more ranks than cores are meaningful: the cores are free for the transfers, as they
are beside an accelerator. The product is told about the op with `fo_compiler.register_rule`, as any user can.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import fo_compiler
from fo_compiler.runtime import ops

# Names of torch 2.13 on, and before.
all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor

KINDS = ("all_gather", "reduce_scatter")
COMPUTES = ("standin", "matmul")
CHUNKS = (2, 4, 8)
ROWS = 512  # of one rank's slice


@dataclass(frozen=True)
class Case:
    """One region: `slice_mb` (MiB) of one rank's part of the collective, `slice_ms` of compute on one part."""

    kind: str
    ranks: int
    slice_mb: float
    slice_ms: float
    compute: str = "standin"
    columns: int = 16  # of the matmul's other factor; for `matmul`, what makes it last `slice_ms`

    @property
    def slice_bytes(self) -> int:
        return ROWS * 4 * self.width

    @property
    def width(self) -> int:
        """Columns of the tensor that travels."""
        return max(1, round(self.slice_mb * 2**20 / ROWS / 4))

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, K, N of the whole matmul: a gathered tensor is [M, K], a scattered one [M, N]."""
        if self.kind == "all_gather":
            return ROWS * self.ranks, self.width, self.columns
        return ROWS * self.ranks, self.columns, self.width

    def lasting(self, us_per_column: float) -> Case:
        """The case with as many columns as make one slice last `slice_ms`."""
        return replace(self, columns=max(16, round(self.slice_ms * 1e3 / us_per_column / 16) * 16))


# --- the stand-in ---------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("fo_bench", "DEF")
_LIBRARY.define("timed_matmul(Tensor x, Tensor w, float us_per_row) -> Tensor", tags=(torch.Tag.flexible_layout,))


def _timed_matmul(x: Tensor, w: Tensor, us_per_row: float) -> Tensor:
    end = time.perf_counter() + x.shape[0] * us_per_row * 1e-6
    result = x.new_empty(x.shape[0], w.shape[1])
    time.sleep(max(0.0, end - time.perf_counter()))
    return result


def _timed_matmul_fake(x: Tensor, w: Tensor, us_per_row: float) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


_LIBRARY.impl("timed_matmul", _timed_matmul, "CompositeExplicitAutograd")
torch.library.register_fake("fo_bench::timed_matmul", _timed_matmul_fake, lib=_LIBRARY)
timed_matmul = torch.ops.fo_bench.timed_matmul.default
fo_compiler.register_rule(timed_matmul, "mk,kn->mn", is_matmul=True)


# --- the region -----------------------------------------------------------------------------------------------------


class Region(nn.Module):
    """x_shard [M / R, K] -> all-gather -> @ w [K, N], or x [M, K] @ w -> reduce-scatter -> [M / R, N]."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.us_per_row = case.slice_ms * 1e3 / ROWS
        _, k, n = case.shape
        self.register_buffer("w", torch.randn(k, n, generator=torch.Generator().manual_seed(1)))

    def body(self, x: Tensor) -> Tensor:
        assert isinstance(self.w, Tensor)
        if self.case.compute == "matmul":
            return torch.mm(x, self.w)
        result: Tensor = timed_matmul(x, self.w, self.us_per_row)
        return result

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        if self.case.kind == "all_gather":
            return self.body(all_gather(x, 0, group))
        result: Tensor = reduce_scatter(self.body(x), "sum", 0, group)
        return result


def example_input(case: Case) -> Tensor:
    """This rank's x: its shard of a tensor that is gathered, or all of one whose product is scattered."""
    m, k, _ = case.shape
    generator = torch.Generator().manual_seed(2 + dist.get_rank())
    return torch.randn(ROWS if case.kind == "all_gather" else m, k, generator=generator)


# --- ways to run it -------------------------------------------------------------------------------------------------

Way = Callable[[], Any]


def ways(case: Case, machine: str, options: dict[str, Any]) -> dict[str, Way]:
    """Name -> one run of the region on this rank."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    region, x = Region(case), example_input(case)
    torch.compiler.reset()
    inductor = torch.compile(region, backend="inductor")
    alone = torch.compile(region.body, backend="inductor")
    ours = torch.compile(region, backend="flashoverlap", options={"machine": machine, **options})
    m, k, _ = case.shape
    body_input = torch.randn(m, k)
    part = torch.randn(ROWS, case.width)
    whole = torch.randn(m, case.width)
    sliced = _sliced_gather if case.kind == "all_gather" else _sliced_scatter
    transfers = _gather_transfers if case.kind == "all_gather" else _scatter_transfers
    collective: Way = (
        (lambda: dist.all_gather_into_tensor(torch.empty_like(whole), part))
        if case.kind == "all_gather"
        else (lambda: dist.reduce_scatter_tensor(torch.empty_like(part), whole))
    )
    return {
        "serial": lambda: funcol.wait_tensor(region(x)),
        "inductor": lambda: inductor(x),
        **{f"sliced_{chunks}": _bind(sliced, region, x, chunks) for chunks in CHUNKS},
        "overlap": lambda: ours(x),
        "compute": lambda: alone(body_input),
        "collective": collective,
        "transfers": lambda: transfers(part if case.kind == "all_gather" else whole),
    }


def _bind(function: Callable[..., Any], *args: Any) -> Way:
    return lambda: function(*args)


def _sliced_gather(region: Region, x: Tensor, chunks: int) -> Tensor:
    """What one does by hand: gather the next chunk of the rows while this one is multiplied."""
    ranks, rows = region.case.ranks, ROWS // chunks
    result = x.new_empty(ranks, chunks, rows, region.case.columns)

    def start(chunk: int) -> tuple[Tensor, Any]:
        gathered = x.new_empty(ranks * rows, x.shape[1])
        return gathered, dist.all_gather_into_tensor(gathered, x[chunk * rows : (chunk + 1) * rows], async_op=True)

    coming = start(0)
    for chunk in range(chunks):
        gathered, work = coming
        work.wait()
        if chunk + 1 < chunks:
            coming = start(chunk + 1)
        result[:, chunk] = region.body(gathered).view(ranks, rows, -1)
    return result.view(-1, region.case.columns)


def _sliced_scatter(region: Region, x: Tensor, chunks: int) -> Tensor:
    """What one does by hand: reduce-scatter a chunk of every rank's rows while the next one is multiplied."""
    ranks, rows = region.case.ranks, ROWS // chunks
    result = x.new_empty(ROWS, region.case.width)
    by_chunk = x.view(ranks, chunks, rows, -1)
    going: list[tuple[Any, Tensor]] = []
    for chunk in range(chunks):
        product = region.body(by_chunk[:, chunk].reshape(ranks * rows, -1))
        part = result[chunk * rows : (chunk + 1) * rows]
        going.append((dist.reduce_scatter_tensor(part, product, async_op=True), product))
    for work, _ in going:
        work.wait()
    return result


def _gather_transfers(part: Tensor) -> list[Tensor]:
    """The transfers of an all-gather alone, round the ring."""
    parts = [part]
    for _ in range(dist.get_world_size() - 1):
        parts.append(_ring_step(parts[-1]))
    return parts


def _scatter_transfers(whole: Tensor) -> Tensor:
    """The transfers and sums of a reduce-scatter alone, round the ring."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = whole.chunk(ranks)
    total = parts[(rank - 1) % ranks]
    for step in range(1, ranks):
        total = _ring_step(total) + parts[(rank - 1 - step) % ranks]
    return total


def _ring_step(tensor: Tensor) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    received = ops.exchange(tensor, (rank + 1) % ranks, (rank - 1) % ranks, dist.group.WORLD.group_name, "benchmark")
    result: Tensor = ops.wait(received, tensor)
    return result
