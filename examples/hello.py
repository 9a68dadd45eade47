"""The shortest whole example: a tensor-parallel MLP, compiled, compared and explained.

torchrun --nproc-per-node 2 examples/hello.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fo_compiler

dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
mlp = parallelize_module(layers, mesh, plan)
x = torch.randn(32, 64)
compiled = torch.compile(mlp, backend="flashoverlap", options={"rewrite": "always"})
torch.testing.assert_close(compiled(x), mlp(x))

report = fo_compiler.explain(mlp, x, options={"rewrite": "always"})
if dist.get_rank() == 0:
    print(report)
dist.destroy_process_group()
