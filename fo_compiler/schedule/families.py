"""The schedule families: small functions that write a program once, in coordinates relative to the rank.

All of them post each transfer one rank-step ahead of its use, never all at once: transfers that share a link would
otherwise all arrive late. `p` is the position in the program (slice p of the order in which this rank
computes), `hop = p // m` the distance of its owner.

    all-gather       compute order  r, r-1, r-2, ...        own slice first: it needs no transfer
    reduce-scatter   compute order  r-1, r-2, ..., r        own slice last: it needs no transfer

    ring            every transfer goes to r+1: a gathered slice is forwarded, a running sum grows as it travels
    bidirectional   two rings, one each way, each with half of the slices: order r, r-1, r+1, r-2, r+2, ...
    direct          every transfer goes straight to (or comes straight from) the owner
    two_level       for nodes of ranks (`two_level.py`)

A chain of gather and scatter has a ring and a direct form (`chain.py`).

A kind in which results leave is made from one in which slices arrive (`transform.py`): its reverse, but for an all-gather of
results, where the gather runs part by part behind the computes.

Source: arXiv 2604.24013, section 3.
"""

from __future__ import annotations

from collections.abc import Callable

from .chain import direct_chain, ring_chain
from .ir import Action, Add, Compute, Kind, Post, Program, Recv, Schedule, Send, Wait
from .transform import all_reduce, gather_out, reverse, transposed
from .two_level import two_level_all_gather, two_level_all_to_all


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
    return _all_gather(ranks, m, lambda p: Send(_gather_slice(p, ranks, m), 1 % ranks), lambda hop: -1 % ranks)


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
            program.append(Post(p, Send(slice_, 1 % ranks), Recv(_scatter_slice(p + m, ranks, m), -1 % ranks)))
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


def bidirectional_all_gather(ranks: int, m: int) -> Program:
    """Slices from below arrive through r-1, slices from above through r+1, in turns; each has two computes to arrive under.

    Twice the throughput of a ring where a link is slower than a port; half the number of hops in any case.
    """

    def offset(p: int) -> int:
        """Whose slice is computed at position p: 0, -1, +1, -2, +2, ..."""
        return -(p + 1) // 2 if p % 2 else p // 2

    def post(p: int, part: int) -> Post:
        """What brings the slice of position p, and sends on the one in hand in the same direction."""
        way = 1 if p % 2 else -1
        sent = (offset(p) + way) % ranks
        return Post(p * m + part, Send(sent * m + part, way % ranks), Recv(offset(p) % ranks * m + part, -way % ranks))

    program: list[Action] = []
    for p in range(ranks):
        for part in range(m):
            if p:
                program.append(Wait(p * m + part))
            program += [post(q, part) for q in ((1, 2) if p == 0 else (p + 2,)) if q < ranks]
            program.append(Compute(offset(p) % ranks * m + part))
    return tuple(program)


def bidirectional_reduce_scatter(ranks: int, m: int) -> Program:
    """Running sums travel both ways round the ring and meet at the owner."""
    return reverse(bidirectional_all_gather(ranks, m), reduces=True)


