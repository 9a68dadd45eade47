"""Schedules whose pieces shrink towards the end of what arrives: few of them, and a small one last.

    link      |     1     |       2      |    2    |   3   |  3  | 3 | 3|3|
    compute   0 0 0 0 0 0 |     1     |      2       |    2    |  3  | 3| 3|3|3

A rank's own block needs no transfer and is computed first, in one piece. Of the other blocks a piece may be as large as what
is computed between its arrival and the moment at which those behind it have to begin. So sizes shrink by the ratio of compute to
transfers, where that is below 1, down to a last piece that costs next to nothing once it is there; equal slices would all have
to be as small as the last, and each costs a post, a wait and a kernel. Pieces are whole numbers of slices, of which a block has
many (`UNITS`); the block of the rank at a distance d is cut in one way on all ranks.

Where results leave it is the same backwards: small pieces first, so that links start early, and the own block last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .ir import Action, Compute, Kind, Post, Program, Recv, Schedule, Send, Wait
from .machine import Machine
from .network import BYTES_PER_US_PER_GBPS, Uniform
from .simulate import RegionCost
from .transform import OWN_ALONE, reverse, transposed

TAPERED = "tapered"  # round the ring, where blocks can be passed on
TAPERED_DIRECT = "tapered_direct"  # straight from the owner
TAPERS = (TAPERED, TAPERED_DIRECT)
UNITS = 32  # slices of a block
STEPS = 12  # of the search for the time at which all is done
LATER = (1.0, 1.002, 1.005, 1.02)  # times that are tried: the first, and those a little later

Cuts = tuple[tuple[int, ...], ...]  # for each distance from 1 on, the sizes of the pieces of a block
Piece = tuple[int, int, int]  # distance of its owner, first slice within the block, slices


def tapered(kind: Kind, family: str, machine: Machine, ranks: int, units: int, cost: RegionCost) -> Iterator[Schedule]:
    """Schedules of blocks of `units` slices, to be tried: fewer pieces first.

    `cost` is that of a slice, and of several in one piece.
    """
    times = _Times.of(machine, ranks, units, cost)
    straight = kind.is_all_to_all or family == TAPERED_DIRECT
    ways = {cuts for rest in (0, max(1, units // 8)) for cuts in _all_cuts(times, ranks - 1, units, rest)}
    for cuts in sorted(ways, key=lambda cuts: (sum(map(len, cuts)), cuts)):
        for across in (True, False) if straight else (True,):
            yield in_pieces(kind, family, ranks, units, cuts, across)


@dataclass(frozen=True)
class _Times:
    """In microseconds: the own block, and of other ones a slice, what a piece takes beside its slices, and the way of a slice."""

    own_us: float
    slice_us: float
    piece_us: float
    transfer_us: float
    start_us: float  # until the first byte flows

    @classmethod
    def of(cls, machine: Machine, ranks: int, units: int, cost: RegionCost) -> _Times:
        scale = max(machine.scale(rank) for rank in range(ranks)) * machine.compute_slowdown
        whole_us, one_us = cost.compute_of(units) * scale, cost.compute_of(1) * scale
        slice_us = max(0.0, whole_us - one_us) / max(1, units - 1)
        piece_us = max(0.0, one_us - slice_us) + machine.post_us
        transfer_us, latency_us = _transfer_us(machine, ranks, cost.slice_bytes)
        return cls(whole_us, slice_us, piece_us, transfer_us, latency_us + machine.post_us)


def _all_cuts(times: _Times, blocks: int, units: int, rest: int) -> Iterator[Cuts]:
    """How to cut the block of each distance, in the order in which they arrive: so that all is done first, or a little later.

    A little later may take fewer pieces. With a `rest` no block but the last is in one piece: so much of it comes by itself, and
    what is there before is passed on meanwhile.
    """
    arrived_us = times.start_us + blocks * units * times.transfer_us
    low = max(arrived_us, times.own_us + blocks * (units * times.slice_us + times.piece_us))
    high = arrived_us + times.own_us + blocks * (units * times.slice_us + (units + 1) * times.piece_us)
    for _ in range(STEPS):
        middle = (low + high) / 2
        if _done_by(middle, times, arrived_us, blocks, units, rest) is None:
            low = middle
        else:
            high = middle
    found = [_done_by(high * later, times, arrived_us, blocks, units, rest) for later in LATER]
    yield from [cuts for cuts in found if cuts is not None] or [((units,),) * blocks]


def _done_by(end_us: float, times: _Times, arrived_us: float, blocks: int, units: int, rest: int) -> Cuts | None:
    """The fewest pieces whose last is computed at `end_us`; None where there are none.

    Backwards from the last: a piece may be as large as what is computed from its arrival on until those behind it have to begin.
    """
    cuts: list[tuple[int, ...]] = []
    behind = count = 0  # slices, and pieces, behind the one in hand
    for block in reversed(range(blocks)):
        sizes: list[int] = []
        left = units
        while left:
            count += 1
            until_us = end_us - arrived_us + behind * (times.transfer_us - times.slice_us) - count * times.piece_us
            size = min(left, int(until_us / times.slice_us) if times.slice_us else left)
            if size < 1:
                return None
            if size == units and block < blocks - 1 and rest:
                size = rest
            sizes.append(size)
            left -= size
            behind += size
        cuts.append(tuple(reversed(sizes)))
    if end_us - behind * times.slice_us - count * times.piece_us < times.own_us:
        return None
    return tuple(reversed(cuts))


def _transfer_us(machine: Machine, ranks: int, size_bytes: float) -> tuple[float, float]:
    """Time of the bytes, and the latency, on a link that others do not use; on the slowest one where they differ."""
    fabric = machine.fabric(ranks)
    GBps = min(fabric.alone_GBps[fabric.link(0, peer)] for peer in range(1, ranks))
    network = machine.network
    shared = 2 if isinstance(network, Uniform) and not network.full_duplex else 1  # with what goes the other way
    return shared * size_bytes / (GBps * BYTES_PER_US_PER_GBPS), max(fabric.latency_us)


def in_pieces(kind: Kind, family: str, ranks: int, units: int, cuts: Cuts, across: bool = True) -> Schedule:
    """The schedule of blocks that are cut as `cuts` say: for each distance, the sizes of the pieces.

    `across`: whether a piece that comes straight from its owner is posted while one from another rank still arrives. They share
    the port then, and the first is late; without, the port stands still between the two.
    """
    assert kind in OWN_ALONE, kind
    pieces = [
        (distance, first, stop - first)
        for distance, of_block in enumerate(cuts, 1)
        for first, stop in pairwise(accumulate(of_block, initial=0))
    ]
    if kind.is_all_to_all or family == TAPERED_DIRECT:
        program = _straight(kind, ranks, units, pieces, across)
    else:
        program = _round_the_ring(ranks, units, pieces)
    if kind is Kind.REDUCE_SCATTER:
        program = reverse(program, reduces=True)
    elif kind is Kind.ALL_TO_ALL_OUT:
        program = reverse(program, reduces=False, rename=lambda slice_: transposed(slice_, ranks, units))
    return Schedule(kind, family, ranks, units, relative=program)


def _round_the_ring(ranks: int, units: int, pieces: list[Piece]) -> Program:
    """Rank 0's part in a gather: what has arrived is passed on, in the pieces of the next distance."""

    def block(distance: int) -> int:
        return -distance % ranks * units

    def post(step: int) -> Post:
        distance, first, count = pieces[step]
        send = Send(block(distance - 1) + first, 1 % ranks, count)
        return Post(step, send, Recv(block(distance) + first, -1 % ranks, count))

    def is_held(step: int, turn: int) -> bool:
        """Whether what a post passes on is there, once the piece of this turn is."""
        distance, first, count = pieces[step]
        nearer, start, size = pieces[turn - 1] if turn else (0, 0, units)
        return distance <= nearer or (distance == nearer + 1 and first + count <= start + size)

    return _computing(units, pieces, block, post, is_held)


