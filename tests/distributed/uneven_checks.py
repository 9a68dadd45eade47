"""What the ranks run where a size does not divide by their number: a tensor-parallel plan, its shards padded by DTensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fo_compiler
from fo_compiler import Record
from fo_compiler.passes.separability import strides_that_matter
from fo_compiler.runtime.ops import pending_transfers
from tests.distributed.checks import assert_one_record_each, generating, local, ours, plain, shared

DIM = 6


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, hidden), nn.Linear(DIM, hidden, bias=False)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


def trained(compile_: Callable[[nn.Module], Any], sizes: tuple[int, ...], dim: int, hidden: int) -> list[Tensor]:
    """This rank's part of the result and of all gradients, for an input of `sizes` that is sharded along `dim`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = Shard(dim)
    columns = ColwiseParallel(input_layouts=layout, use_local_output=False)
    rows = RowwiseParallel(output_layouts=layout, use_local_output=False)
    model = parallelize_module(MLP(hidden).double(), mesh, {"gate": columns, "up": columns, "down": rows})
    x = distribute_tensor(shared(1, *sizes), mesh, [layout]).requires_grad_()
    y = compile_(model)(x)
    assert isinstance(y, DTensor)
    y.backward(distribute_tensor(shared(2, *sizes), mesh, [layout]))
    gradients = [tensor.grad for tensor in (x, *model.parameters())]
    assert all(gradient is not None for gradient in gradients)
    return [local(tensor).detach().clone() for tensor in (y, *gradients)]  # type: ignore[arg-type]


def trains_as_under_plain_inductor(
    sizes: tuple[int, ...], dim: int, hidden: int, kernels: bool, **options: Any
) -> list[Record]:
    counter: list[Any] = []

    def plainly(model: nn.Module) -> Any:
        compiled, count = plain(model)
        counter.append(count)
        return compiled

    with generating(kernels):
        want = trained(plainly, sizes, dim, hidden)
        with fo_compiler.record() as report:
            got = trained(partial(ours, **options), sizes, dim, hidden)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, index=index: f"output {index}: {m}")
        assert strides_that_matter(a) == strides_that_matter(b), f"output {index}"
    assert_one_record_each(report.records, counter[0].count)
    assert not pending_transfers()
    return report.records