def direct_all_to_all(ranks: int, m: int) -> Program:
    """Send the slice for r+hop+1, receive the one from r-hop-1."""

    def incoming(p: int) -> int:
        return (-(p // m) % ranks * ranks) * m + p % m

    def outgoing(p: int) -> int:
        return p // m % ranks * m + p % m

    program: list[Action] = []
    for p in range(ranks * m):
        if p >= m:
            program.append(Wait(p - m))
        if p < (ranks - 1) * m:
            hop = p // m + 1
            program.append(Post(p, Send(outgoing(p + m), hop % ranks), Recv(incoming(p + m), -hop % ranks)))
        program.append(Compute(incoming(p)))
    return tuple(program)


def _relayed_all_to_all(ranks: int, m: int, forward: int, backward: int) -> Program:
    """Slices travel from neighbour to neighbour, `forward` hops at most one way and `backward` the other way.

    In turn k everything moves one hop on: what came k hops far and has further to go. It is for networks in which only
    neighbours are near: elsewhere it carries each slice as often as it has hops.
    """
    program: list[Action] = []
    posted: list[int] = []
    step = 0

    def block(source: int, destination: int, part: int) -> int:
        return (source % ranks * ranks + destination % ranks) * m + part

    for k in range(max(forward, backward) + 1):
        program += [Wait(earlier) for earlier in posted]
        posted = []
        for way, reach in ((1, forward), (-1, backward)):
            for part in range(m):
                for further in range(reach - k):
                    send = Send(block(-way * k, way * (1 + further), part), way % ranks)
                    recv = Recv(block(-way * (1 + k), way * further, part), -way % ranks)
                    program.append(Post(step, send, recv))
                    posted.append(step)
                    step += 1
        sources = [0] if k == 0 else [-k] * (k <= forward) + [k] * (k <= backward)
        program += [Compute(block(source, 0, part)) for source in sources for part in range(m)]
    return tuple(program)


def ring_all_to_all(ranks: int, m: int) -> Program:
    """All slices go round the ring one way."""
    return _relayed_all_to_all(ranks, m, ranks - 1, 0)


def bidirectional_all_to_all(ranks: int, m: int) -> Program:
    """Each slice takes the shorter way round the ring."""
    return _relayed_all_to_all(ranks, m, ranks // 2, (ranks - 1) // 2)


def _out_of(exchange: Callable[[int, int], Program]) -> Callable[[int, int], Program]:
    """Results are sent the way that slices come in, backwards in time; the own slice comes last."""
    return lambda ranks, m: reverse(
        exchange(ranks, m), reduces=False, rename=lambda slice_: transposed(slice_, ranks, m)
    )


def _all_reduce_of(gather: Callable[[int, int], Program]) -> Callable[[int, int], Program]:
    return lambda ranks, m: all_reduce(gather(ranks, 1), m)


def _gather_out_of(gather: Callable[[int, int], Program]) -> Callable[[int, int], Program]:
    return lambda ranks, m: gather_out(gather(ranks, 1), m)


FAMILIES: dict[Kind, dict[str, Callable[[int, int], Program]]] = {
    Kind.ALL_GATHER: {
        "ring": ring_all_gather,
        "bidirectional": bidirectional_all_gather,
        "direct": direct_all_gather,
    },
    Kind.REDUCE_SCATTER: {
        "ring": ring_reduce_scatter,
        "bidirectional": bidirectional_reduce_scatter,
        "direct": direct_reduce_scatter,
    },
    Kind.ALL_REDUCE: {
        "ring": _all_reduce_of(ring_all_gather),
        "bidirectional": _all_reduce_of(bidirectional_all_gather),
        "direct": _all_reduce_of(direct_all_gather),
    },
    Kind.ALL_TO_ALL: {
        "direct": direct_all_to_all,
        "ring": ring_all_to_all,
        "bidirectional": bidirectional_all_to_all,
    },
    Kind.CHAIN: {"ring": ring_chain, "direct": direct_chain},
    Kind.ALL_TO_ALL_OUT: {
        "direct": _out_of(direct_all_to_all),
        "ring": _out_of(ring_all_to_all),
        "bidirectional": _out_of(bidirectional_all_to_all),
    },
    Kind.ALL_GATHER_OUT: {
        "direct": _gather_out_of(direct_all_gather),
        "ring": _gather_out_of(ring_all_gather),
        "bidirectional": _gather_out_of(bidirectional_all_gather),
    },
}
FAMILY_NAMES = ("ring", "bidirectional", "direct")  # those that need no more than the number of ranks
TWO_LEVEL = "two_level"


def build(kind: Kind, family: str, ranks: int, slices_per_rank: int = 1, ranks_per_node: int | None = None) -> Schedule:
    """Build the schedule `family` for `kind`. `two_level` also needs `ranks_per_node`.

    Raises ValueError for a family that does not exist, for counts below 1, or for nodes that do not fill the group.
    """
    families = FAMILIES[kind]
    levels = [] if kind is Kind.CHAIN else [TWO_LEVEL]
    if family not in (*families, *levels):
        known = ", ".join([*families, *levels])
        raise ValueError(f"no schedule family {family!r} for {kind}: expected one of {known}")
    if ranks < 1 or slices_per_rank < 1:
        raise ValueError(f"expected ranks >= 1 and slices_per_rank >= 1, got {ranks} and {slices_per_rank}")
    if family != TWO_LEVEL:
        return Schedule(kind, family, ranks, slices_per_rank, relative=families[family](ranks, slices_per_rank))
    if ranks_per_node is None or ranks_per_node < 1 or ranks % ranks_per_node:
        raise ValueError(
            f"schedule family {TWO_LEVEL!r} needs ranks_per_node, a divisor of the group's {ranks} ranks, "
            f"got {ranks_per_node}; a two-level machine has it"
        )
    relative = _two_level(kind, ranks, slices_per_rank, ranks_per_node)
    return Schedule(kind, family, ranks, slices_per_rank, relative=relative, ranks_per_node=ranks_per_node)


def _two_level(kind: Kind, ranks: int, m: int, k: int) -> Program:
    match kind:
        case Kind.ALL_GATHER:
            return two_level_all_gather(ranks, m, k)
        case Kind.REDUCE_SCATTER:
            return reverse(two_level_all_gather(ranks, m, k), reduces=True)
        case Kind.ALL_REDUCE:
            return all_reduce(two_level_all_gather(ranks, 1, k), m)
        case Kind.ALL_GATHER_OUT:
            return gather_out(two_level_all_gather(ranks, 1, k), m)
        case Kind.ALL_TO_ALL:
            return two_level_all_to_all(ranks, m, k)
        case _:
            exchange = two_level_all_to_all(ranks, m, k)
            return reverse(exchange, reduces=False, rename=lambda slice_: transposed(slice_, ranks, m))
