"""Goldens of the text timeline: what a person reads in a dump."""

from __future__ import annotations

from fo_compiler.schedule import Kind, build
from fo_compiler.schedule.timeline import text_timeline


def test_an_all_gather_reads_as_a_table() -> None:
    assert text_timeline(build(Kind.ALL_GATHER, "ring", 3), 1) == (
        "all_gather, ring, rank 1 of 3: 3 slices gathered (* own)\n"
        "  compute stream    | in flight meanwhile\n"
        "  compute 1*        | [0] send 1* -> rank 2, recv 0 <- rank 0\n"
        "  wait 0 compute 0  | [1] send 0 -> rank 2, recv 2 <- rank 0\n"
        "  wait 1 compute 2  | -\n"
    )


def test_a_reduce_scatter_reads_as_a_table() -> None:
    assert text_timeline(build(Kind.REDUCE_SCATTER, "direct", 2, 2), 0) == (
        "reduce_scatter, direct x2, rank 0 of 2: 4 partial sums scattered (* own)\n"
        "  compute stream                   | in flight meanwhile\n"
        "  compute 1.0                      | -\n"
        "  compute 1.1                      | [0] send 1.0 -> rank 1, recv 0.0* <- rank 1\n"
        "  compute 0.0*                     | [0] send 1.0 -> rank 1, recv 0.0* <- rank 1; "
        "[1] send 1.1 -> rank 1, recv 0.1* <- rank 1\n"
        "  wait 0 add to 0.0* compute 0.1*  | [1] send 1.1 -> rank 1, recv 0.1* <- rank 1\n"
        "  wait 1 add to 0.1*               | -\n"
    )
