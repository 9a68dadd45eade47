"""What the ranks run for graphs with changing shapes: as many compiles as plain Inductor, and the same values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fo_compiler
from fo_compiler import Record
from fo_compiler.runtime.ops import pending_transfers
from fo_compiler.torch_adapter import functional_collective
from tests.distributed.checks import assert_one_record_each, generating, local, ours, plain

BATCH, SHARD, DIM = 2, 4, 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, 12, bias=False), nn.Linear(DIM, 12, bias=False)
        self.down = nn.Linear(12, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def tensor_parallel(sequence_parallel: bool) -> nn.Module:
    """All-gather and reduce-scatter along the sequence, or all-reduce."""
    torch.manual_seed(0)
    layout = Shard(1) if sequence_parallel else Replicate()
    columns = ColwiseParallel(input_layouts=layout)
    plan = {"gate": columns, "up": columns, "down": RowwiseParallel(output_layouts=layout)}
    return parallelize_module(MLP().double(), init_device_mesh("cpu", (dist.get_world_size(),)), plan)


class Scattered(nn.Module):
    """Partial sums of all rows, of which each rank keeps a part: how long that is follows from a symbolic length.

    With collectives, not with a plan: plain Inductor of torch 2.13 fails to compile a plan that scatters a symbolic length.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Linear(DIM, 12, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return scatter_with_gradient(self.down(torch.tanh(x)), "sum", 1, dist.group.WORLD)


# Renamed in torch 2.13; the old name warns since.
scatter_with_gradient = functional_collective("reduce_scatter_single_autograd")

MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequence parallel": lambda: tensor_parallel(True),
    "tensor parallel": lambda: tensor_parallel(False),
    "scattered": Scattered,
}


def steps(
    compile_: Callable[[nn.Module], Any], kind: str, dim: int, mark: bool, lengths: tuple[int, ...]
) -> tuple[list[Tensor], int]:
    """Results of one step a length, and the number of graphs that were compiled for them.

    A training step with its gradients; but inference for "tensor parallel", as plain Inductor of torch 2.13 fails to
    compile the backward of the all-reduce plan with a symbolic sequence.
    """
    torch._dynamo.reset()
    counters.clear()
    model = MODELS[kind]()
    trains = kind != "tensor parallel"
    call = compile_(model)
    found: list[Tensor] = []
    for length in lengths:
        generator = torch.Generator().manual_seed(length + (dist.get_rank() if trains else 0))
        shape = (length, SHARD, DIM) if dim == 0 else (BATCH, length, DIM)
        x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        if mark:
            torch._dynamo.mark_dynamic(x, dim)
        with torch.set_grad_enabled(trains):
            y = call(x)
        found.append(y.detach())
        if trains:
            y.square().sum().backward()
            gradients = [tensor.grad for tensor in (x, *model.parameters())]
            assert all(gradient is not None for gradient in gradients)
            found += [local(gradient).clone() for gradient in gradients if gradient is not None]
            model.zero_grad()
    return found, counters["stats"]["unique_graphs"]


def changing_lengths(kind: str, dim: int, mark: bool, unequal: bool = False) -> tuple[list[Record], int]:
    """Records and number of compiles, after a check that values, gradients and compiles are those of plain Inductor.

    `unequal` slices have 2, 2 and 2 rows in the first step, then 2, 2 and 3. The last length is too short for them, and is
    compiled anew.
    """
    lengths = (6, 7, 2) if unequal else (4, 6, 3)
    if kind == "scattered":
        lengths = (12, 14, 4) if unequal else (4, 6, 10)
    options: dict[str, Any] = {"schedule": "ring", "slices_per_rank": 3} if unequal else {}
    counter: list[Any] = []

    def plainly(model: nn.Module) -> Any:
        compiled, count = plain(model)
        counter.append(count)
        return compiled

    with generating(kernels=False):
        wanted, compiles = steps(plainly, kind, dim, mark, lengths)
        with fo_compiler.record() as report:
            got, ours_compiles = steps(partial(ours, **options), kind, dim, mark, lengths)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    assert ours_compiles == compiles + unequal, f"{ours_compiles} compiles, plain Inductor needs {compiles}"
    assert not pending_transfers()
    if ours_compiles == 1:  # else its collectives have the names of those of another graph
        assert_one_record_each(report.records, counter[0].count)
    return report.records, compiles
