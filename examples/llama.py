"""A small Llama-style decoder and its tensor-parallel plan: the model that the examples and the tests train.

Public PyTorch only: `parallelize_module` turns the projections into column- and row-wise shards over one mesh axis,
and the residual stream between them into sequence shards, so every block is *all-gather -> matmuls* twice and
*matmul -> reduce-scatter* twice; without sequence parallel it is *matmul -> all-reduce* twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int = 256  # bytes
    dim: int = 192
    n_layers: int = 3
    n_heads: int = 8
    n_kv_heads: int = 4
    hidden_dim: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dim; x: [B, S, D]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotary(x: Tensor, theta: float) -> Tensor:
    """Rotate pairs of features by an angle that grows with the position; x: [B, S, H, E]."""
    seq_len, head_dim = x.shape[1], x.shape[-1]
    half = head_dim // 2
    inverse_frequency = theta ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angle = torch.arange(seq_len, dtype=torch.float32, device=x.device)[:, None] * inverse_frequency
    cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention, causal; x: [B, S, D]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.rope_theta = config.rope_theta
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Head counts are read off the projections: with column-wise shards each rank sees its own heads only.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotary(q, self.rope_theta), rotary(k, self.rope_theta)
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        projected: Tensor = self.wo(out.transpose(1, 2).flatten(-2))
        return projected


class FeedForward(nn.Module):
    """SwiGLU; x: [B, S, D]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.feed_forward(self.ffn_norm(x))
        return x


class Llama(nn.Module):
    """Token ids [B, S] -> logits [B, S, vocab]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.output(self.norm(x))
        return x


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, sequence_parallel: bool = True) -> Llama:
    """Shard `model` in place over the one-axis `mesh`.

    With `sequence_parallel` the residual stream between the blocks is sharded along the sequence (all-gathers and
    reduce-scatters), else every rank holds all of it (all-reduces). The head counts, `hidden_dim`, `vocab_size` and, with
    `sequence_parallel`, the sequence length must divide by the mesh's size.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    gathers = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    top = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    block = {
        "attention": gathers,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=stream),
        "feed_forward": gathers,
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=stream),
        "feed_forward.w3": ColwiseParallel(),
    }
    if sequence_parallel:
        top["norm"] = SequenceParallel()
        block |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    parallelize_module(model, mesh, top)
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    return model


def absent(ranks: int) -> tuple[Llama, list[Tensor]]:
    """A bf16 model that takes no memory, sharded over `ranks`, and its input: for `fo-compiler cross`."""
    from torch.distributed.device_mesh import init_device_mesh

    with torch.device("meta"):
        model = Llama(LlamaConfig(dim=2048, n_layers=1, n_heads=16, n_kv_heads=8, hidden_dim=8192)).bfloat16()
        tokens = torch.zeros(2, 2048, dtype=torch.int64)
    return apply_tensor_parallel(model, init_device_mesh("cpu", (ranks,))), [tokens]
