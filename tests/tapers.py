"""Ways to cut blocks into pieces, for the property tests of schedules and of rewrites."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from fo_compiler.schedule.taper import Cuts


@st.composite
def cuts_of(draw: st.DrawFn, ranks: int, units: int) -> Cuts:
    """Any way to cut the block of each distance."""
    cuts = []
    for _ in range(ranks - 1):
        ends = draw(st.sets(st.integers(1, units - 1), max_size=4)) if units > 1 else set()
        cuts.append(tuple(b - a for a, b in pairwise(sorted({0, units, *ends}))))
    return tuple(cuts)
