"""How many slice buffers a schedule holds at one time beside the region's own inputs and outputs."""

from __future__ import annotations

from .ir import Add, Compute, Kind, Post, Program, Schedule, Store, Wait


def buffer_slices(schedule: Schedule) -> int:
    """The most slice buffers that any rank holds at one time.

    A received slice lives from the post of its receive to its last use (compute, add, or the wait of the send that forwards it);
    a partial sum from its compute to the wait of the send that takes it away. Gathered results are put together at the end, and
    live until then. What the rank owns is not counted: it is
    there in any case.
    """
    programs = [schedule.relative] if schedule.relative is not None else list(schedule.programs)
    return max(_peak(schedule, program, rank) for rank, program in enumerate(programs))


def _peak(schedule: Schedule, program: Program, rank: int) -> int:
    m = schedule.slices_per_rank
    waited = {action.step: at for at, action in enumerate(program) if isinstance(action, Wait)}
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}

    def use(what: str, number: int, count: int, at: int) -> None:
        for buffer in ((what, number + i) for i in range(count)):
            first[buffer] = min(first.get(buffer, at), at)
            last[buffer] = max(last.get(buffer, at), at)

    for at, action in enumerate(program):
        match action:
            case Post(step, send, recv):
                sums = schedule.carries_sums(action)
                if recv is not None:
                    # Partial sums arrive in a buffer of their own, one a step; slices are told apart by number.
                    arriving = ("step", step * m, recv.count) if sums else ("slice", recv.slice, recv.count)
                    use(*arriving, at)
                    at_end = schedule.kind is Kind.ALL_GATHER_OUT
                    use(*arriving, len(program) if at_end else waited[step])
                if send is not None and not _is_own(schedule, send.slice, rank):
                    use("sum" if sums else "slice", send.slice, send.count, at)
                    use("sum" if sums else "slice", send.slice, send.count, waited[step])
            case Compute(slice_, _, count):
                if not _is_own(schedule, slice_, rank):
                    if schedule.kind.reduces:
                        use("sum", slice_, count, at)
                    if schedule.kind.arrives_first or not schedule.kind.reduces:
                        use("slice", slice_, count, at)
            case Add(_, step, _, count) | Store(_, step, _, count):
                use("step", step * m, count, at)
            case _:
                pass
    changes = [0] * (len(program) + 2)
    for buffer, at in first.items():
        changes[at] += 1
        changes[last[buffer] + 1] -= 1
    peak = now = 0
    for change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _is_own(schedule: Schedule, slice_: int, rank: int) -> bool:
    """Whether the slice lies in the region's own input or output on this rank."""
    if schedule.kind is Kind.ALL_REDUCE:
        return True  # every slice is an output of every rank
    if schedule.kind is Kind.ALL_TO_ALL_OUT:
        return schedule.destination(slice_) == rank
    return schedule.owner(slice_) == rank
