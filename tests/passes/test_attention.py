"""Attention slice by slice: every op that it lowers to, on reference kernels where this machine has none."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fo_compiler.options import Options
from fo_compiler.passes.attention import BACKWARDS, CUDNN, EFFICIENT, FLASH, FLASH_CPU, OVERRIDEABLE, RANDOM_STATE
from fo_compiler.passes.decide import decide
from fo_compiler.passes.regions import plan_region
from fo_compiler.passes.rules import ATTENTIONS, rule_of
from fo_compiler.passes.separability import Cut, NotSeparable, Slices
from fo_compiler.passes.sites import Site, is_collective, site_of
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.testing import assert_equivalent
from tests.graphs import all_gather, capture, reduce_scatter
from tests.passes.helpers import aten, on_each_rank, tensors
from tests.programs import Program

B, H, S, E = 2, 4, 8, 16


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, lower_right: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The definition, and the logsumexp."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        rows, keys = scores.shape[-2:]
        shift = keys - rows if lower_right else 0
        hidden = torch.arange(keys)[None, :] > torch.arange(rows)[:, None] + shift
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def flash(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, _: bool = False, *, scale=None):
    out, lse = attend(q, k, v, None, causal, True, scale)
    seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, offset, out[:0, 0, 0, 0]


def efficient(q: Tensor, k: Tensor, v: Tensor, bias, lse: bool, p: float = 0.0, causal: bool = False, *, scale=None):
    out, sums = attend(q, k, v, bias, causal, False, scale)
    padded = F.pad(sums, (0, -sums.shape[2] % 32)) if lse else sums[:, :, :0]
    return out, padded, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias, lse: bool, p: float = 0.0, causal: bool = False, _=False, *, scale=None
):
    out, sums = attend(q, k, v, bias, causal, False, scale)
    state = torch.zeros((), dtype=torch.int64)
    return out, sums.unsqueeze(-1), None, None, q.shape[2], k.shape[2], state, state.clone(), None


def overrideable(q: Tensor, k: Tensor, v: Tensor, bias=None, p: float = 0.0, causal=False, _=False, *, scale=None):
    out, sums = attend(q, k, v, bias, causal, False, scale)
    state = torch.zeros((), dtype=torch.int64)
    return out, sums, None, None, q.shape[2], k.shape[2], state, state.clone(), None


def _gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, bias, causal: bool, lower_right: bool, scale):
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, _ = attend(*leaves, bias, causal, lower_right, scale)
        return torch.autograd.grad(out, leaves, grad)


def flash_backward(grad, q, k, v, out, lse, cq, ck, mq, mk, p, causal, seed, offset, *, scale=None):
    return _gradients(q, k, v, grad, None, causal, True, scale)


def efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, p, mask, causal=False, *, scale=None):
    return (*_gradients(q, k, v, grad, bias, causal, False, scale), None)


def cudnn_backward(grad, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, p, causal, *, scale=None):
    return _gradients(q, k, v, grad, bias, causal, False, scale)


def overrideable_backward(grad, q, k, v, bias, mask, out, lse, cq, ck, mq, mk, p, causal, seed, offset, *, scale=None):
    return (*_gradients(q, k, v, grad, bias, causal, False, scale), None)


KERNELS = {
    FLASH: flash,
    EFFICIENT: efficient,
    CUDNN: cudnn,
    OVERRIDEABLE: overrideable,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: overrideable_backward,
}
# op -> its arguments behind query, key and value
FORWARD: dict[Any, Callable[[bool], tuple[Any, ...]]] = {
    FLASH: lambda causal: (0.0, causal),
    FLASH_CPU: lambda causal: (0.0, causal),
    EFFICIENT: lambda causal: (None, False, 0.0, causal),
    CUDNN: lambda causal: (None, True, 0.0, causal),
    OVERRIDEABLE: lambda causal: (None, 0.0, causal),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs the ops that need a GPU on their definitions."""
    run = fx.Interpreter.call_function

    def call_function(self: fx.Interpreter, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return KERNELS[target](*args, **kwargs) if target in KERNELS else run(self, target, args, kwargs)

    monkeypatch.setattr(fx.Interpreter, "call_function", call_function)
    return


def program(op: Any, causal: bool, query: list[int], key: list[int], ranks: int = 2) -> tuple[Program, list[fx.Node]]:
    """attention -> [B, L, H * E], and its parts"""
    p = Program(ranks, torch.float64)
    q, k, v = p.input(*query), p.input(*key), p.input(*key)
    results = p.call(op, q, k, v, *FORWARD[op](causal))
    out = p.call(operator.getitem, results, 0)
    merged = p.call(aten.reshape.default, p.call(aten.permute.default, out, [0, 2, 1, 3]), [query[0], query[2], -1])
    return p, [q, k, v, results, out, merged]


def site_of_program(p: Program) -> Site:
    (node,) = [node for node in p.graph.nodes if is_collective(node)]
    site = site_of(node, LocalWorld(p.ranks).transport(0))
    assert isinstance(site, Site)
    return site


def scattered(p: Program, x: fx.Node, dim: int = 1) -> Program:
    from tests.programs import reduce_scatter

    return p.finish([reduce_scatter(p, x, dim)])


def test_every_attention_op_is_tried_here() -> None:
    assert set(FORWARD) == set(RANDOM_STATE)
    assert set(KERNELS) | {FLASH_CPU, aten._scaled_dot_product_flash_attention_for_cpu_backward.default} == ATTENTIONS
    assert set(FORWARD) | BACKWARDS == ATTENTIONS


@pytest.mark.parametrize("op", FORWARD, ids=str)
@pytest.mark.parametrize(("ranks", "m"), [(2, 1), (3, 2)])
def test_query_rows_leave_slice_by_slice(op: Any, ranks: int, m: int) -> None:
    p, nodes = program(op, False, [B, H, 12, E], [B, H, 5, E], ranks)
    scattered(p, nodes[-1])
    records = assert_equivalent(p.module, p.make_inputs(0), Options(rewrite="always", slices_per_rank=m)).records
    assert records[0].region == (nodes[3].name,)


@pytest.mark.parametrize(("rows", "keys"), [(12, 12), (12, 17), (12, 5)])
@pytest.mark.parametrize("heads", [H, 1])
def test_a_causal_slice_sees_the_keys_that_its_rows_see(rows: int, keys: int, heads: int) -> None:
    for op in (FLASH, FLASH_CPU):
        if op is FLASH and keys < rows:
            continue
        p, nodes = program(op, True, [B, H, rows, E], [B, heads, keys, E], 3)
        scattered(p, nodes[-1])
        options = Options(rewrite="always", slices_per_rank=2)
        assert assert_equivalent(p.module, p.make_inputs(0), options).records[0].rewritten, op


@pytest.mark.parametrize(
    ("op", "causal", "rows", "reason"),
    [
        (EFFICIENT, True, 12, "cannot be told where a slice of its rows stands"),
        (CUDNN, True, 12, "cannot be told where a slice of its rows stands"),
        (OVERRIDEABLE, True, 12, "cannot be told where a slice of its rows stands"),
        (FLASH, True, 16, "more rows than keys"),
    ],
    ids=str,
)
def test_what_cannot_be_cut_along_the_rows_says_why(op: Any, causal: bool, rows: int, reason: str) -> None:
    p, nodes = program(op, causal, [B, H, rows, E], [B, H, 12, E])
    scattered(p, nodes[-1])
    with pytest.raises(NotSeparable, match=reason):
        plan_region(site_of_program(p), 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", FORWARD, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_batch_and_heads_are_separable_in_every_form(op: Any, causal: bool, dim: int) -> None:
    p, nodes = program(op, causal, [4, 4, 6, E], [4, 4, 6, E])
    p.leaves += [p.call(operator.getitem, nodes[3], item) for item in (1, *RANDOM_STATE[op])]
    from tests.programs import reduce_scatter

    p.finish([reduce_scatter(p, nodes[4], dim), *p.leaves])
    records = assert_equivalent(p.module, p.make_inputs(0)).records
    assert records[0].region == (nodes[3].name,)


def test_a_padded_logsumexp_is_cut_in_whole_pads_only() -> None:
    p = Program(2, torch.float64)
    q, k = p.input(1, 2, 128, 8), p.input(1, 2, 128, 8)
    results = p.call(EFFICIENT, q, k, k, None, True)
    p.finish([p.call(operator.getitem, results, 0), p.call(operator.getitem, results, 1)])
    assert rule_of(results).from_output(results, Cut(2), Slices(4)).output == Cut(2)
    with pytest.raises(
        NotSeparable, match="pads its logsumexp to a multiple of 32 rows, and a slice has a multiple of 16"
    ):
        rule_of(results).from_output(results, Cut(2), Slices(8))


def test_dropout_is_random_and_is_not_cut() -> None:
    p = Program(2, torch.float64)
    q = p.input(B, H, S, E)
    results = p.call(FLASH, q, q, q, 0.5)
    p.finish([p.call(operator.getitem, results, 0)])
    with pytest.raises(NotSeparable, match="drops at random"):
        rule_of(results).from_output(results, Cut(0), Slices(2))


@pytest.mark.parametrize("op", sorted(BACKWARDS, key=str), ids=str)
def test_gradients_of_attention_are_separable_along_batch_and_heads(op: Any) -> None:
    p = Program(2, torch.float64)
    q, k, v, grad, out = (p.input(2, 4, 6, 8) for _ in range(5))
    lse, number = p.input(2, 4, 6), p.input(1)
    arguments = {
        "grad_out": grad, "grad_out_": grad, "query": q, "key": k, "value": v, "out": out, "logsumexp": lse,
        "cum_seq_q": number, "cum_seq_k": number, "max_q": 6, "max_k": 6, "dropout_p": 0.0, "is_causal": True,
        "philox_seed": number, "philox_offset": number, "attn_bias": None, "grad_input_mask": [True, True, True, False],
    }  # fmt: skip
    try:
        results = p.call(op, *(arguments[formal.name] for formal in op._schema.arguments if formal.name in arguments))
    except NotImplementedError:  # torch 2.11 of the overrideable one
        pytest.skip(f"this torch has no fake kernel of {op}, so that no graph has one")
    p.finish([p.call(operator.getitem, results, 0)])
    for dim in (0, 1):
        split = rule_of(results).from_output(results, Cut(dim), Slices(2))
        assert split.output == Cut(dim)
        assert split.inputs == dict.fromkeys((grad, q, k, v, out, lse), Cut(dim))
    with pytest.raises(NotSeparable, match="needs this dim whole"):
        rule_of(results).from_output(results, Cut(2), Slices(2))


# --- how deep -----------------------------------------------------------------------------------------------------------


def block(x: Tensor, k: Tensor, v: Tensor, wq: Tensor, wo: Tensor) -> Tensor:
    """query projection -> causal attention -> output projection -> reduce-scatter along the sequence"""
    batch, seq, _ = x.shape
    q = (x @ wq).reshape(batch, seq, H, E).transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return reduce_scatter(y.transpose(1, 2).reshape(batch, seq, H * E) @ wo, 1, 2)


SHAPES = ((B, S, 6), (B, H, S, E), (B, H, S, E), (6, H * E), (H * E, 10))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_region_goes_as_deep_as_it_is_told(depth: int) -> None:
    gm = capture(block, tensors(*SHAPES))
    options = Options(rewrite="always", depth=depth, slices_per_rank=2)
    (record,) = assert_equivalent(gm, on_each_rank(2, *SHAPES), options).records
    names = ["mm_1", "_scaled_dot_product_flash_attention_for_cpu", "mm"]
    assert record.region == tuple(names[:depth][::-1])


def test_the_depth_is_what_saves_most_time() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        shapes = ((1, 8192, 4096), (1, H, 8192, E * 8), (1, H, 8192, E * 8), (4096, H * E * 8), (H * E * 8, 4096))
        inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]

        def wide(x: Tensor, k: Tensor, v: Tensor, wq: Tensor, wo: Tensor) -> Tensor:
            q = (x @ wq).reshape(1, 8192, H, E * 8).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return reduce_scatter(y.transpose(1, 2).reshape(1, 8192, H * E * 8) @ wo, 1, 8)

        gm = capture(wide, inputs)
    (node,) = [node for node in gm.graph.nodes if is_collective(node)]
    site = site_of(node, LocalWorld(8).transport(0))
    assert isinstance(site, Site)
    shallow, chosen = (
        decide(site, Options(machine="h100-nvlink", schedule="direct", depth=depth)) for depth in (1, None)
    )
    assert len(shallow.region.matmuls) == 1
    assert len(chosen.region.matmuls) >= 2, "the output projection is too short to hide the transfer"
    assert chosen.saved_us > shallow.saved_us


def test_a_deeper_region_leaves_the_matmuls_next_to_other_collectives_to_them() -> None:
    def layer(x: Tensor, up: Tensor, middle: Tensor, down: Tensor) -> Tensor:
        return reduce_scatter(torch.relu(all_gather(x, 0, 2) @ up) @ middle @ down, 0, 2, "1")

    shapes = ((4, 6), (6, 8), (8, 8), (8, 6))
    gm = capture(layer, tensors(*shapes))
    options, groups = Options(rewrite="always", depth=4), {"0": [[0, 1]], "1": [[0, 1]]}  # of two groups: no chain
    records = assert_equivalent(gm, on_each_rank(2, *shapes), options, groups).records
    assert [record.region for record in records] == [("mm", "mm_1"), ("mm_2",)]
