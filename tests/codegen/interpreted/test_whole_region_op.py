"""A whole region in the op's one kernel, with its transfers and flags; and what the host says of a flag that never came."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fo_compiler.codegen.kernels import all_gather_matmul_reference, wait_flags
from fo_compiler.errors import TransferError
from fo_compiler.records import GraphRecords
from fo_compiler.runtime import ops, whole_gather
from fo_compiler.runtime.late_flags import LateFlags
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.runtime.transport import use_transport
from fo_compiler.runtime.whole_gather import Plan, Step, in_one_kernel, slice_by_slice
from fo_compiler.schedule import FAMILIES, Compute, Kind, Post, Schedule, build

from .helpers import FLOATS, POLLS, SHORT, TILE, Pause, assert_close_to_exact, examples, meanwhile, values
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
        with use_transport(world.transport(rank)):
            body()

    with meanwhile(run):
        yield


@examples(6)
@given(st.data())
def test_one_kernel_gives_what_slice_by_slice_and_float64_give_step_after_step(data: st.DataObject) -> None:
    draw = data.draw
    ranks, m = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    family = draw(st.sampled_from(sorted(FAMILIES[Kind.ALL_GATHER])))
    rank = draw(st.integers(0, ranks - 1))
    rows, depth, cols, dtype = draw(SHORT), draw(SHORT), draw(SHORT), draw(FLOATS)
    schedule, world = build(Kind.ALL_GATHER, family, ranks, m), LocalWorld(ranks)
    b = values(9, depth, cols, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        # The interpreter runs one kernel at a time: a flag is raised by hand while the other one waits.
        patch.setattr(whole_gather, "raise_flag", lambda flags, s: flags.flags[s : s + 1].copy_(flags.epoch))
        # Flags stay from step to step.
        wholes = [values(step, ranks * m, rows, depth, dtype=dtype) for step in range(2)]

        def of_rank(r: int) -> list[torch.Tensor]:
            plan, way = plan_of(schedule, r), world.transport(r)
            owns = [list(whole[r * m : (r + 1) * m]) for whole in wholes]
            if r != rank:
                return [slice_by_slice(plan, own, b, way) for own in owns]
            launched = {"tile": TILE, "programs": 2, "polls": POLLS}
            return [in_one_kernel(plan, own, b, way, partial(in_a_thread, world, rank), **launched) for own in owns]

        for results in world.run(of_rank):
            for whole, result in zip(wholes, results, strict=True):
                exact = all_gather_matmul_reference(whole, b).flatten(0, 1)
                magnitude = all_gather_matmul_reference(whole.abs(), b.abs()).flatten(0, 1)
                assert_close_to_exact(result, exact, magnitude, depth)


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
