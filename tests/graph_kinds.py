"""The kinds of graph in which a matmul meets a collective, as one table: what docs/coverage.md is made of.

Each kind is a function of tensors, small enough to be run on threads. `tests/test_coverage.py` proves the values of each;
`benchmarks/coverage.py` writes the page, and asks the stock pass of the installed torch about the same graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fo_compiler.options import Options
from fo_compiler.records import Record
from fo_compiler.testing import assert_equivalent
from tests.graphs import all_gather, all_reduce, all_to_all, c10d, capture, reduce_scatter

aten = torch.ops.aten
R = 2  # ranks
GATHER, SCATTER, REDUCE, EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"


# --- collectives with gradients -------------------------------------------------------------------------------------


class Gather(torch.autograd.Function):
    """All-gather along a dim; its gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: str = "0") -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, R, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return reduce_scatter(grad, ctx.dim, R, ctx.group), None, None


class Scatter(torch.autograd.Function):
    """Reduce-scatter along a dim; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, op: str = "sum") -> Tensor:
        ctx.dim, ctx.scale = dim, 1 / R if op == "avg" else 1
        return reduce_scatter(x, dim, R, op=op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather(grad * ctx.scale, ctx.dim, R), None, None


class Copy(torch.autograd.Function):
    """Whole on every rank; its gradient is all-reduced (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str = "0") -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grad.contiguous(), ctx.group), None


class Reduce(torch.autograd.Function):
    """All-reduce; its gradient is whole on every rank (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Exchange(torch.autograd.Function):
    """All-to-all over dim 0, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_to_all(x, R)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return all_to_all(grad, R)


gather: Callable[..., Tensor] = Gather.apply
scatter: Callable[..., Tensor] = Scatter.apply
copy: Callable[..., Tensor] = Copy.apply
reduce: Callable[[Tensor], Tensor] = Reduce.apply
exchange: Callable[[Tensor], Tensor] = Exchange.apply


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphKind:
    """One kind of graph.

    `shapes(d)` are the sizes of the inputs for a hidden size `d`. `gradients`: the graph computes them too. `left` is what
    the reason says where a collective is left alone: one of these.
    """

    row: str
    name: str
    function: Callable[..., Any]
    shapes: Callable[[int], Sequence[Sequence[int]]]
    gradients: bool = True
    left: tuple[str, ...] = ()
    groups: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    tolerance: float = 1e-11

    def __str__(self) -> str:
        return f"{self.row}: {self.name}"

    @property
    def ranks(self) -> int:
        return 1 + max((rank for groups in self.groups.values() for ranks in groups for rank in ranks), default=R - 1)

    def example(self, width: int) -> list[Tensor]:
        """Inputs of which only the sizes matter."""
        return [torch.zeros(tuple(shape), dtype=torch.float64) for shape in self.shapes(width)]

    def step(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The function, and the gradients of the sum of its squares."""
        if not self.gradients:
            result = self.function(*tensors)
            return result if isinstance(result, tuple) else (result,)
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        result = self.function(*leaves)
        results = result if isinstance(result, tuple) else (result,)
        loss = torch.stack([(tensor * tensor).sum() for tensor in results]).sum()
        return *(tensor.detach() for tensor in results), *torch.autograd.grad(loss, leaves)


SLICE_NODE = r"\b(?:ag|rs|ar|aa|chain)\d+_\w+"  # the names that a rewrite gives, after the region and the step


def prove(kind: GraphKind, options: Options | None = None) -> tuple[Record, ...]:
    """Raise AssertionError unless each rank gets what the plain graph gives, and what is left alone is left for a reason."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        [torch.randn(tuple(shape), dtype=torch.float64, generator=generator) for shape in kind.shapes(8)]
        for _ in range(kind.ranks)
    ]
    gm = capture(kind.step, inputs[0])
    records = assert_equivalent(gm, inputs, options, kind.groups, kind.tolerance, kind.tolerance).records
    reasons = [record.reason for record in records if not record.rewritten]
    assert all(any(part in reason for part in kind.left) for reason in reasons), reasons
    internal = [name for record in records for name in re.findall(SLICE_NODE, record.reason)]
    assert not internal, f"a reason names nodes that no user knows: {internal}"
    return records


B, S = 2, 4  # batch, sequence of one rank


