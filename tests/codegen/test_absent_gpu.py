"""Generated programs for a GPU that is not there: streams, events and memory, as Inductor leaves them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fo_compiler.codegen.example_models import load_file
from fo_compiler.errors import CommandError
from fo_compiler.options import Options
from fo_compiler.passes import slice_matmuls
from fo_compiler.passes.races import find_races
from fo_compiler.torch_adapter import TORCH_VERSION, fake_process_group, orders_mutation

pytest.importorskip("triton")

from fo_compiler.codegen.absent_gpu import Program, absent_gpu, generate, kernel_reports
from fo_compiler.codegen.program import launch_table, plan_of_program, triton_sources

TWO = pytest.param(
    2, marks=pytest.mark.skipif(not orders_mutation(), reason="Inductor of this torch cannot order writes")
)
GOLDENS = Path(__file__).parent / "goldens"
RANKS = 4


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with fake_process_group(1, RANKS):
        yield
    torch._dynamo.reset()


def linear(kind: str) -> tuple[nn.Module, list[Tensor]]:
    """One region: `all_gather` and a matmul, or a matmul and `reduce_scatter`; [64, 32] @ [32, 64], bf16."""
    with torch.device("meta"):
        layer = nn.Linear(32 if kind == "all_gather" else 32 * RANKS, 64 * RANKS, bias=False).bfloat16()
        x = torch.empty(64 // (RANKS if kind == "all_gather" else 1), 32, dtype=torch.bfloat16)
    style = (
        ColwiseParallel(input_layouts=Shard(0)) if kind == "all_gather" else RowwiseParallel(output_layouts=Shard(0))
    )
    return parallelize_module(layer, dist.init_device_mesh("cpu", (RANKS,)), style), [x]


def programs(
    model: nn.Module,
    inputs: list[Tensor],
    compute_streams: int,
    backward: bool,
    target: str = "sm_90",
    **others: Any,
) -> list[Program]:
    chosen = {
        "rewrite": "always",
        "schedule": "ring",
        "slices_per_rank": 1,
        "compute_streams": compute_streams,
        **others,
    }
    return generate(model, inputs, target, Options(**chosen), backward)[0]


def normalised(source: str) -> str:
    """The body of `call`, without comments, checks, and what the records say."""
    body = source[source.index("def call(") :].partition("runner =")[0]
    lines = [line.partition("  #")[0].strip() for line in body.splitlines()]
    left_out = ("#", "assert_", "raw_stream0 =")
    return "".join(
        re.sub(r"(['\"])[0-9a-f]{16} .*\1", "records", line) + "\n"
        for line in lines
        if line and not line.startswith(left_out)
    )


@pytest.mark.slow
@pytest.mark.parametrize("compute_streams", [1, TWO])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_the_program_of_a_region_is_the_golden_one(kind: str, compute_streams: int) -> None:
    (program,) = programs(*linear(kind), compute_streams, backward=False)
    plan = plan_of_program(program.source)
    assert find_races(plan) == []
    files = {"launches.txt": launch_table(plan)}
    if TORCH_VERSION == (2, 13):  # names of variables differ between versions, launches do not
        files["program.txt"] = normalised(program.source)
    for name, text in files.items():
        path = GOLDENS / f"{kind}_{compute_streams}.{name}"
        if os.environ.get("FO_UPDATE_GOLDENS"):
            path.write_text(text)
        assert text == path.read_text(), f"{path} differs; if the change is meant, run with FO_UPDATE_GOLDENS=1"


@pytest.mark.slow
def test_transfers_by_copy_engine_say_so_in_the_program() -> None:
    (program,) = programs(*linear("all_gather"), 1, backward=False, transport="copy_engine")
    exchanges = [line for line in program.source.splitlines() if "= torch.ops.fo_compiler.exchange" in line]
    assert len(exchanges) == RANKS - 1
    assert all("transport='copy_engine'" in line for line in exchanges)
    assert find_races(plan_of_program(program.source)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "op"), [("all_gather", "gather_matmul"), ("reduce_scatter", "matmul_scatter")])
def test_a_whole_region_is_one_launch_of_the_program(kind: str, op: str) -> None:
    """What the op reads is a view: nothing is copied for it."""
    chosen = {"transport": "copy_engine", "slice_matmul": "whole"}
    (program,) = programs(*linear(kind), 1, backward=False, **chosen)
    plan = plan_of_program(program.source)
    names = [launch.name for launch in plan if not launch.name.startswith(("del ", "return"))]
    assert names == ["fo_compiler.announce", f"fo_compiler.{op}"]
    assert re.search(
        rf"region .. of the inference graph \({kind}_\w*tensor\), step 2".replace("..", r"\w+"), program.source
    )
    assert find_races(plan) == []


class FeedForward(nn.Module):
    """The half of a transformer's layer that has the most kinds of nodes for its time to compile."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm, self.body = layer.ffn_norm, layer.feed_forward

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))  # type: ignore[no-any-return]


