"""What the ranks of test_faults.py run: a small layer, forward and backward, and a fault somewhere in it.

The graphs are rewritten by our pass and run node by node: the ops, transfers and agreement are those of compiled code.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from benchmarks.network import INTERFACE, enter
from fo_compiler.options import Options
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.runtime import transport as transports
from fo_compiler.runtime.ops import pending_transfers
from fo_compiler.runtime.transport import C10dTransport, Transfer, use_transport
from tests.distributed.fleet import Rank
from tests.graphs import all_gather, capture, reduce_scatter

ROWS, K, N = 4, 6, 5
STEPS = 6
FAULTY_STEP = 3


class Layer:
    """x [ROWS, K] of each rank -> gathered @ w [ranks ROWS, N]; its backward is a matmul and a reduce-scatter."""

    def __init__(self, group_name: str, ranks: int, rank: int, rows: int = ROWS, schedule: str = "ring") -> None:
        self.rank, self.ranks = rank, ranks
        self.w = torch.arange(1.0, K * N + 1, dtype=torch.float64).view(K, N)
        options = Options(rewrite="always", schedule=schedule, slices_per_rank=1)
        self.x = torch.full((rows, K), rank + 1.0, dtype=torch.float64)
        self.grad = torch.ones(rows * ranks, N, dtype=torch.float64) * (rank + 1)
        self.forward = self._rewritten(lambda x, w: all_gather(x, 0, ranks, group_name) @ w, (self.x, self.w), options)
        self.backward = self._rewritten(
            lambda g, w: reduce_scatter(g @ w.t(), 0, ranks, group_name), (self.grad, self.w), options
        )

    def _rewritten(
        self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], options: Options
    ) -> fx.GraphModule:
        gm = capture(function, inputs)
        overlap(gm.graph, options, C10dTransport(), pin=False)
        gm.recompile()
        return gm

    def check_forward(self) -> None:
        y = self.forward(self.x, self.w)
        for rank, block in enumerate(y.chunk(self.ranks)):
            torch.testing.assert_close(block, (rank + 1.0) * self.w.sum(0).expand_as(block))

    def check_backward(self) -> None:
        dx = self.backward(self.grad, self.w)
        total = self.ranks * (self.ranks + 1) / 2
        torch.testing.assert_close(dx, total * self.w.sum(1).expand_as(dx))


@dataclass
class Hooked:
    """The c10d transport, with a call behind (or, `early`, before) each post."""

    hook: Callable[[], None]
    early: bool = False
    inner: Any = field(default_factory=lambda: transports._default)

    def __post_init__(self) -> None:
        self.agreements = self.inner.agreements
        self.meeting, self.rank_and_size = self.inner.meeting, self.inner.rank_and_size

    def begin(self, group_names: Iterable[str]) -> None:
        self.inner.begin(group_names)

    def post(self, *args: Any) -> Transfer:
        if self.early:
            self.hook()
        transfer: Transfer = self.inner.post(*args)
        if not self.early:
            self.hook()
        return transfer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def divide() -> None:
    raise ZeroDivisionError("in the middle of a step")


ACTIONS = {"die": die, "divide": divide, "sleep": partial(time.sleep, 600)}


def train(me: Rank, where: str, action: str, rows: int = ROWS, pause_s: float = 0.0) -> str:
    """Steps of the layer; rank 1 does `action` at `where` of step 3, or before the first step."""
    group_name = me.join()
    layer = Layer(group_name, me.ranks, me.rank, rows)
    fault = ACTIONS.get(action, lambda: None)

    def here(place: str, step: int) -> None:
        if me.rank == 1 and (place, step) == (where, FAULTY_STEP):
            fault()

    if me.rank == 1 and where == "before the first step":
        fault()
    current = 0
    with use_transport(Hooked(lambda: here("in a transfer", current))):
        for current in range(STEPS):
            me.tell(f"step {current}")
            started = time.monotonic()
            layer.check_forward()
            here("between forward and backward", current)
            layer.check_backward()
            me.tell(f"took {time.monotonic() - started:.3f}")
            time.sleep(pause_s)
    assert pending_transfers() == []
    dist.barrier()  # the rank that holds the store ends last
    return "right values"


def a_step_fails_on_all_ranks(me: Rank) -> str:
    """It is skipped. What was sent in it must not be taken for a message of a later step."""
    layer = Layer(me.join(), me.ranks, me.rank)
    layer.check_forward()
    layer.x += 100  # what would be seen
    caught = ""
    try:
        with use_transport(Hooked(divide, early=me.rank == 1)):  # it posts nothing; the others have sent
            layer.check_forward()
    except ZeroDivisionError as error:
        caught = str(error)
    assert caught
    assert pending_transfers() == []
    layer.x -= 100
    for _ in range(3):
        layer.check_forward()
        layer.check_backward()
    dist.barrier()
    return "right values"


def join_namespace(name: str) -> None:
    """Move this process into a network namespace (benchmarks/network.py)."""
    enter(name)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