def mlp_sequence_parallel(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = gather(x, 1)
    return scatter((F.silu(h @ gate) * (h @ up)) @ down, 1)


def mlp_chain(x: Tensor, w: Tensor) -> Tensor:
    return scatter(torch.relu(gather(x, 0) @ w), 0)


def mlp_tensor_parallel(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return reduce(F.gelu(copy(x) @ up) @ down)


def mlp_two_branches(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return reduce((F.silu(copy(x) @ gate) * (copy(x) @ up)) @ down)


def two_layers_tensor_parallel(x: Tensor, up: Tensor, down: Tensor, up2: Tensor, down2: Tensor, norm: Tensor) -> Tensor:
    h = x + reduce(F.gelu(copy(x) @ up) @ down)
    return h + reduce(F.gelu(copy(F.rms_norm(h, (h.shape[-1],), norm)) @ up2) @ down2)


def gathered_logits(x: Tensor, w: Tensor, head: Tensor) -> Tensor:
    """Each rank has a part of the vocabulary, and all of the logits are wanted everywhere (`colwise_gather_output`)."""
    return torch.log_softmax(gather(torch.tanh(x @ w) @ head, 2), -1)


def vocabulary_in_parts(table: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    """Each rank has the embeddings of a part of the vocabulary, and zeros for tokens of other parts."""
    tokens = (torch.arange(B * S) * 5 % (2 * table.shape[0])).reshape(B, S)
    other = tokens >= table.shape[0]
    rows = aten.index_put(F.embedding(tokens.masked_fill(other, 0), table), [other], table.new_zeros(()))
    return F.layer_norm(reduce(rows), norm.shape, norm) @ w


def experts(x: Tensor, scores: Tensor, up: Tensor, down: Tensor, w: Tensor) -> Tensor:
    """Two of four experts a token, in order of expert, and back: each rank has a part of the columns of each expert."""
    best = scores.topk(2).values
    order = scores.topk(2).indices.flatten().argsort(stable=True)
    back = order.argsort()
    rows = F.silu(x[order // 2] @ up) @ down
    y = (rows * best.flatten()[order][:, None])[back].reshape(x.shape[0], 2, -1).sum(1)
    return torch.tanh(x + reduce(y)) @ w


def to_heads(x: Tensor, heads: int) -> Tensor:
    """[B, S / R, H * E] -> [B, H / R, S, E]"""
    batch, seq, width = x.shape
    blocks = exchange(x.reshape(batch, seq, R, heads // R, width // heads).permute(2, 0, 1, 3, 4))
    return blocks.permute(1, 3, 0, 2, 4).reshape(batch, heads // R, seq * R, width // heads)


def to_sequence(x: Tensor) -> Tensor:
    """[B, H / R, S, E] -> [B, S / R, H * E]"""
    batch, heads, seq, width = x.shape
    blocks = exchange(x.reshape(batch, heads, R, seq // R, width).permute(2, 0, 3, 1, 4))
    return blocks.permute(1, 2, 0, 3, 4).reshape(batch, seq // R, heads * R * width)


def ulysses(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    q, k, v = (to_heads(x @ w, 4) for w in (q, k, v))
    return to_sequence(torch.softmax(q @ k.transpose(-1, -2), -1) @ v) @ out


def ulysses_dims(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """The exchange between two dims, as DTensor writes it: heads of [B, S / R, H, E] for the sequence, and back."""
    h = (x @ w).reshape(x.shape[0], x.shape[1], 4, -1)
    h = torch.ops._dtensor.shard_dim_alltoall(h, 1, 2, "0")
    h = torch.ops._dtensor.shard_dim_alltoall(torch.softmax(h, -1), 2, 1, "0")
    return h.reshape(x.shape) @ out


def attention_sequence_parallel(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    h = gather(x, 1)
    q, k, v = ((h @ w).reshape(*h.shape[:2], 2, -1).transpose(1, 2) for w in (q, k, v))
    h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return scatter(h.transpose(1, 2).reshape(*x.shape[:1], -1, h.shape[1] * h.shape[3]) @ out, 1)


def attention_before_all_to_all(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
    return to_sequence(F.scaled_dot_product_attention(q, k, v, is_causal=True)) @ out


def parameter_gather(x: Tensor, w: Tensor) -> Tensor:
    """SimpleFSDP: a parameter is gathered where it is used; its gradient is reduce-scattered."""
    return x @ gather(w, 0)


def parameter_gather_transposed(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, gather(w, 0))


def parameter_gather_cast(x: Tensor, w: Tensor) -> Tensor:
    """Parameters in float64, computing in float32."""
    return x.float() @ gather(w.float(), 0)


def gradients_all_reduced(x: Tensor, w: Tensor) -> Tensor:
    """DDP in the graph: every parameter's gradient is all-reduced."""
    return torch.tanh(x @ copy(w))


def data_and_tensor_parallel(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = gather(x, 1, "tp")
    return torch.tanh(h @ gather(up, 0, "dp")) @ copy(down, "dp")


def scatter_mean(x: Tensor, w: Tensor) -> Tensor:
    return scatter(x @ w, 0, "avg")


def saved_scatter(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The scattered result is kept for the backward pass, and used."""
    y = scatter(x @ w, 0)
    return y, torch.relu(y)


def gathered_leaves(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = gather(x, 0)
    return h @ w, h


def gathered_twice(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return gather(x, 0) @ w, gather(x, 0) @ v


def transposed_input(x: Tensor, w: Tensor) -> Tensor:
    return gather(x.t(), 0) @ w


def unused(x: Tensor, w: Tensor) -> Tensor:
    gather(x, 0)
    return x @ w


def coalesced(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    xs, ys = c10d.all_gather_into_tensor_coalesced([x, y], R, "0")
    return (c10d.wait_tensor(xs) @ w) * (c10d.wait_tensor(ys) @ w)


def gather_dim(dim: int) -> Callable[..., Tensor]:
    return lambda x, w: gather(x, dim) @ w


def scatter_dim(dim: int) -> Callable[..., Tensor]:
    return lambda x, w: scatter(x @ w, dim)


E4M3 = torch.float8_e4m3fn


def scaled(x: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """x in 8 bits, and what to multiply it with: one number, or one along `dim`."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = (largest / 448).float()
    return (x / scale).to(E4M3), scale


def scaled_matmul(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    return torch._scaled_mm(x, w, x_scale, w_scale, out_dtype=torch.float32)


def scaled_weight(w: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """A weight [K, N] in 8 bits, column by column in memory as the kernels want it."""
    w8, scale = scaled(w, dim)
    return w8.t().contiguous().t(), scale


def gathered_scaled(x: Tensor, w: Tensor) -> Tensor:
    (x8, x_scale), (w8, w_scale) = scaled(x, None), scaled_weight(w, None)
    return scaled_matmul(gather(x8, 0), w8, x_scale, w_scale)


def gathered_scaled_rows(x: Tensor, w: Tensor) -> Tensor:
    (x8, x_scale), (w8, w_scale) = scaled(x, 1), scaled_weight(w, 0)
    return scaled_matmul(gather(x8, 0), w8, gather(x_scale, 0), w_scale)


def gathered_scaled_bytes(x: Tensor, w: Tensor) -> Tensor:
    """Sent as bytes, for libraries that do not know the type."""
    (x8, x_scale), (w8, w_scale) = scaled(x, None), scaled_weight(w, None)
    return scaled_matmul(gather(x8.view(torch.uint8), 0).view(E4M3), w8, x_scale, w_scale)


def scattered_scaled(x: Tensor, w: Tensor) -> Tensor:
    return scatter(scaled_matmul(*_operands(scaled(x, None), scaled_weight(w, None))), 0)


def scattered_scaled_rows(x: Tensor, w: Tensor) -> Tensor:
    return scatter(scaled_matmul(*_operands(scaled(x, 1), scaled_weight(w, 0))), 0)


def reduced_scaled(x: Tensor, w: Tensor) -> Tensor:
    return reduce(scaled_matmul(*_operands(scaled(x, None), scaled_weight(w, None))))


def _operands(x: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x[0], w[0], x[1], w[1]


def three_consumers(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    h = gather(x, 0)
    return h @ a, h @ b, h @ c


def norm_after_reduce(x: Tensor, w: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """An all-reduce, the residual added, a norm: what inference engines fuse in one kernel."""
    h = reduce(x @ w) + residual
    return F.rms_norm(h, (h.shape[-1],), scale), h


def norm_then_gather(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    return gather(F.rms_norm(x, (x.shape[-1],), scale), 0) @ w


MESH = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
TPSP, TP, ULYSSES = "sequence parallel", "tensor parallel", "Ulysses"
CHAIN, ATTENTION, DATA, FP8 = "chain", "attention", "data parallel", "fp8"
TAKEN = "already runs slice by slice in another region"
SHARED, EDGES, PEERS = "coalesced and repeated", "inputs and outputs", "forms that peers test"

KINDS: tuple[GraphKind, ...] = (
    GraphKind(TPSP, "mlp", mlp_sequence_parallel, lambda d: [(B, S, d), (d, 6), (d, 6), (6, d)]),
    GraphKind(TPSP, "mean", scatter_mean, lambda d: [(2 * S, 6), (6, d)]),
    GraphKind(TP, "mlp", mlp_tensor_parallel, lambda d: [(B, S, d), (d, 6), (6, d)]),
    GraphKind(TP, "two branches", mlp_two_branches, lambda d: [(B, S, d), (d, 6), (d, 6), (6, d)]),
    GraphKind(
        TP,
        "two layers with norm",
        two_layers_tensor_parallel,
        lambda d: [(B, S, d), (d, 6), (6, d), (d, 6), (6, d), (d,)],
    ),
    GraphKind(TP, "gathered logits", gathered_logits, lambda d: [(B, S, d), (d, d), (d, 6)], left=("_log_softmax",)),
    GraphKind(TP, "vocabulary in parts", vocabulary_in_parts, lambda d: [(d, d), (d,), (d, 6)]),
    GraphKind(
        TP,
        "experts",
        experts,
        lambda d: [(B * S, d), (B * S, 4), (d, 6), (6, d), (d, 6)],
        gradients=False,
    ),
    GraphKind(CHAIN, "one matmul", mlp_chain, lambda d: [(S, d), (d, 6)]),
    GraphKind(ULYSSES, "block", ulysses, lambda d: [(B, S, d), (d, d), (d, d), (d, d), (d, d)]),
    GraphKind(ULYSSES, "between two dims", ulysses_dims, lambda d: [(B, S, d), (d, d), (d, d)], gradients=False),
    GraphKind(
        ATTENTION,
        "sequence parallel",
        attention_sequence_parallel,
        lambda d: [(B, S, d), (d, 4), (d, 4), (d, 4), (4, d)],
    ),
    GraphKind(
        ATTENTION,
        "before all-to-all",
        attention_before_all_to_all,
        lambda d: [(B, 2, 2 * S, d // 4), (B, 2, 2 * S, d // 4), (B, 2, 2 * S, d // 4), (d, 6)],
    ),
    GraphKind(DATA, "parameter", parameter_gather, lambda d: [(S, d), (d // 2, 6)]),
    GraphKind(DATA, "parameter transposed", parameter_gather_transposed, lambda d: [(S, d), (4, d)]),
    GraphKind(DATA, "parameter cast", parameter_gather_cast, lambda d: [(S, d), (d // 2, 6)], tolerance=1e-5),
    GraphKind(DATA, "gradients all-reduced", gradients_all_reduced, lambda d: [(S, d), (d, 6)]),
    GraphKind(
        DATA,
        "mesh of data and tensor",
        data_and_tensor_parallel,
        lambda d: [(B, S, d), (d // 2, 6), (6, d)],
        groups=MESH,
        left=(TAKEN,),
    ),
    GraphKind(
        SHARED,
        "coalesced",
        coalesced,
        lambda d: [(S, d), (S, d), (d, 6)],
        gradients=False,
    ),
    GraphKind(SHARED, "gathered twice", gathered_twice, lambda d: [(S, d), (d, 6), (d, 6)]),
    GraphKind(
        SHARED,
        "unused",
        unused,
        lambda d: [(S, d), (d, 6)],
        gradients=False,
        left=("no matmul reads the gathered tensor",),
    ),
    GraphKind(EDGES, "result leaves the graph", gathered_leaves, lambda d: [(S, d), (d, 6)]),
    GraphKind(EDGES, "transposed input", transposed_input, lambda d: [(d, S), (d, 6)]),
    *(
        GraphKind(
            FP8,
            name,
            function,
            lambda d: [(2 * S, 2 * d), (2 * d, 16)],
            gradients=False,
            tolerance=1e-5,
            left=(TAKEN,),
        )
        for name, function in (
            ("gathered", gathered_scaled),
            ("gathered with row scales", gathered_scaled_rows),
            ("gathered as bytes", gathered_scaled_bytes),
            ("scattered", scattered_scaled),
            ("scattered with row scales", scattered_scaled_rows),
            ("reduced", reduced_scaled),
        )
    ),
    *(
        GraphKind(
            PEERS,
            f"gather dim {dim} of {len(shape)}",
            gather_dim(dim),
            lambda d, shape=shape, dim=dim: [(*shape[:-1], d), (d * R if dim == len(shape) - 1 else d, 6)],
        )
        for shape in ((4, 0), (2, 4, 0))
        for dim in range(len(shape))
    ),
    *(
        GraphKind(
            PEERS, f"scatter dim {dim} of {len(shape)}", scatter_dim(dim), lambda d, shape=shape: [(*shape, d), (d, 6)]
        )
        for shape in ((4,), (2, 4))
        for dim in range(len(shape) + 1)
    ),
    GraphKind(PEERS, "three consumers", three_consumers, lambda d: [(S, d), (d, 6), (d, 4), (d, 2)]),
    GraphKind(PEERS, "scattered result saved", saved_scatter, lambda d: [(2 * S, d), (d, 6)]),
    GraphKind(PEERS, "all-reduce and norm", norm_after_reduce, lambda d: [(2 * S, 6), (6, d), (2 * S, d), (d,)]),
    GraphKind(PEERS, "norm, then gather", norm_then_gather, lambda d: [(S, d), (d,), (d, 6)]),
)