def half_a_layer() -> tuple[nn.Module, list[Tensor]]:
    """Norm, two matmuls that share a gather, their product, a matmul and its reduce-scatter, residual; x [2, 64 / ranks, D]."""
    llama = load_file("examples/llama.py")
    with torch.device("meta"):
        model = llama.Llama(llama.LlamaConfig(n_layers=1)).bfloat16()
    llama.apply_tensor_parallel(model, dist.init_device_mesh("cpu", (RANKS,)))
    x = torch.empty(2, 64 // RANKS, model.norm.weight.shape[0], dtype=torch.bfloat16, device="meta")
    return FeedForward(model.layers[0]), [x]


def transformer() -> tuple[nn.Module, list[Tensor]]:
    llama = load_file("examples/llama.py")
    with torch.device("meta"):
        model = llama.Llama(llama.LlamaConfig(n_layers=1)).bfloat16()
        tokens = torch.zeros(2, 64, dtype=torch.int64)
    return llama.apply_tensor_parallel(model, dist.init_device_mesh("cpu", (RANKS,))), [tokens]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "compute_streams"),
    [
        pytest.param(half_a_layer, 2, marks=TWO.marks),
        pytest.param(transformer, 1, marks=pytest.mark.nightly),  # each takes 20 seconds of one core
        pytest.param(transformer, 2, marks=[*TWO.marks, pytest.mark.nightly]),
    ],
)
def test_programs_of_a_model_have_no_race(
    model: Callable[[], tuple[nn.Module, list[Tensor]]], compute_streams: int
) -> None:
    made = programs(*model(), compute_streams, backward=True)
    assert [program.graph for program in made] == ["forward", "backward"]
    for program in made:
        plan = plan_of_program(program.source)
        assert {launch.stream for launch in plan} == ({0, 1} if compute_streams == 1 else {0, 1, 2, 3})
        assert find_races(plan) == []


@pytest.mark.parametrize("check", ["assert_size_stride({}, (16, 32), (32, 1))", "assert_tensor_metadata({}, (16, 32))"])
@pytest.mark.parametrize(("reader", "races"), [("", 0), ("buf1 = torch.ops.aten.neg.default(buf0)", 1)])
def test_checks_of_the_host_touch_no_memory_and_other_calls_do(check: str, reader: str, races: int) -> None:
    """Inductor checks what an op returned at once, while a transfer into it runs; torch 2.14 by another name than 2.11."""
    lines = [
        "arg0_1, = args",
        "buf0 = torch.ops.fo_compiler.exchange.default(arg0_1, 2, 0, '0', '', stream=1, after=[0], event=1)",
        check.format("buf0"),
        reader,
        "buf2 = torch.ops.fo_compiler.wait.default(buf0, arg0_1, after=[1])",
        "return (buf2, )",
    ]
    plan = plan_of_program("def call(args):\n" + "".join(f"    {line}\n" for line in lines))
    assert len(find_races(plan)) == races


class _Residual(nn.Module):
    """A row-parallel layer and what its result is added to, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32 * RANKS, 64, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.layer(x)


@pytest.mark.slow
def test_inductor_adds_all_partial_sums_and_the_residual_in_one_kernel_and_rounds_once() -> None:
    """So `sum_partials` has no op in the graph: one would keep Inductor from fusing what comes next, and win nothing."""
    with torch.device("meta"):
        model = _Residual().bfloat16()
        x, residual = torch.empty(64, 32).bfloat16(), torch.empty(64 // RANKS, 64).bfloat16()
    style = RowwiseParallel(output_layouts=Shard(0))
    parallelize_module(model, dist.init_device_mesh("cpu", (RANKS,)), {"layer": style})
    (program,) = programs(model, [x, residual], 1, backward=False, schedule="direct")
    ours = [launch for launch in plan_of_program(program.source) if not launch.name.startswith(("del ", "return"))]
    arrived = {name for launch in ours if launch.name == "fo_compiler.exchange" for name in launch.writes}
    added = ours[-1]
    assert [launch.name for launch in ours if launch.name.startswith("triton_")] == [added.name]
    assert len(arrived) == RANKS - 1
    assert arrived < added.reads
    assert (
        len(added.reads | added.writes) == RANKS + 1
    )  # theirs, the own one, which is written in place, and the residual
    (kernel,) = triton_sources(program.source).values()
    assert "to(tl.bfloat16)" not in kernel  # the sum stays in float32 until it is stored


class _Transposed(nn.Module):
    """A matmul whose slices are no views of its input: rows of two batches, side by side in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x * 2).transpose(1, 2))


@pytest.mark.slow
@pytest.mark.skipif(not orders_mutation(), reason="Inductor of this torch cannot order writes")
@pytest.mark.parametrize("copied_once", [True, False])
def test_a_copy_for_the_matmul_alone_would_be_found_in_the_program(
    copied_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor copies such a slice for each op that reads it, and reuses the first copy while the matmul reads it."""
    if not copied_once:
        monkeypatch.setattr(slice_matmuls, "_copy_once", lambda graph, reshape: None)
    with torch.device("meta"):
        model = _Transposed()
        x = torch.empty(2, 32 // RANKS, 64)
    style = RowwiseParallel(input_layouts=Shard(2), output_layouts=Shard(1))
    parallelize_module(model, dist.init_device_mesh("cpu", (RANKS,)), {"layer": style})
    (program,) = programs(model, [x], 2, backward=False)
    assert (find_races(plan_of_program(program.source)) == []) is copied_once


@pytest.mark.slow
def test_kernels_of_a_program_compile_for_the_target() -> None:
    (program,) = programs(*linear("reduce_scatter"), 1, backward=False, target="sm_80")
    reports = kernel_reports(program, "sm_80")
    assert reports
    for source, report in reports:
        assert report.name.partition("/")[0] in source
        assert ".target sm_80" in report.ptx
        assert report.cubin.startswith(b"\x7fELF")
        assert report.spills == 0


def test_an_absent_gpu_is_there_inside_the_block_only() -> None:
    before = torch.cuda.is_available(), torch.cuda.device_count()
    with absent_gpu("sm_90"):
        assert torch.cuda.get_device_capability() == (9, 0)
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == before
    with pytest.raises(CommandError, match="sm_80, sm_90, sm_100"), absent_gpu("sm_70"):
        pass
