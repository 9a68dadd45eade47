"""The schedule families: small functions that write a program once, in coordinates relative to the rank.

All four post each transfer one rank-step ahead of its use, never all at once: transfers that share a link would
otherwise all arrive late. `p` is the position in the program (slice p of the order in which this rank
computes), `hop = p // m` the distance of its owner.

    all-gather       compute order  r, r-1, r-2, ...        own slice first: it needs no transfer
    reduce-scatter   compute order  r-1, r-2, ..., r        own slice last: it needs no transfer

    ring     every transfer goes to r+1: a gathered slice is forwarded, a running sum grows as it travels
    direct   every transfer goes straight to (or comes straight from) the owner

Source: arXiv 2604.24013, section 3.
"""

from __future__ import annotations

from collections.abc import Callable

from .ir import Action, Add, Compute, Kind, Post, Program, Recv, Schedule, Send, Wait


def _all_gather(ranks: int, m: int, send: Callable[[int], Send], recv_peer: Callable[[int], int]) -> Program:
    program: list[Action] = []
    for p in range(ranks * m):
        if p >= m:
            program.append(Wait(p - m))
        if p < (ranks - 1) * m:
            program.append(Post(p, send(p), Recv(_gather_slice(p + m, ranks, m), recv_peer(p // m))))
        program.append(Compute(_gather_slice(p, ranks, m)))
    return tuple(program)


def _gather_slice(p: int, ranks: int, m: int) -> int:
    return (-(p // m) % ranks) * m + p % m


def _scatter_slice(p: int, ranks: int, m: int) -> int:
    return ((-1 - p // m) % ranks) * m + p % m


def ring_all_gather(ranks: int, m: int) -> Program:
    """Send the slice in hand to r+1, receive the next one from r-1."""
    return _all_gather(
        ranks, m, lambda p: Send(_gather_slice(p, ranks, m), 1 % ranks), lambda hop: -1 % ranks
    )


def direct_all_gather(ranks: int, m: int) -> Program:
    """Send the own slice to r+hop+1, receive that of r-hop-1."""
    return _all_gather(ranks, m, lambda p: Send(p % m, (p // m + 1) % ranks), lambda hop: (-hop - 1) % ranks)


def ring_reduce_scatter(ranks: int, m: int) -> Program:
    """Send the running sum to r+1, receive the next slice's from r-1 while that slice is computed."""
    program: list[Action] = []
    for p in range(ranks * m):
        slice_ = _scatter_slice(p, ranks, m)
        program.append(Compute(slice_))
        if p >= m:
            program += [Wait(p - m), Add(slice_, p - m)]
        if p < (ranks - 1) * m:
            program.append(
                Post(p, Send(slice_, 1 % ranks), Recv(_scatter_slice(p + m, ranks, m), -1 % ranks))
            )
    return tuple(program)


def direct_reduce_scatter(ranks: int, m: int) -> Program:
    """Send the partial sum to its owner r-hop-1, receive a partial sum of the own slice from r+hop+1."""
    program: list[Action] = []
    for p in range(ranks * m):
        hop, part = divmod(p, m)
        slice_ = _scatter_slice(p, ranks, m)
        program.append(Compute(slice_))
        if p >= m:
            program += [Wait(p - m), Add(part, p - m)]
        if p < (ranks - 1) * m:
            program.append(Post(p, Send(slice_, (-hop - 1) % ranks), Recv(part, (hop + 1) % ranks)))
    return tuple(program)


FAMILIES: dict[Kind, dict[str, Callable[[int, int], Program]]] = {
    Kind.ALL_GATHER: {"ring": ring_all_gather, "direct": direct_all_gather},
    Kind.REDUCE_SCATTER: {"ring": ring_reduce_scatter, "direct": direct_reduce_scatter},
}
FAMILY_NAMES = ("ring", "direct")


def build(kind: Kind, family: str, ranks: int, slices_per_rank: int = 1) -> Schedule:
    """Build the uniform schedule `family` for `kind`.

    Raises ValueError for a family that does not exist, or for counts below 1.
    """
    families = FAMILIES[kind]
    if family not in families:
        raise ValueError(f"no schedule family {family!r} for {kind}: expected one of {', '.join(families)}")
    if ranks < 1 or slices_per_rank < 1:
        raise ValueError(f"expected ranks >= 1 and slices_per_rank >= 1, got {ranks} and {slices_per_rank}")
    return Schedule(kind, family, ranks, slices_per_rank, relative=families[family](ranks, slices_per_rank))
