"""Random strided tensors, how far a result in float32 sums may be from float64, and the threads that stand in for peers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from fo_compiler.codegen.tiles import Tile

Draw = Callable[[st.SearchStrategy[Any]], Any]
TILE = Tile(16, 16, 16, 4, 2, group_m=2)
TILES = st.sampled_from([TILE, Tile(16, 32, 16, 4, 2, group_m=1), Tile(32, 16, 32, 4, 2, group_m=3)])
OPERANDS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
FLOATS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
SIZES = st.integers(1, 36)
SHORT = st.integers(1, 20)  # one or two of the smallest tiles
POLLS = 1 << 18  # seconds in the interpreter, where others stand in for peers: a failure there ends in one here


def examples(count: int) -> settings:
    """`count` of them, times FO_KERNEL_EXAMPLES: nightly runs more (tests/codegen/test_interpreted.py)."""
    return settings(max_examples=count * int(os.environ.get("FO_KERNEL_EXAMPLES", "1")), deadline=None)


def values(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 2 - 1).to(dtype)


def strided(draw: Draw, *shape: int, dtype: torch.dtype, fill: bool = True) -> torch.Tensor:
    """A view of a larger tensor: dims in any order, steps of 1 or 2, an offset. What is around it holds NaN or 0."""
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    offsets = [draw(st.integers(0, 2)) for _ in shape]
    base = torch.zeros([offsets[d] + steps[d] * shape[d] for d in order], dtype=dtype)
    view = base.permute([order.index(d) for d in range(len(shape))])
    view = view[tuple(slice(o, o + s * n, s) for o, s, n in zip(offsets, steps, shape, strict=True))]
    assert view.shape == shape
    if fill:
        view.copy_(values(draw(st.integers(0, 99)), *shape, dtype=dtype))
    return view


def block_of(draw: Draw) -> tuple[int, ...]:
    """The rows of a slice: [rows], or [batch, rows]."""
    return (draw(st.integers(1, 20)),) if draw(st.booleans()) else (draw(st.integers(1, 3)), draw(st.integers(1, 9)))


def rounding(dtype: torch.dtype) -> float:
    """Relative: half a unit in the last place; a whole one for bfloat16, which the interpreter cuts off."""
    return torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 else 2)


def assert_close_to_exact(
    result: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int, slope: float = 1.0
) -> None:
    """Within what `terms` float32 additions of addends of `magnitude` and one rounding to the result's dtype may lose.

    `slope`: of the function applied to the sum.
    """
    sums = (terms + 8) * 2.0**-24 * magnitude.double()
    smallest = torch.finfo(result.dtype).tiny
    allowed = slope * sums + rounding(result.dtype) * (exact.abs() + slope * sums) + smallest
    wrong = ~((result.double() - exact).abs() <= allowed)  # NaN is wrong
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}: {result[wrong][:4]} for {exact[wrong][:4]}"


Pause = Callable[[], None]


@contextmanager
def meanwhile(*others: Callable[[Pause], None]) -> Iterator[None]:
    """Others run in threads beside the body, which ends when all of them have.

    They wait by `pause()`. Where the body fails it does not return, so that a failure is told and no thread is waited for.
    """
    over, errors = threading.Event(), list[BaseException]()

    class Over(Exception):
        pass

    def pause() -> None:
        time.sleep(0.001)
        if over.is_set():
            raise Over

    def body_of(other: Callable[[Pause], None]) -> None:
        try:
            other(pause)
        except Over:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body_of, args=(other,), daemon=True) for other in others]
    for thread in threads:
        thread.start()
    try:
        yield
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads), "what ran beside the kernel has not come to its end"
    finally:
        over.set()
    if errors:
        raise errors[0]
