"""The backend in one process: rank 0 of a fake group of four, in which every collective and transfer is done at once.

Values mean nothing here (tests/distributed compares them); graphs, generated code, records and options do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache, run_and_get_code

import fo_compiler
from fo_compiler import FlashOverlapPass, OptionError, Options, Report
from fo_compiler.runtime.ops import pending_transfers
from fo_compiler.torch_adapter import fake_process_group

RANKS = 4
ALWAYS = {"rewrite": "always"}


@pytest.fixture(scope="module", autouse=True)
def _fake_world() -> Iterator[None]:
    with fake_process_group(0, RANKS):
        yield


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compile sees another one; none leaves a configuration or a transfer behind."""
    for name in Options.names():
        monkeypatch.delenv(f"FO_{name.upper()}", raising=False)
    torch._dynamo.reset()
    before = config.get_config_copy()
    with fresh_cache():
        yield
    assert config.get_config_copy() == before
    assert pending_transfers() == []
    torch._dynamo.reset()


def gathered_matmul(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD) @ w


def scattered_matmul(x: Tensor, w: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x @ w, "sum", 0, dist.group.WORLD)


def reduced_matmul(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", dist.group.WORLD)


def gathered_only(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD) + w.sum()


def inputs(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 32, requires_grad=requires_grad), torch.randn(32, 24, requires_grad=requires_grad)


def compiled(
    function: Callable[..., Any], options: dict[str, Any] | None = None, **settings: Any
) -> tuple[Report, str]:
    """The records of an inference compile, and the code that Inductor generates for it."""
    call = torch.compile(function, backend="flashoverlap", options=options, **settings)
    with fo_compiler.record() as report:
        _, codes = run_and_get_code(call, *inputs())
    return report, codes[0]


def launches(code: str) -> list[str]:
    """What the generated code launches, in order: exchange, wait, mm, other kernels by name."""
    pattern = r"torch\.ops\.fo_compiler\.(exchange|wait)\.direct\(|(extern_kernels\.\w+|cpp_fused\w*)\("
    called = code[code.index("def call(") :]
    return [(a or b).removeprefix("extern_kernels.") for a, b in re.findall(pattern, called)]


class Observer(CustomGraphPass):
    """A custom pass that notes when it runs, and under which configuration."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.graphs: list[list[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append({"max_autotune": config.max_autotune, "epilogue_fusion": config.epilogue_fusion})
        self.graphs.append([str(node.target) for node in graph.nodes])

    def uuid(self) -> None:
        return None


# --- how it is found and configured ---------------------------------------------------------------------------------


def fresh_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_the_backend_is_listed_without_importing_this_package() -> None:
    done = fresh_python(
        "import sys, torch; print('flashoverlap' in torch.compiler.list_backends(), 'fo_compiler' in sys.modules)"
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_an_unknown_option_is_refused_and_the_known_ones_are_listed() -> None:
    call = torch.compile(gathered_matmul, backend="flashoverlap", options={"rewite": "always"})
    with pytest.raises(Exception, match="OptionError") as caught:
        call(*inputs())
    message = str(caught.value)
    assert "no option 'rewite'" in message
    assert "Did you mean 'rewrite'?" in message
    for name in Options.names():
        assert name in message


def test_a_wrong_value_is_refused_with_what_was_expected() -> None:
    call = torch.compile(gathered_matmul, backend="flashoverlap", options={"rewrite": "sometimes"})
    with pytest.raises(
        Exception, match=r"option 'rewrite': expected one of 'auto', 'always', 'never', got 'sometimes'"
    ):
        call(*inputs())


def test_a_refused_option_can_be_caught_as_ours_by_its_cause() -> None:
    call = torch.compile(gathered_matmul, backend="flashoverlap", options={"slices_per_rank": 0})
    with pytest.raises(Exception, match="slices_per_rank") as caught:
        call(*inputs())
    inner = getattr(caught.value, "inner_exception", caught.value.__cause__)
    assert isinstance(inner, OptionError)


@pytest.mark.slow
def test_options_of_inductor_are_handed_on_and_do_not_stay() -> None:
    observer = Observer()
    assert config.epilogue_fusion is True
    report, _ = compiled(gathered_matmul, {**ALWAYS, "epilogue_fusion": False, "post_grad_custom_pre_pass": observer})
    assert [seen["epilogue_fusion"] for seen in observer.seen] == [False]
    assert config.epilogue_fusion is True
    assert len(report.rewritten) == 1


@pytest.mark.slow
def test_a_mode_is_handed_on() -> None:
    observer = Observer()
    with config.patch(post_grad_custom_pre_pass=observer):
        call = torch.compile(gathered_only, backend="flashoverlap", mode="max-autotune-no-cudagraphs")
        with fo_compiler.record() as report:
            call(torch.ones(4, 4), torch.ones(4))
    assert [seen["max_autotune"] for seen in observer.seen] == [True]
    assert config.max_autotune is False
    assert len(report.records) == 1


@pytest.mark.parametrize("mode", ["fastest", 3, ["default"]])
def test_a_wrong_mode_is_an_option_error_that_lists_the_known_ones(mode: Any) -> None:
    with pytest.raises(OptionError, match=r"'mode'.*'max-autotune-no-cudagraphs'"):
        fo_compiler.backend.flashoverlap(fx.symbolic_trace(lambda x: x), [torch.ones(1)], mode=mode)


@pytest.mark.slow
def test_the_environment_configures_the_backend_and_an_option_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FO_REWRITE", "never")
    report, _ = compiled(gathered_matmul)
    assert [record.rewritten for record in report.records] == [False]
    torch._dynamo.reset()
    report, _ = compiled(gathered_matmul, ALWAYS)
    assert [record.rewritten for record in report.records] == [True]


# --- with other passes, and inside plain Inductor -------------------------------------------------------------------


def test_the_pass_alone_in_plain_inductor_does_the_same() -> None:
    with_backend, _ = compiled(gathered_matmul, ALWAYS)
    torch._dynamo.reset()
    alone = torch.compile(
        gathered_matmul, options={"post_grad_custom_post_pass": FlashOverlapPass(Options(rewrite="always"))}
    )
    with fo_compiler.record() as report:
        alone(*inputs())
    assert report.records == with_backend.records
    assert len(report.rewritten) == 1


@pytest.mark.parametrize("configured", ["as an option", "globally"])
def test_a_custom_pass_of_the_user_runs_before_ours(configured: str) -> None:
    observer = Observer()
    if configured == "globally":
        with config.patch(post_grad_custom_post_pass=observer):
            report, _ = compiled(gathered_matmul, ALWAYS)
    else:
        report, _ = compiled(gathered_matmul, {**ALWAYS, "post_grad_custom_post_pass": observer})
    (graph,) = observer.graphs
    assert "_c10d_functional.all_gather_into_tensor.default" in graph
    assert len(report.rewritten) == 1


def test_our_pass_configured_globally_and_the_backend_do_not_rewrite_twice() -> None:
    with config.patch(post_grad_custom_post_pass=FlashOverlapPass(Options(rewrite="never"))):
        report, _ = compiled(gathered_matmul, ALWAYS)
    assert [record.rewritten for record in report.records] == [True]


@pytest.mark.slow
def test_compiles_with_different_options_do_not_see_each_other() -> None:
    x, w = inputs()
    options = [
        {**ALWAYS, "schedule": "ring"},
        {"rewrite": "never"},
        {**ALWAYS, "schedule": "direct"},
        {**ALWAYS, "schedule": "ring", "slices_per_rank": 2},
    ]
    calls = [torch.compile(gathered_matmul, backend="flashoverlap", options=o) for o in options]
    schedules = []
    for call in calls:
        torch._dynamo.reset()  # one code object: dynamo would take the first compile for all of them
        with fo_compiler.record() as report:
            call(x, w)
        schedules.append([record.schedule for record in report.records])
    assert schedules == [["ring"], [None], ["direct"], ["ring x2"]]


def test_plain_inductor_beside_us_keeps_its_collectives() -> None:
    compiled(gathered_matmul, ALWAYS)
    torch._dynamo.reset()
    with fo_compiler.record() as report:
        _, (code,) = run_and_get_code(torch.compile(gathered_matmul), *inputs())
    assert "all_gather_into_tensor" in code
    assert "fo_compiler" not in code
    assert report.records == []


# --- records --------------------------------------------------------------------------------------------------------


def test_never_leaves_every_collective_with_a_record() -> None:
    report, code = compiled(gathered_matmul, {"rewrite": "never"})
    (record,) = report.records
    assert (record.rewritten, record.schedule, record.region) == (False, None, ())
    assert "rewrite='never'" in record.reason
    assert "all_gather_into_tensor" in code
    assert "exchange" not in launches(code)


@pytest.mark.slow
def test_forward_and_backward_are_recorded_as_such() -> None:
    call = torch.compile(gathered_matmul_autograd, backend="flashoverlap", options=ALWAYS)
    x, w = inputs(requires_grad=True)
    with fo_compiler.record() as report:
        call(x, w).sum().backward()
    assert [(r.graph, r.collective.partition(" ")[0], r.rewritten) for r in report.records] == [
        ("forward", "all_gather_into_tensor", True),
        ("backward", "reduce_scatter_tensor", True),
    ]


def gathered_matmul_autograd(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD) @ w


@pytest.mark.slow
def test_a_collective_without_a_matmul_is_left_with_a_reason() -> None:
    report, code = compiled(gathered_only, ALWAYS)
    (record,) = report.records
    assert not record.rewritten
    assert "no matmul" in record.reason
    assert "all_gather_into_tensor" in code


def test_a_compile_without_collectives_has_no_records() -> None:
    report, code = compiled(lambda x, w: x @ w, ALWAYS)
    assert report.records == []
    assert "fo_compiler" not in code


@pytest.mark.slow
def test_every_kind_of_collective_in_one_graph_gets_exactly_one_record() -> None:
    def several(x: Tensor, w: Tensor) -> Tensor:
        y = scattered_matmul(gathered_matmul(x, w), w.t())
        z = funcol.all_reduce(y.sum(), "sum", dist.group.WORLD)
        t = funcol.all_to_all_single(x, None, None, dist.group.WORLD)
        return y * z + t.sum()

    report, code = compiled(several, ALWAYS)
    kinds = sorted(record.collective.partition(" ")[0] for record in report.records)
    assert kinds == ["all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor"]
    assert all(record.reason for record in report.records)
    for record in report.records:
        op = record.collective.partition(" ")[0]
        assert record.rewritten == (f"_c10d_functional.{op}" not in code)


def test_records_come_again_when_the_graph_comes_from_the_cache() -> None:
    first, _ = compiled(gathered_matmul, ALWAYS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    again, _ = compiled(gathered_matmul, ALWAYS)
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] == 1
    assert again.records == first.records
    assert len(again.records) == 1


@pytest.mark.slow
def test_records_of_a_graph_that_is_left_alone_come_from_the_cache_too() -> None:
    first, _ = compiled(gathered_only, ALWAYS)
    torch._dynamo.reset()
    again, _ = compiled(gathered_only, ALWAYS)
    assert again.records == first.records
    assert len(again.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("function", [gathered_matmul, scattered_matmul, reduced_matmul])
def test_a_symbolic_graph_is_rewritten_once_and_serves_other_sizes(function: Callable[..., Tensor]) -> None:
    call = torch.compile(function, backend="flashoverlap", options=ALWAYS)
    with fo_compiler.record() as report, torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (8, 16, 20):
            x, w = torch.ones(rows, 32), torch.ones(32, 8)
            torch._dynamo.mark_dynamic(x, 0)
            expected = {gathered_matmul: rows * RANKS, scattered_matmul: rows // RANKS, reduced_matmul: rows}
            assert call(x, w).shape == (expected[function], 8)
    (record,) = report.records
    assert record.rewritten, record
    assert "of the first call" in record.reason


@pytest.mark.slow
@pytest.mark.parametrize("function", [gathered_matmul, scattered_matmul])
def test_an_uneven_or_empty_size_does_not_crash(function: Callable[..., Tensor]) -> None:
    call = torch.compile(function, backend="flashoverlap", options={**ALWAYS, "slices_per_rank": 4}, dynamic=False)
    for rows in (0, 4, 12, 28):
        with fo_compiler.record() as report:
            call(torch.ones(rows, 32), torch.ones(32, 8))
        (record,) = report.records
        assert record.rewritten == (rows > 0), record


# --- the generated code ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["ring", "direct"])
def test_each_transfer_of_a_gather_starts_before_the_matmul_that_hides_it(schedule: str) -> None:
    _, code = compiled(gathered_matmul, {**ALWAYS, "schedule": schedule})
    assert launches(code) == ["exchange", "mm", "wait"] * (RANKS - 1) + ["mm"]
    assert code.index("ops.fo_compiler.announce.direct(") < code.index("ops.fo_compiler.exchange.direct(")


def test_matmuls_after_a_gather_write_in_place_of_the_joined_buffer() -> None:
    _, code = compiled(gathered_matmul, ALWAYS)
    joined = re.findall(r"extern_kernels\.mm\(.*, out=(\w+)\)", code)
    aliases = dict(re.findall(r"(\w+) = reinterpret_tensor\((\w+), .*# alias", code))
    assert len(joined) == RANKS
    assert len({aliases[buffer] for buffer in joined}) == 1
    assert "cpp_fused" not in code
    assert "_c10d_functional" not in code


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["ring", "direct"])
def test_each_transfer_of_a_scatter_starts_before_the_matmul_that_hides_it(schedule: str) -> None:
    report, code = compiled(scattered_matmul, {**ALWAYS, "schedule": schedule})
    assert [record.schedule for record in report.records] == [schedule]
    order = launches(code)
    assert order.count("exchange") == order.count("wait") == RANKS - 1
    assert order.count("mm") == RANKS
    pinned = [name for name in order if name in ("exchange", "mm", "wait")]
    assert pinned == ["mm"] + ["exchange", "mm", "wait"] * (RANKS - 1)
    assert "_c10d_functional" not in code


@pytest.mark.slow
def test_the_slices_before_a_scatter_are_read_where_they_lie() -> None:
    _, code = compiled(scattered_matmul, {**ALWAYS, "schedule": "ring"})
    operands = re.findall(r"extern_kernels\.mm\((reinterpret_tensor\(arg0_1, \(4, 32\), \(32, 1\), \d+\)), ", code)
    assert len(set(operands)) == RANKS
    kernels = [name for name in launches(code) if name.startswith("cpp_fused")]
    assert len(kernels) == RANKS - 1  # the adds, and no copy


@pytest.mark.slow
def test_a_tensor_in_flight_is_not_overwritten_before_the_wait() -> None:
    """The input is changed in place after the gather: the change has to come behind the last transfer that reads it."""

    def changed_afterwards(x: Tensor, w: Tensor) -> Tensor:
        y = gathered_matmul(x, w)
        x.mul_(2)
        return y

    _, code = compiled(changed_afterwards, {**ALWAYS, "schedule": "direct"})
    order = launches(code)
    last_wait = max(index for index, name in enumerate(order) if name == "wait")
    change = next(index for index, name in enumerate(order) if "mul" in name)
    assert change > last_wait


def test_the_receive_buffer_is_kept_until_its_last_reader() -> None:
    _, code = compiled(gathered_matmul, ALWAYS)
    waits = re.findall(r"(\w+) = torch\.ops\.fo_compiler\.wait\.direct\((\w+),", code)
    assert len(waits) == RANKS - 1
    for wait, buffer in waits:
        after = code[code.index(f"{wait} = torch.ops.fo_compiler.wait") :]
        renamed = re.search(rf"(\w+) = {wait}\n", after)  # not since torch 2.14
        reader = after.index(f"mm({renamed[1] if renamed else wait},")
        deleted = re.search(rf"del {buffer}\n", after)
        assert deleted is None or deleted.start() > reader


# --- logs and traces ------------------------------------------------------------------------------------------------

SCRIPT = """
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
def f(x, w):
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD) @ w + funcol.all_reduce(w, "sum", dist.group.WORLD).sum()
torch.compile(f, backend="flashoverlap", options={"rewrite": "always"})(torch.ones(4, 8), torch.ones(8, 8))
"""


@pytest.mark.slow
def test_logs_and_traces_show_the_records(tmp_path: Path) -> None:
    done = fresh_python(
        SCRIPT,
        TORCH_LOGS="+fo_compiler",
        TORCH_TRACE=str(tmp_path / "trace"),
        FO_DUMP_DIR=str(tmp_path / "dump"),
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 2 collectives of a graph rewritten" in done.stderr
    assert "all_gather_into_tensor" in done.stderr
    assert "all_reduce" in done.stderr
    (dump,) = (tmp_path / "dump" / "rank0").iterdir()
    rows = json.loads((dump / "records.json").read_text())
    for row in rows:
        assert row["reason"] in done.stderr
    trace = "".join(path.read_text() for path in (tmp_path / "trace").iterdir())
    assert "fo_compiler_inference_records" in trace
    assert "1 of 2 collectives rewritten" in trace


@pytest.mark.slow
def test_logs_are_quiet_by_default(tmp_path: Path) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=240,
        env={k: v for k, v in os.environ.items() if not k.startswith(("TORCH_", "FO_"))} | environment,
    )
    assert done.returncode == 0, done.stderr
    assert "rewritten" not in done.stderr + done.stdout
    assert "fo_compiler" not in done.stderr + done.stdout


# --- explain --------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Gathers, multiplies, and has all the state that a run may leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        y = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD) @ self.weight
        return {"out": self.dropout(self.norm(y)) * scale}


@pytest.mark.slow
def test_explain_reports_forward_and_backward_and_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = Layer()
    x = torch.randn(8, 32, requires_grad=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    report = fo_compiler.explain(model, x, scale=2.0, options=ALWAYS)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert model.weight.grad is None
    assert x.grad is None
    assert [(r.graph, r.rewritten) for r in report.records] == [("forward", True), ("backward", True)]
    assert str(report).splitlines()[-1] == "2 of 2 collectives rewritten"
    assert [row["graph"] for row in json.loads(report.to_json())] == ["forward", "backward"]


def test_explain_of_a_function_for_inference() -> None:
    with torch.no_grad():
        report = fo_compiler.explain(gathered_matmul, *inputs(), options=ALWAYS)
    assert [(r.graph, r.rewritten) for r in report.records] == [("inference", True)]


def test_explain_refuses_an_unknown_option() -> None:
    with pytest.raises(Exception, match="no option 'rewites'"):
        fo_compiler.explain(gathered_matmul, *inputs(), options={"rewites": "always"})


def tiled_gathered(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """x has an unbacked number of rows, of which sizes follow that a region would have."""
    rows = funcol.all_gather_tensor(w, 0, dist.group.WORLD).unsqueeze(1)
    return rows.expand(16, x.shape[0], 6).reshape(16 * x.shape[0], 6) @ v


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, ALWAYS], ids=["auto", "always"])
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (reduced_matmul, [(5, 6), (6, 4)]),
        (tiled_gathered, [(5, 2), (4, 6), (6, 3)]),
    ],
)
def test_sizes_that_depend_on_data_compile_and_the_record_says_why_it_was_left_alone(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    arguments = [torch.randn(shape) for shape in shapes]
    torch._dynamo.decorators.mark_unbacked(arguments[0], 0)
    with fo_compiler.record() as report:
        torch.compile(function, backend="flashoverlap", options=options)(*arguments)
    (record,) = report.records
    assert not record.rewritten
    assert record.reason


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"rewrite": "never"}, {}, ALWAYS], ids=["never", "auto", "always"])
def test_a_program_in_c_plus_plus_carries_the_records_too(options: dict[str, Any]) -> None:
    with fo_compiler.record() as report:
        torch.compile(reduced_matmul, backend="flashoverlap", options={"cpp_wrapper": True, **options})(*inputs())
    (record,) = report.records
    assert record.rewritten == (options == ALWAYS)
