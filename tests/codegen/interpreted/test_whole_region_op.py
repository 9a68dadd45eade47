"""A whole region in the op's one kernel, with its transfers and flags; and what the host says of a flag that never came."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fo_compiler.codegen.kernels import all_gather_matmul_reference, wait_flags
from fo_compiler.errors import TransferError
from fo_compiler.records import GraphRecords
from fo_compiler.runtime import ops, whole_gather, whole_scatter
from fo_compiler.runtime.late_flags import LateFlags
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.runtime.transport import use_transport
from fo_compiler.runtime.whole_plan import Flags, Plan, Step
from fo_compiler.schedule import FAMILIES, Compute, Kind, Post, Schedule, build

from .helpers import (
    FLOATS,
    POLLS,
    SHORT,
    TILE,
    Draw,
    Pause,
    assert_close_to_exact,
    block_of,
    examples,
    meanwhile,
    values,
)
from .test_flags import int32


def plan_of(schedule: Schedule, rank: int) -> Plan:
    """What the pass reads off the graph of a rank."""
    program, m = schedule.program(rank), schedule.slices_per_rank
    order = tuple(
        (action.slice, action.slice % m if schedule.owner(action.slice) == rank else -1)
        for action in program
        if isinstance(action, Compute)
    )
    return Plan(order, tuple(step_of(action, rank) for action in program if isinstance(action, Post)), "0")


def step_of(post: Post, rank: int) -> Step:
    sent, to = (post.send.slice, post.send.peer) if post.send else (-1, -1)
    received, source = (post.recv.slice, post.recv.peer) if post.recv else (-1, -1)
    peers = f"rank {rank} sends to {to}, receives from {source}"
    label = f"region ag0 of the forward graph (all_gather), step {post.step}, group '0': {peers}"
    return Step(sent, to, received, source, label)


@contextmanager
def in_a_thread(world: LocalWorld, rank: int, _: torch.device, body: Callable[[], None]) -> Iterator[None]:
    """The communication stream."""

    def run(pause: Pause) -> None:
        pause()
        of_thread.append(pause)
        with use_transport(world.transport(rank)):
            body()

    with meanwhile(run):
        yield


of_thread: list[Pause] = []


@contextmanager
def flags_by_hand() -> Iterator[None]:
    """The interpreter runs one kernel at a time: beside it, flags are raised and awaited without one."""

    def wait(flags: Flags, index: int) -> None:
        while flags.epoch.item() and flags.flags[index] != flags.epoch[0]:
            of_thread[-1]()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flags, "set", lambda flags, index: flags.flags[index : index + 1].copy_(flags.epoch))
        patch.setattr(Flags, "wait", wait)
        yield


def drawn(draw: Draw, kind: Kind) -> tuple[Schedule, int, LocalWorld, dict[str, Any]]:
    """A schedule, the rank that has the kernel, the world, and how the kernel is launched."""
    ranks, m = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    schedule = build(kind, draw(st.sampled_from(sorted(FAMILIES[kind]))), ranks, m)
    rank, world = draw(st.integers(0, ranks - 1)), LocalWorld(ranks)
    # The interpreter runs one program after the other: the first one must not wait for what takes the second one's tiles.
    programs = 2 if kind is Kind.ALL_GATHER else 1
    beside = partial(in_a_thread, world, rank)
    return schedule, rank, world, {"beside": beside, "tile": TILE, "programs": programs, "polls": POLLS}


@examples(6)
@given(st.data())
def test_a_gather_in_one_kernel_gives_what_slice_by_slice_and_float64_give_step_after_step(data: st.DataObject) -> None:
    draw = data.draw
    schedule, rank, world, launched = drawn(draw, Kind.ALL_GATHER)
    rows, depth, cols, dtype = draw(SHORT), draw(SHORT), draw(SHORT), draw(FLOATS)
    b, m = values(9, depth, cols, dtype=dtype), schedule.slices_per_rank
    wholes = [
        values(step, schedule.slices, rows, depth, dtype=dtype) for step in range(2)
    ]  # flags stay from step to step

    def of_rank(r: int) -> list[torch.Tensor]:
        plan, way = plan_of(schedule, r), world.transport(r)
        owns = [list(whole[r * m : (r + 1) * m]) for whole in wholes]
        if r != rank:
            return [whole_gather.slice_by_slice(plan, own, b, way) for own in owns]
        return [whole_gather.in_one_kernel(plan, own, b, way, **launched) for own in owns]

    with flags_by_hand():
        for results in world.run(of_rank):
            for whole, result in zip(wholes, results, strict=True):
                exact = all_gather_matmul_reference(whole, b).flatten(0, 1)
                magnitude = all_gather_matmul_reference(whole.abs(), b.abs()).flatten(0, 1)
                assert_close_to_exact(result, exact, magnitude, depth)


@examples(8)
@given(st.data())
def test_a_scatter_in_one_kernel_gives_what_slice_by_slice_and_float64_give_step_after_step(
    data: st.DataObject,
) -> None:
    """Also where slices are rows of a batch, and sums travel in another dtype than that of the operands."""
    draw = data.draw
    schedule, rank, world, launched = drawn(draw, Kind.REDUCE_SCATTER)
    block, depth, cols, dtype, wire = block_of(draw), draw(SHORT), draw(SHORT), draw(FLOATS), draw(FLOATS)
    steps, every = range(2), range(schedule.ranks)
    shape = (
        *block[:-1],
        schedule.slices,
        block[-1],
        depth,
    )  # of a batch, the slices lie side by side in each of its rows
    inputs = [[values(9 * r + s, *shape, dtype=dtype).movedim(len(block) - 1, 0) for s in steps] for r in every]
    factors = [values(50 + r, depth, cols, dtype=dtype) for r in every]

    def of_rank(r: int) -> list[torch.Tensor]:
        plan, way, b = plan_of(schedule, r), world.transport(r), factors[r]
        if r != rank:
            return [whole_scatter.slice_by_slice(plan, a, b, wire, way) for a in inputs[r]]
        return [whole_scatter.in_one_kernel(plan, a, b, wire, way, **launched) for a in inputs[r]]

    with flags_by_hand():
        results = world.run(of_rank)
    # Their plain form rounds products and, in a ring, sums at each hop.
    rounded = sum(torch.finfo(t).eps for t in (dtype, wire)) * schedule.ranks + (depth + schedule.ranks) * 2.0**-23
    for step in steps:
        exact = sum(inputs[r][step].double() @ factors[r].double() for r in every)
        size = sum(inputs[r][step].double().abs() @ factors[r].double().abs() for r in every)
        allowed = rounded * torch.as_tensor(size) + torch.finfo(wire).tiny
        error = torch.cat([results[r][step] for r in every]) - torch.as_tensor(exact).reshape(-1, cols)
        assert (error.abs() <= allowed.reshape(-1, cols)).all()  # NaN is wrong


def test_a_flag_that_never_comes_is_a_transfer_error_with_region_step_peer_and_group() -> None:
    plan = plan_of(build(Kind.ALL_GATHER, "ring", 3, 1), 1)
    labels = {step.received: step.label for step in plan.steps}
    late = LateFlags([labels.get(s) for s in range(3)], "0", torch.device("cpu"))
    with use_transport(LocalWorld(3).transport(1)):
        wait_flags(int32(5, 0, 4), int32(5), late.marks, polls=3)  # slice 1 is the rank's own, and has no label
        late.check()  # the host has not seen it yet
        late.watch()
        with pytest.raises(
            TransferError, match=r"did not arrive: region ag0 .*, step \d, group '0': .* receives from 0"
        ):
            ops.announce(torch.zeros(1), GraphRecords(()).to_payload())  # the next run of any graph
        late.watch()
        late.check()  # told once
