"""Ulysses sequence parallelism: each rank has a part of the sequence, and for attention all of it for a part of the heads.

torchrun --nproc-per-node 2 examples/ulysses.py

    x [B, S / R, D] -> q, k, v -> all-to-all -> attention over [B, H / R, S, E] -> all-to-all -> output projection

Every all-to-all stands next to a matmul: it is cut by peer, and each block travels while others are computed. A step is
trained with plain Inductor and with ours, and compared; then what was done with each of the collectives is printed.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

import fo_compiler

BATCH, SEQ_LEN, DIM, HEADS = 2, 64, 64, 8


class UlyssesAttention(nn.Module):
    """Causal self-attention, [B, S / R, D] -> [B, S / R, D] on each of R ranks."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ranks = dist.get_world_size()
        self.qkv = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])
        self.out = nn.Linear(dim, dim)

    def to_heads(self, x: Tensor) -> Tensor:
        """[B, S / R, D] -> [B, H / R, S, E]: to each rank its heads."""
        batch, seq, dim = x.shape
        blocks = x.reshape(batch, seq, self.ranks, self.heads // self.ranks, dim // self.heads)
        blocks = exchange(blocks.permute(2, 0, 1, 3, 4).contiguous())
        return blocks.permute(1, 3, 0, 2, 4).reshape(batch, self.heads // self.ranks, -1, dim // self.heads)

    def to_sequence(self, x: Tensor) -> Tensor:
        """[B, H / R, S, E] -> [B, S / R, D]: to each rank its part of the sequence."""
        batch, heads, seq, width = x.shape
        blocks = x.reshape(batch, heads, self.ranks, seq // self.ranks, width)
        blocks = exchange(blocks.permute(2, 0, 3, 1, 4).contiguous())
        return blocks.permute(1, 2, 0, 3, 4).reshape(batch, seq // self.ranks, -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.to_heads(project(x)) for project in self.qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(self.to_sequence(attended))
        return result


def exchange(blocks: Tensor) -> Tensor:
    """Block i of dim 0 goes to rank i, and that of rank i comes into its place."""
    result: Tensor = funcol.wait_tensor(funcol.all_to_all_single_autograd(blocks, None, None, dist.group.WORLD))  # type: ignore[arg-type]
    return result


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = UlyssesAttention(DIM, HEADS)
    x = torch.randn(BATCH, SEQ_LEN, DIM).chunk(dist.get_world_size(), 1)[dist.get_rank()]

    def step(compiled: Any) -> list[Tensor]:
        model.zero_grad()
        output = compiled(x)
        output.square().mean().backward()
        return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    quick: Any = {"fallback_by_default": True}  # ATen for all that is no collective: no C++ compiler is waited for
    plain = step(torch.compile(model, options=quick))
    torch.compiler.reset()
    with fo_compiler.record() as report:
        ours = step(torch.compile(model, backend="flashoverlap", options={"rewrite": "always", **quick}))
    for got, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, want)
    if dist.get_rank() == 0:
        print(report)
        print("output and gradients equal those under plain Inductor")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
