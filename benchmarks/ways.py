"""Every way of running a region that is compared: eager, Inductor, sliced by hand, ours, and its two halves alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from fo_compiler.runtime import ops

from .regions import ROWS, Case, Region, example_input, set_pace

Way = Callable[[], Any]
CHUNKS = (2, 4, 8)
SLICED = "sliced_"


def ways(case: Case, options: dict[str, Any]) -> dict[str, Way]:
    """Name -> one run of the region on this rank. What does not depend on `options` is compiled once a region."""
    set_pace(case)
    built = _built(replace(case, slice_ms=0.0) if case.compute == "standin" else case)
    # Cases differ in their sizes: without dynamic=False torch would compile later ones for symbolic sizes.
    ours = torch.compile(built.region, backend="flashoverlap", dynamic=False, options=options)
    return {**built.ways, "overlap": lambda: ours(built.x)}


@dataclass(frozen=True)
class _Built:
    region: Region
    x: Tensor
    ways: dict[str, Way]


@lru_cache
def _built(case: Case) -> _Built:
    torch.compiler.config.recompile_limit = (
        200  # one module, compiled for every kind and with the options of every case
    )
    region, x = Region(case), example_input(case)
    inductor = torch.compile(region, backend="inductor", dynamic=False)
    alone = torch.compile(region.body, backend="inductor", dynamic=False)
    body_input = torch.randn(case.shape[:2])
    part, whole = torch.randn(ROWS, case.width), torch.randn(case.rows, case.width)
    return _Built(
        region,
        x,
        {
            "serial": lambda: funcol.wait_tensor(region(x)),
            "inductor": lambda: inductor(x),
            **{f"{SLICED}{chunks}": _bind(sliced, region, x, chunks) for chunks in CHUNKS},
            "compute": lambda: alone(body_input),
            "collective": lambda: collective(case.kind, part, whole),
            "transfers": lambda: transfers(case.kind, part, whole),
        },
    )


def _bind(function: Callable[..., Any], *args: Any) -> Way:
    return lambda: function(*args)


# --- sliced by hand -------------------------------------------------------------------------------------------------


def sliced(region: Region, x: Tensor, chunks: int) -> list[Tensor]:
    """What one does by hand: asynchronous collectives on one chunk of every rank's rows while another is multiplied.

    collective in front   gather 1 | gather 2      | ...            collective behind            | scatter 1 | ...
                                   | multiply 1    | ...                              multiply 1 | multiply 2| ...

    Returns the chunks: that they are joined, in the end or in place, costs nothing here.
    """
    case = region.case
    rows = ROWS // chunks
    results: list[tuple[Any, Tensor]] = []
    coming = _start_gather(case, x, 0, rows) if case.gathers else None
    for chunk in range(chunks):
        if coming is not None:
            work, piece = coming
            work.wait()
            coming = _start_gather(case, x, chunk + 1, rows) if chunk + 1 < chunks else None
        else:
            piece = _chunk(x, chunk, rows, case.ranks)
        results.append(_start_scatter(case, region.body(piece)))
    for work, _ in results:
        if work is not None:
            work.wait()
    return [result for _, result in results]


def _chunk(x: Tensor, chunk: int, rows: int, ranks: int) -> Tensor:
    """Rows [M, ...] -> the rows of one chunk of every rank's part."""
    return x.view(ranks, -1, rows, x.shape[1])[:, chunk].reshape(ranks * rows, -1)


def _start_gather(case: Case, x: Tensor, chunk: int, rows: int) -> tuple[Any, Tensor]:
    piece = x.new_empty(case.ranks * rows, x.shape[1])
    if case.kind == "all_to_all":
        return dist.all_to_all_single(piece, _chunk(x, chunk, rows, case.ranks), async_op=True), piece
    own = x[chunk * rows : (chunk + 1) * rows]
    return dist.all_gather_into_tensor(piece, own, async_op=True), piece


def _start_scatter(case: Case, product: Tensor) -> tuple[Any, Tensor]:
    if case.kind in ("reduce_scatter", "chain"):
        part = product.new_empty(product.shape[0] // case.ranks, product.shape[1])
        return dist.reduce_scatter_tensor(part, product, async_op=True), part
    if case.kind == "all_reduce":
        return dist.all_reduce(product, async_op=True), product
    return None, product


# --- communication alone --------------------------------------------------------------------------------------------


def collective(kind: str, part: Tensor, whole: Tensor) -> None:
    """The group's own collective(s): `part` [M / R, W], `whole` [M, W]."""
    if kind in ("all_gather", "chain"):
        dist.all_gather_into_tensor(torch.empty_like(whole), part)
    if kind in ("reduce_scatter", "chain"):
        dist.reduce_scatter_tensor(torch.empty_like(part), whole)
    if kind == "all_reduce":
        dist.all_reduce(whole)
    if kind == "all_to_all":
        dist.all_to_all_single(torch.empty_like(whole), whole)


def transfers(kind: str, part: Tensor, whole: Tensor) -> None:
    """Our transfers, and the sums of what is reduced, with no compute between them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = whole.chunk(ranks)
    if kind in ("all_gather", "chain"):
        _round_the_ring(part)
    if kind in ("reduce_scatter", "all_reduce", "chain"):
        total = parts[(rank - 1) % ranks]
        for step in range(1, ranks):
            total = _step(total, 1) + parts[(rank - 1 - step) % ranks]
        if kind == "all_reduce":
            _round_the_ring(total)
    if kind == "all_to_all":
        for shift in range(1, ranks):
            _step(parts[(rank + shift) % ranks], shift)


def _round_the_ring(part: Tensor) -> None:
    for _ in range(dist.get_world_size() - 1):
        part = _step(part, 1)


def _step(tensor: Tensor, shift: int) -> Tensor:
    """Send to the rank `shift` above, receive from the one `shift` below."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    above, below = (rank + shift) % ranks, (rank - shift) % ranks
    received = ops.exchange(tensor, above, below, dist.group.WORLD.group_name, "benchmark")
    result: Tensor = ops.wait(received, tensor)
    return result
