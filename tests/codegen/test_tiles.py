"""The tile table, the rule that picks from it, and the measured alternative."""

from __future__ import annotations

import pytest

from fo_compiler.codegen.autotune import best_tile
from fo_compiler.codegen.tiles import (
    MULTIPROCESSORS,
    TARGETS,
    Tile,
    default_tile,
    fitting_tiles,
    operand_kinds,
    target_for,
    tiles,
)
from fo_compiler.errors import KernelError

ROWS = [(target, kind) for target in TARGETS for kind in operand_kinds(target)]


@pytest.mark.parametrize(("target", "kind"), ROWS)
def test_every_row_has_a_tile_for_every_form_and_sizes_are_powers_of_two(target: str, kind: str) -> None:
    assert fitting_tiles(target, kind, heavy=True)
    for tile in tiles(target, kind):
        for size in (tile.block_m, tile.block_n, tile.block_k, tile.warps):
            assert size & (size - 1) == 0
        assert min(tile.block_m, tile.block_n, tile.block_k) >= 16  # the least that tl.dot takes


@pytest.mark.parametrize(("target", "kind"), ROWS)
def test_a_large_matmul_gets_the_largest_tile_and_a_small_one_the_smallest(target: str, kind: str) -> None:
    assert default_tile(target, kind, 16384, 16384) == tiles(target, kind)[0]
    assert default_tile(target, kind, 16, 16) == tiles(target, kind)[-1]
    assert not default_tile(target, kind, 16384, 16384, heavy=True).plain


@pytest.mark.parametrize(("target", "kind"), ROWS)
def test_a_tile_gives_every_multiprocessor_one_where_any_tile_does(target: str, kind: str) -> None:
    for m in (64, 256, 1024, 4096):
        tile = default_tile(target, kind, m, 4096)
        assert tile.count(m, 4096) >= MULTIPROCESSORS[target] or tile == tiles(target, kind)[-1]


def test_a_tile_is_not_twice_as_high_as_a_slice_however_many_slices_there_are() -> None:
    assert default_tile("sm_90", "16bit", 64, 8192, slices=64).block_m == 64


def test_devices_that_are_not_in_the_table_use_a_row_that_they_can_run() -> None:
    assert [target_for(c) for c in ((8, 0), (8, 9), (9, 0), (10, 3), (12, 0))] == [
        "sm_80", "sm_80", "sm_90", "sm_100", "sm_80",
    ]  # fmt: skip
    with pytest.raises(KernelError, match=r"compute capability 8\.0 or newer, got 7\.5"):
        target_for((7, 5))


def test_unknown_rows_are_refused_by_name() -> None:
    with pytest.raises(KernelError, match="one of 16bit, tf32, fp32 on sm_80, got fp8"):
        tiles("sm_80", "fp8")
    with pytest.raises(KernelError, match="target: expected one of sm_80, sm_90, sm_100, got sm_75"):
        operand_kinds("sm_75")


def test_the_fastest_tile_is_measured_once_and_ties_go_to_the_first() -> None:
    candidates = [Tile(16, 16, 16, 1, 1), Tile(32, 16, 16, 1, 1), Tile(64, 16, 16, 1, 1)]
    ran: list[Tile] = []
    times = iter([3.0, 1.0, 1.0])

    def timer(run: object) -> float:
        run()  # type: ignore[operator]
        return next(times)

    for _ in range(2):
        assert best_tile(("test", 1), candidates, ran.append, timer) == candidates[1]
    assert ran == candidates
