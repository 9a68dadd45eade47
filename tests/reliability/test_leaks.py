"""Many steps in one process a rank: transfers, registry, tensors, threads, files and memory stay where they are."""

from __future__ import annotations

import gc
import os
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fo_compiler.runtime.ops import pending_transfers
from tests.distributed import checks
from tests.distributed.fault_checks import Layer
from tests.distributed.fleet import Rank, run_fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def counts() -> dict[str, int]:
    gc.collect()
    return {
        "transfers": len(pending_transfers()),
        "registry": torch._C._distributed_c10d._get_work_registry_size(),
        "tensors": sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def resident_kB() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def many_steps(me: Rank, steps: int, schedule: str) -> tuple[dict[str, int], dict[str, int], list[int]]:
    """Counts after a tenth and at the end; resident memory at five times between."""
    layer = Layer(me.join(60), me.ranks, me.rank, rows=64, schedule=schedule)
    early: dict[str, int] = {}
    memory = []
    for step in range(steps + 1):
        layer.check_forward()
        layer.check_backward()
        if step == steps // 10:
            early = counts()
        if step and step % (steps // 5) == 0:
            memory.append(resident_kB())
    late = counts()
    dist.barrier()
    return early, late, memory


def stays_flat(early: dict[str, int], late: dict[str, int], memory: list[int]) -> None:
    assert late == early
    assert early["transfers"] == early["registry"] == 0
    # A leak of one receive buffer (2.5 kB) a step would be 2 MB a fifth of 4,000 steps; the allocator's own noise is less.
    assert memory[-1] - memory[1] < 1500, memory


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("steps", "schedule"),
    [(300, "ring"), *(pytest.param(10_000, name, marks=pytest.mark.nightly) for name in ("ring", "direct"))],
)
def test_steps_of_a_small_region_leave_nothing_behind(ranks: int, steps: int, schedule: str) -> None:
    for outcome in run_fleet(ranks, partial(many_steps, steps=steps, schedule=schedule), timeout_s=2400):
        assert outcome.result is not None, outcome
        stays_flat(*outcome.result)


def many_training_steps(me: Rank, steps: int) -> tuple[dict[str, int], dict[str, int], list[int]]:
    """The demo model, compiled, trained for so many steps."""
    me.join(60)
    torch.manual_seed(0)
    model = checks.apply_tensor_parallel(checks.Llama(checks.CONFIG).double(), checks.mesh_of(None))
    compiled = checks.ours(model)
    tokens = torch.randint(checks.CONFIG.vocab_size, (checks.BATCH, checks.SEQ_LEN))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    found: list[dict[str, int]] = []
    memory: list[int] = []
    with checks.generating(False):
        for step in range(steps):
            loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
            if step in (steps // 10, steps - 1):
                found.append(counts())
            if step and step % (steps // 6) == 0:
                memory.append(resident_kB())
    dist.barrier()
    return found[0], found[1], memory


@pytest.mark.nightly
def test_300_steps_of_the_demo_model_leave_nothing_behind() -> None:
    for outcome in run_fleet(2, partial(many_training_steps, steps=300), timeout_s=2400):
        assert outcome.result is not None, outcome
        early, late, memory = outcome.result
        assert late == early
        assert early["transfers"] == early["registry"] == 0
        assert memory[-1] - memory[1] < 4000, memory
