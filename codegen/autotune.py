"""Which tile is fastest on the GPU at hand, measured: an alternative to the table's choice.

    tile = best_tile(("matmul_into", m, k, n, "bf16"), tiles("sm_90", "16bit"), lambda tile: matmul_into(a, b, out, tile=tile))

Unlike `triton.autotune` it runs only when asked, on tensors that the caller gives up to it: kernels that accumulate in place or
raise flags must not be run on live data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from .tiles import Tile

Timer = Callable[[Callable[[], object]], float]

_measured: dict[tuple[Hashable, ...], Tile] = {}


def time_us(run: Callable[[], object]) -> float:
    """Median time of `run` on the current GPU, with a cold L2 cache (`triton.testing.do_bench`)."""
    from triton.testing import do_bench  # type: ignore[import-untyped]

    return float(do_bench(run, warmup=10, rep=50, return_mode="median")) * 1e3


def best_tile(
    key: tuple[Hashable, ...], candidates: Sequence[Tile], run: Callable[[Tile], object], timer: Timer = time_us
) -> Tile:
    """The fastest of `candidates`; ties go to the first. Remembered by device and `key` for this process."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    place = (device, *key, *candidates)
    if place not in _measured:
        times = [timer(lambda tile=tile: run(tile)) for tile in candidates]  # type: ignore[misc]
        _measured[place] = candidates[times.index(min(times))]
    return _measured[place]
