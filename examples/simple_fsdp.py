"""Data parallel as SimpleFSDP writes it: parameters are DTensors in shards, made whole where the model reads them.

torchrun --nproc-per-node 2 examples/simple_fsdp.py

The all-gather of a parameter and the reduce-scatter of its gradient then stand in the compiled graph, next to the matmul
that needs the one and makes the other: both are hidden under it. A few steps are trained with plain Inductor and with ours,
and compared; then what was done with each of the collectives is printed.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

import fo_compiler

BATCH, DIM, HIDDEN, STEPS = 32, 64, 256, 3


class Whole(nn.Module):
    """A parameter in shards -> the whole of it; its gradient is averaged over the ranks, and scattered."""

    def forward(self, shard: Tensor) -> Tensor:
        assert isinstance(shard, DTensor)
        whole = shard.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


def shard_parameters(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard each parameter along dim 0, and gather it where it is read."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)]))
            module.register_parameter(name, shard)
            parametrize.register_parametrization(module, name, Whole(), unsafe=True)
    return model


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM))
    data = torch.randn(STEPS, dist.get_world_size(), BATCH, DIM)[:, dist.get_rank()]  # other samples on each rank

    def train(backend: str, options: Any) -> list[Tensor]:
        torch.compiler.reset()
        model = shard_parameters(copy.deepcopy(layers), mesh)
        compiled = torch.compile(model, backend=backend, options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        losses = []
        for x in data:
            optimizer.zero_grad()
            loss = (compiled(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [torch.stack(losses), *(p.full_tensor() for p in model.parameters() if isinstance(p, DTensor))]

    quick = {"fallback_by_default": True}  # ATen for all that is no collective: no C++ compiler is waited for
    plain = train("inductor", quick)
    with fo_compiler.record() as report:
        ours = train("flashoverlap", {"rewrite": "always", **quick})
    for got, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, want)
    if dist.get_rank() == 0:
        print(report)
        print("losses and parameters equal those under plain Inductor")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
