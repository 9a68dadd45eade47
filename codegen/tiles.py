"""Tile sizes of the matmul kernels by architecture and dtype: a table, and the rule that picks from it.

A row lists tiles from large to small. A large tile reads each operand less often; a small one makes enough tiles for every
multiprocessor. Register and shared-memory use of each row is checked by compiling it (`cross_compile.py`): no row spills.

Sources: shared memory of a block is at most 163 KB (sm_80) and 227 KB (sm_90, sm_100), CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability"; multiprocessors of A100, H100 SXM and B200 from NVIDIA's data sheets.
The choice among shapes that fit is ours, to be corrected by `make gpu-check` (`autotune.py` measures).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import KernelError

TARGETS = ("sm_80", "sm_90", "sm_100")
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
SHARED_MEMORY_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}


@dataclass(frozen=True)
class Tile:
    """A program computes `block_m` x `block_n` outputs, `block_k` of the contracted dim at a time.

    `group_m` tile rows are walked together, so that tiles in flight share what they read in the L2 cache. `plain`: only for forms
    that do no more to a tile than to round it; a bias, an epilogue or a sum so far would spill.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    plain: bool = False
    group_m: int = 8

    def count(self, m: int, n: int) -> int:
        """Number of tiles of an [m, n] output."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k}/w{self.warps}s{self.stages}"


_HOPPER = {
    "16bit": (
        Tile(128, 256, 64, 8, 3, plain=True),
        Tile(128, 128, 64, 8, 4),
        Tile(64, 128, 64, 4, 4),
        Tile(64, 64, 64, 4, 4),
    ),
    "tf32": (Tile(128, 128, 32, 8, 4), Tile(64, 128, 32, 4, 4), Tile(64, 64, 32, 4, 4)),
    "fp32": (Tile(128, 64, 16, 8, 2), Tile(64, 64, 16, 8, 3)),
    "fp8": (Tile(128, 128, 128, 8, 4), Tile(64, 128, 128, 4, 4)),
}
# By how the operands are multiplied: 16-bit types and tf32 and fp8 on tensor cores, fp32 ("ieee") on the usual ones.
_TABLE: dict[str, dict[str, tuple[Tile, ...]]] = {
    "sm_80": {
        "16bit": (
            Tile(128, 128, 32, 4, 4, plain=True),
            Tile(128, 128, 32, 8, 4),
            Tile(64, 128, 32, 4, 4),
            Tile(64, 64, 32, 4, 4),
        ),
        "tf32": (Tile(128, 128, 16, 8, 4), Tile(64, 64, 32, 4, 3)),
        "fp32": (Tile(128, 64, 16, 8, 3), Tile(64, 64, 16, 4, 3)),
    },
    "sm_90": _HOPPER,
    "sm_100": {
        **_HOPPER,
        "tf32": (Tile(128, 128, 32, 8, 4, plain=True), Tile(128, 64, 32, 8, 4), Tile(64, 64, 32, 4, 4)),
        "fp32": (Tile(64, 64, 16, 8, 3),),
        "fp8": (Tile(128, 256, 64, 8, 4, plain=True), Tile(128, 128, 128, 8, 4), Tile(64, 128, 128, 4, 4)),
    },
}


def operand_kinds(target: str) -> tuple[str, ...]:
    """The kinds of operands that `target` has tiles for: `fp8` from sm_90 on."""
    return tuple(_row(target))


def tiles(target: str, kind: str) -> tuple[Tile, ...]:
    """The tiles for operands of `kind` ("16bit", "tf32", "fp32", "fp8"), large ones first. Raises KernelError."""
    row = _row(target)
    if kind not in row:
        raise KernelError.wrong("operands", f"one of {', '.join(row)} on {target}", kind)
    return row[kind]


def default_tile(
    target: str,
    kind: str,
    m: int,
    n: int,
    *,
    slices: int = 1,
    heavy: bool = False,
    multiprocessors: int | None = None,
) -> Tile:
    """The largest tile for [m, n] outputs, `slices` of them at once, that still gives every multiprocessor one and is not
    mostly padding.

    `heavy`: more is done to a tile than to round it (bias, epilogue, a sum so far), for which large tiles lack registers.
    """
    candidates = fitting_tiles(target, kind, heavy)
    wanted = multiprocessors or MULTIPROCESSORS[target]
    for tile in candidates:
        if slices * tile.count(m, n) >= wanted and m > tile.block_m // 2 and n > tile.block_n // 2:
            return tile
    return candidates[-1]


def fitting_tiles(target: str, kind: str, heavy: bool) -> tuple[Tile, ...]:
    """The tiles that do not spill."""
    return tuple(t for t in tiles(target, kind) if not (heavy and t.plain))


def target_for(capability: tuple[int, int]) -> str:
    """The row of the table for a device. Raises KernelError before compute capability 8.0.

    A kind of GPU that is not in the table (workstations, 12.x) gets the row that asks least of it: 48 KB and `mma.sync`.
    """
    if capability < (8, 0):
        raise KernelError.wrong("device", "compute capability 8.0 or newer", f"{capability[0]}.{capability[1]}")
    return {9: "sm_90", 10: "sm_100", 11: "sm_100"}.get(capability[0], "sm_80")


def _row(target: str) -> dict[str, tuple[Tile, ...]]:
    if target not in _TABLE:
        raise KernelError.wrong("target", f"one of {', '.join(TARGETS)}", target)
    return _TABLE[target]
