"""all_gather_matmul under Triton's interpreter: slices arrive from a thread while the kernel runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fo_compiler.codegen.kernels import all_gather_matmul, all_gather_matmul_reference, order_table
from fo_compiler.codegen.order import gather_order
from fo_compiler.errors import KernelError
from fo_compiler.schedule import FAMILIES, Kind, build

from .helpers import (
    FLOATS,
    OPERANDS,
    POLLS,
    SHORT,
    TILE,
    TILES,
    Pause,
    assert_close_to_exact,
    block_of,
    examples,
    meanwhile,
    strided,
    values,
)
from .test_flags import int32


@examples(8)
@given(st.data())
def test_slices_that_arrive_late_give_what_the_plain_gather_gives(data: st.DataObject) -> None:
    draw = data.draw
    ranks, m = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    schedule = build(Kind.ALL_GATHER, draw(st.sampled_from(sorted(FAMILIES[Kind.ALL_GATHER]))), ranks, m)
    rank = draw(st.integers(0, ranks - 1))
    block, depth, cols = block_of(draw), draw(SHORT), draw(SHORT)
    dtype = draw(OPERANDS)
    whole = values(0, ranks * m, *block, depth, dtype=dtype)
    b = strided(draw, depth, cols, dtype=dtype)
    bias = values(2, cols, dtype=torch.float32) if draw(st.booleans()) else None
    # What has not arrived is not a number; own slices never arrive.
    gathered = torch.full(whole.shape, torch.nan).to(dtype)
    # The joined output of a batch: [outer, slices * inner, n], seen slice by slice.
    joined = torch.full((*block[:-1], ranks * m * block[-1], cols), torch.nan, dtype=draw(FLOATS))
    out = joined.unflatten(-2, (ranks * m, block[-1])).movedim(-3, 0)
    order = gather_order(schedule, rank)
    flags, epoch, late = (
        torch.full((ranks * m,), 2, dtype=torch.int32),
        int32(3),
        torch.zeros(ranks * m, dtype=torch.int32),
    )

    def transport(pause: Pause) -> None:
        for group in order:
            if group.own_part is None:
                pause()
                gathered[group.slice].copy_(whole[group.slice])
                flags[group.slice] = 3

    own = whole[rank * m : (rank + 1) * m]
    launched = {"tile": draw(TILES), "programs": draw(st.integers(1, 5)), "polls": POLLS}
    with meanwhile(transport):
        all_gather_matmul(own, gathered, b, out, order_table(order), flags, epoch, late, bias=bias, **launched)
    assert not late.any()
    exact = all_gather_matmul_reference(whole, b, bias=bias)
    magnitude = all_gather_matmul_reference(whole.abs(), b.abs(), bias=None if bias is None else bias.abs())
    assert_close_to_exact(out, exact, magnitude, depth)


def arguments(ranks: int = 3, rows: int = 20) -> dict[str, object]:
    """Of rank 1, whose peers never send."""
    order = gather_order(build(Kind.ALL_GATHER, "ring", ranks, 1), 1)
    gathered = torch.full((ranks, rows, 8), torch.nan)
    return {
        "own": torch.ones(1, rows, 8),
        "gathered": gathered,
        "b": torch.ones(8, 20),
        "out": torch.zeros(ranks, rows, 20),
        "order": order_table(order),
        "flags": torch.zeros(ranks, dtype=torch.int32),
        "epoch": int32(1),
        "late": torch.zeros(ranks, dtype=torch.int32),
        "tile": TILE,
        "programs": 2,
    }


def test_a_slice_that_never_comes_is_marked_and_the_kernel_ends() -> None:
    given_ = arguments()
    all_gather_matmul(**given_, polls=4)  # type: ignore[arg-type]
    assert given_["late"].tolist() == [1, 0, 1]  # type: ignore[attr-defined]
    assert (given_["out"][1] == 8).all()  # type: ignore[index]


def test_a_flag_that_is_up_too_early_shows_so_the_wait_is_what_guards_the_data() -> None:
    given_ = arguments()
    given_["flags"].fill_(1)  # type: ignore[attr-defined]
    all_gather_matmul(**given_)  # type: ignore[arg-type]
    assert torch.isnan(given_["out"][0]).all()  # type: ignore[index]


def test_own_slices_of_other_strides_are_refused() -> None:
    given_ = arguments() | {"own": torch.ones(1, 8, 20).mT}
    with pytest.raises(KernelError, match="own: expected a slice with the strides of one of gathered"):
        all_gather_matmul(**given_)  # type: ignore[arg-type]