def _straight(kind: Kind, ranks: int, units: int, pieces: list[Piece], across: bool) -> Program:
    """Rank 0's part where each block comes straight from its owner."""

    def block(source: int, destination: int = 0) -> int:
        source %= ranks
        return (source * ranks + destination % ranks if kind.is_all_to_all else source) * units

    def post(step: int) -> Post:
        distance, first, count = pieces[step]
        send = Send(block(0, distance) + first, distance % ranks, count)
        return Post(step, send, Recv(block(-distance) + first, -distance % ranks, count))

    def is_due(step: int, turn: int) -> bool:
        """The piece that is needed next, and the one behind it, so that the link does not stand still."""
        return step <= turn or (step == turn + 1 and (across or pieces[step][0] == pieces[turn][0]))

    return _computing(units, pieces, lambda distance: block(-distance), post, is_due)


def _computing(
    units: int,
    pieces: list[Piece],
    block: Callable[[int], int],
    post: Callable[[int], Post],
    is_due: Callable[[int, int], bool],
) -> Program:
    """The own block, then one piece a turn: it is awaited, what `is_due(step, turn)` is posted, and it is computed."""
    program: list[Action] = []
    posted = 0
    for turn in range(len(pieces) + 1):
        if turn:
            program.append(Wait(turn - 1))
        while posted < len(pieces) and is_due(posted, turn):
            program.append(post(posted))
            posted += 1
        distance, first, count = pieces[turn - 1] if turn else (0, 0, units)
        program.append(Compute(block(distance) + first, count=count))
    return tuple(program)
