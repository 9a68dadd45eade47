"""Chains: all-gather -> body -> reduce-scatter as one schedule.

One slice arrives, runs through the whole body, and its partial sum leaves. A gather starts with the own slice and a scatter
ends with it; in a chain it is cut in two:

    compute   own head | r-1 | r-2 | ... | r+1 | own tail
    arrives        r-1 | r-2 | ... | r+1 |
    leaves                   | r-1 | r-2 | ... | r+1

The head hides the first arrival and the tail the last departure. With `m` slices a rank the head are the first m / 2 of its
own; at m = 1 there is no tail.
"""

from __future__ import annotations

from collections.abc import Callable

from .ir import Action, Add, Compute, Post, Program, Recv, Send, Wait


def _chain(
    ranks: int,
    m: int,
    gather: Callable[[int, int], tuple[Send, Recv]],
    scatter: Callable[[int, int], tuple[Send, Recv]],
) -> Program:
    """The program of rank 0. At hop i (1 to N - 1) it computes part j of the slice of rank -i.

    `gather(i, j)` is the transfer that brings this slice, `scatter(i, j)` the one that takes its sum away; what that one
    receives is added behind the computes of the next hop.
    """
    head = range((m + 1) // 2)
    program: list[Action] = []
    scatters: dict[tuple[int, int], int] = {}
    gathers: dict[tuple[int, int], int] = {}

    def post_gather(hop: int, part: int) -> None:
        if hop < ranks:
            gathers[hop, part] = len(gathers) + len(scatters)
            program.append(Post(gathers[hop, part], *gather(hop, part)))

    def add_received(hop: int, part: int) -> None:
        """What came while hop `hop` was sent: part of the next hop's slice."""
        if (hop, part) in scatters:
            step = scatters[hop, part]
            program.extend((Wait(step), Add(scatter(hop, part)[1].slice, step)))

    for part in range(m):
        post_gather(1, part)
    program += [Compute(part) for part in head]
    for hop in range(1, ranks):
        for part in range(m):
            program.append(Wait(gathers[hop, part]))
            post_gather(hop + 1, part)
            program.append(Compute(-hop % ranks * m + part))
            add_received(hop - 1, part)
            scatters[hop, part] = len(gathers) + len(scatters)
            program.append(Post(scatters[hop, part], *scatter(hop, part), sums=True))
    program += [Compute(part) for part in range(m) if part not in head]
    for part in range(m):
        add_received(ranks - 1, part)
    return tuple(program)


def ring_chain(ranks: int, m: int) -> Program:
    """Slices and running sums both go to r+1: the sum of a slice is one step behind the slice, and ends at its owner."""

    def slice_of(hop: int, part: int) -> int:
        return -hop % ranks * m + part

    def gather(hop: int, part: int) -> tuple[Send, Recv]:
        return Send(slice_of(hop - 1, part), 1 % ranks), Recv(slice_of(hop, part), -1 % ranks)

    def scatter(hop: int, part: int) -> tuple[Send, Recv]:
        return Send(slice_of(hop, part), 1 % ranks), Recv(slice_of(hop + 1, part), -1 % ranks)

    return _chain(ranks, m, gather, scatter)


def direct_chain(ranks: int, m: int) -> Program:
    """A slice comes straight from its owner, and its partial sum goes straight back."""

    def gather(hop: int, part: int) -> tuple[Send, Recv]:
        return Send(part, hop), Recv(-hop % ranks * m + part, -hop % ranks)

    def scatter(hop: int, part: int) -> tuple[Send, Recv]:
        return Send(-hop % ranks * m + part, -hop % ranks), Recv(part, hop)

    return _chain(ranks, m, gather, scatter)
