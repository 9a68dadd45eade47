"""Ways to cut blocks into pieces, for the property tests of schedules and of rewrites."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

from hypothesis import strategies as st

from fo_compiler.passes import decide
from fo_compiler.schedule import taper
from fo_compiler.schedule.taper import Cuts


@st.composite
def cuts_of(draw: st.DrawFn, ranks: int, units: int) -> Cuts:
    """Any way to cut the block of each distance."""
    cuts = []
    for _ in range(ranks - 1):
        ends = draw(st.sets(st.integers(1, units - 1), max_size=4)) if units > 1 else set()
        cuts.append(tuple(b - a for a, b in pairwise(sorted({0, units, *ends}))))
    return tuple(cuts)


@contextmanager
def ragged(seed: int) -> Iterator[None]:
    """Tapered schedules in pieces that no cost model would choose: of any size, another one for each distance."""

    def cuts(times: object, blocks: int, units: int, rest: int) -> Iterator[Cuts]:
        generator = random.Random(f"{seed} {blocks} {units}")
        ends = (generator.sample(range(1, units), generator.randrange(units)) for _ in range(blocks))
        yield tuple(tuple(b - a for a, b in pairwise(sorted({0, units, *of_block}))) for of_block in ends)

    decide._choose.cache_clear()
    try:
        with mock.patch.object(taper, "_all_cuts", cuts):
            yield
    finally:
        decide._choose.cache_clear()
