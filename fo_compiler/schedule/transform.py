"""Schedules made from schedules.

    reverse      a gather run backwards in time is a scatter: where a slice was passed on, sums now come together
    gather_out   a gather of parts that are computed one after the other: each is passed on while the next are computed
    all_reduce   the reduce-scatter of one part, with the all-gather of the part before it in flight underneath
    own_together one rank's own slices side by side, to be computed in one piece

So a family is written once, as a gather, and the kinds in which results leave follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from .ir import Action, Add, Compute, Kind, Post, Program, Recv, Schedule, Send, Store, Wait

SliceMap = Callable[[int], int]
# Kinds in which a rank's own slices neither wait for a transfer nor does one wait for them.
OWN_ALONE = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_OUT)


def reverse(program: Program, *, reduces: bool, rename: SliceMap = lambda slice_: slice_) -> Program:
    """Run `program`, of a kind in which slices arrive, backwards in time.

    A transfer of a slice from a to b becomes one from b to a: its wait is where it is posted, its post where it is awaited.
    With `reduces` what arrives is a partial sum and is added. `rename` gives the slices their names in the new kind.
    """
    posts = {action.step: action for action in program if isinstance(action, Post)}
    backwards: list[Action] = []
    for action in reversed(program):
        match action:
            case Compute(slice_):
                backwards.append(replace(action, slice=rename(slice_)))
            case Wait(step):
                post = posts[step]
                send = Send(rename(post.recv.slice), post.recv.peer, post.recv.count) if post.recv else None
                recv = Recv(rename(post.send.slice), post.send.peer, post.send.count) if post.send else None
                backwards.append(Post(step, send, recv))
            case Post(step, send_, _):
                backwards.append(Wait(step))
                if reduces and send_ is not None:
                    backwards.append(Add(rename(send_.slice), step, count=send_.count))
            case _:
                raise AssertionError(f"{action} has no place in a gather")
    return renumbered(backwards)


def transposed(slice_: int, ranks: int, m: int) -> int:
    """The slice of an all-to-all that goes the other way."""
    group, part = divmod(slice_, m)
    source, destination = divmod(group, ranks)
    return (destination * ranks + source) * m + part


def renumbered(program: Sequence[Action]) -> Program:
    """The same program with steps counted from 0 in the order of their posts."""
    steps = {step: i for i, step in enumerate(a.step for a in program if isinstance(a, Post))}
    return tuple(a if isinstance(a, Compute) else replace(a, step=steps[a.step]) for a in program)


def all_reduce(gather: Program, m: int) -> Program:
    """Rank 0's part in an all-reduce in `m` parts, from its part in a `gather` of one slice a rank (slice = owner).

    Part j is computed and its sums travel to their owners while the finished sums of part j - 1 travel back. The last part's way
    back has nothing to hide under: it is 1 / m of the whole.
    """
    scatter = reverse(gather, reduces=True)
    out: list[Action] = []
    steps: dict[tuple[str, int, int], int] = {}

    def emit(actions: Sequence[Action], phase: str, part: int) -> None:
        for action in actions:
            if not isinstance(action, Compute):
                action = replace(action, step=steps.setdefault((phase, part, action.step), len(steps)))
            out.append(_with_slices(action, partial(_of_part, m, part)))

    scatter_turns = _turns(scatter, compute_first=True)
    gather_turns = _turns(_storing(gather), compute_first=False)
    for part in range(m):
        for scattering, gathering in zip(scatter_turns, gather_turns, strict=True):
            # The finished sums move on before the compute, a new sum after it: each transfer has one compute to itself
            # at the ends of a part, and no two of a rank start at once.
            emit([a for a in gathering if part and not isinstance(a, Compute)], "gather", part - 1)
            emit(scattering, "scatter", part)
    # Nothing is computed any more: what is finished here leaves at once, the rest as soon as it has arrived.
    tail = [action for action in _storing(gather) if not isinstance(action, Compute)]
    at_once = [isinstance(a, Post) and a.send is not None and a.send.slice == 0 for a in tail]
    emit([a for a, now in zip(tail, at_once, strict=True) if now], "gather", m - 1)
    emit([a for a, now in zip(tail, at_once, strict=True) if not now], "gather", m - 1)
    return renumbered(out)


def gather_out(gather: Program, m: int) -> Program:
    """Rank 0's part in gathering `m` parts that each rank computes, from its part in a `gather` of one slice a rank.

    A part leaves its owner as soon as it is computed. What has to be passed on is awaited and sent behind the compute that
    follows, one hop a compute; what nobody waits for is awaited at the end.
    """
    hops: list[list[Post]] = []
    came_in: dict[int, tuple[int, int]] = {}  # slice -> the hop and the step of the post that brings it
    for post in (action for action in gather if isinstance(action, Post)):
        assert post.send is not None
        assert post.recv is not None
        hop = came_in[post.send.slice][0] + 1 if post.send.slice in came_in else 0
        came_in[post.recv.slice] = hop, post.step
        hops += [[] for _ in range(hop + 1 - len(hops))]
        hops[hop].append(post)
    program: list[Action] = []
    pending: dict[tuple[int, int], int] = {}  # (step in the gather, part) -> step
    steps = 0
    for turn in range(m + len(hops) - 1 if hops else m):
        if turn < m:
            program.append(Compute(turn))
        for hop, post in [(hop, post) for hop, posts in enumerate(hops) for post in posts]:
            part = turn - hop
            if not 0 <= part < m:
                continue
            needed = (came_in[post.send.slice][1], part) if hop and post.send else None
            if needed in pending:
                program.append(Wait(pending.pop(needed)))
            program.append(_with_slices(replace(post, step=steps), partial(_of_part, m, part)))
            pending[post.step, part] = steps
            steps += 1
    return (*program, *map(Wait, pending.values()))


def _of_part(m: int, part: int, slice_: int) -> int:
    return slice_ * m + part


def _turns(program: Program, *, compute_first: bool) -> list[list[Action]]:
    """The program cut at its computes: each turn has one, at its beginning or at its end."""
    turns: list[list[Action]] = []
    turn: list[Action] = []
    for action in program:
        if isinstance(action, Compute) and compute_first and turn:
            turns.append(turn)
            turn = []
        turn.append(action)
        if isinstance(action, Compute) and not compute_first:
            turns.append(turn)
            turn = []
    if turn:
        turns.append(turn)
    return turns


def _storing(gather: Program) -> Program:
    """The gather with each received slice stored as a finished sum."""
    received = {a.step: a.recv.slice for a in gather if isinstance(a, Post) and a.recv is not None}
    out: list[Action] = []
    for action in gather:
        out.append(action)
        if isinstance(action, Wait) and action.step in received:
            out.append(Store(received[action.step], action.step))
    return tuple(out)


def _with_slices(action: Action, rename: SliceMap) -> Action:
    match action:
        case Compute() | Add() | Store():
            return replace(action, slice=rename(action.slice))
        case Post(_, send, recv):
            return replace(
                action,
                send=send and replace(send, slice=rename(send.slice)),
                recv=recv and replace(recv, slice=rename(recv.slice)),
            )
        case Wait():
            return action


def own_together(schedule: Schedule) -> Schedule:
    """The schedule with each rank's own slices computed in one piece.

    What needs no transfer, or leaves in none, is cut for the transfers' sake alone. Where slices arrive it comes first, and only
    posts lie between: they do not wait for compute. Where results leave it comes last, and what lies between only takes sums in.
    A program stays as it is where a rank has one slice of its own, or where the piece would keep something waiting.
    """
    if schedule.kind not in OWN_ALONE or schedule.slices_per_rank == 1:
        return schedule
    if schedule.relative is not None:
        return replace(schedule, relative=_own_together(schedule, schedule.relative, 0))
    return replace(
        schedule, programs=tuple(_own_together(schedule, program, r) for r, program in enumerate(schedule.programs))
    )


def _own_together(schedule: Schedule, program: Program, rank: int) -> Program:
    kind, m = schedule.kind, schedule.slices_per_rank
    first = (rank * schedule.ranks + rank if kind.is_all_to_all else rank) * m
    own = range(first, first + m)
    places = [i for i, action in enumerate(program) if isinstance(action, Compute) and action.slice in own]
    start, stop = places[0], places[-1] + 1
    between = [action for i, action in enumerate(program[start:stop], start) if i not in places]
    if not all(isinstance(action, Post if kind.arrives_first else (Wait, Add)) for action in between):
        return program
    piece = Compute(first, count=m)
    together = (*between, piece) if kind.arrives_first else (piece, *between)
    return (*program[:start], *together, *program[stop:])
