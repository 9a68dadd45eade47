"""`installed`: our pass inside plain Inductor, on rank 0 of a fake group of four. Values are compared on real ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as inductor
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import fo_compiler
from fo_compiler import FlashOverlapPass, OptionError, Options
from fo_compiler.torch_adapter import fake_process_group

RANKS = 4


@pytest.fixture(scope="module", autouse=True)
def _fake_world() -> Iterator[None]:
    with fake_process_group(0, RANKS):
        yield


@pytest.fixture(autouse=True)
def _no_trace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in Options.names():
        monkeypatch.delenv(f"FO_{name.upper()}", raising=False)
    torch._dynamo.reset()
    before = config.get_config_copy(), inductor.compile_fx
    with fresh_cache():
        yield
    assert (config.get_config_copy(), inductor.compile_fx) == before
    torch._dynamo.reset()


def gathered_matmul(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD) @ w


def gathered_matmul_twice(x: Tensor, w: Tensor) -> Tensor:
    return gathered_matmul(x, w) @ w.t()


def inputs(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 32, requires_grad=requires_grad), torch.randn(32, 24, requires_grad=requires_grad)


def run(call: Callable[..., Any], *args: Tensor) -> list[tuple[str, str | None]]:
    """What was done in the graphs that this call compiles: graph and schedule of each collective."""
    with fo_compiler.record() as report:
        call(*(args or inputs()))
    return [(record.graph, record.schedule) for record in report.records]


class Observer(CustomGraphPass):
    """A pass of the user."""

    def __init__(self) -> None:
        self.graphs: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.graphs.append(str(graph))

    def uuid(self) -> None:
        return None


@pytest.mark.slow
def test_plain_inductor_inside_the_block_does_what_the_backend_does() -> None:
    with_backend = torch.compile(gathered_matmul, backend="flashoverlap", options={"rewrite": "always"})
    with fo_compiler.record() as wanted:
        with_backend(*inputs())
    torch._dynamo.reset()
    with fo_compiler.installed(rewrite="always") as report:
        torch.compile(gathered_matmul)(*inputs())
    assert report.records == wanted.records
    assert [record.rewritten for record in report.records] == [True]


@pytest.mark.slow
def test_after_the_block_inductor_is_as_it_was() -> None:
    original = inductor.compile_fx
    with fo_compiler.installed(rewrite="always"):
        assert inductor.compile_fx is not original
    assert inductor.compile_fx is original
    assert run(torch.compile(gathered_matmul)) == []


def test_an_error_inside_the_block_leaves_nothing_either() -> None:
    original = inductor.compile_fx
    with pytest.raises(ZeroDivisionError), fo_compiler.installed():
        raise ZeroDivisionError
    assert inductor.compile_fx is original


def test_the_first_call_counts_and_not_where_torch_compile_was_called() -> None:
    outside = torch.compile(gathered_matmul)
    with fo_compiler.installed(rewrite="always", schedule="ring"):
        inside = torch.compile(gathered_matmul_twice)
        assert run(outside) == [("inference", "ring")]
    assert run(inside) == []


@pytest.mark.slow
def test_code_that_was_compiled_inside_stays_after_the_block_and_before_it_stays_plain() -> None:
    compiled = torch.compile(gathered_matmul, dynamic=False)
    other = torch.compile(gathered_matmul_twice, dynamic=False)
    other(*inputs())
    with fo_compiler.installed(rewrite="always", schedule="ring"):
        compiled(*inputs())
        assert run(other) == []
    assert run(compiled) == [("inference", "ring")]
    assert run(compiled, torch.randn(8, 32), torch.randn(32, 24)) == [], "another size is another compile"


@pytest.mark.slow
@pytest.mark.parametrize("same_thread", [True, False])
def test_a_backward_graph_goes_with_its_forward_graph_whenever_and_wherever_it_is_compiled(same_thread: bool) -> None:
    with fo_compiler.installed(rewrite="always", schedule="direct") as report:
        y = torch.compile(gathered_matmul)(*inputs(requires_grad=True))
    assert [record.graph for record in report.records] == ["forward"], "the backward graph is compiled at its first run"
    with fo_compiler.record() as later:
        if same_thread:
            y.backward(torch.randn_like(y))
        else:
            thread = threading.Thread(target=y.backward, args=(torch.randn_like(y),))
            thread.start()
            thread.join()
    assert [(record.graph, record.schedule) for record in later.records] == [("backward", "direct")]


def test_a_compile_on_another_thread_is_covered() -> None:
    with fo_compiler.installed(rewrite="always") as report:
        thread = threading.Thread(target=torch.compile(gathered_matmul), args=inputs())
        thread.start()
        thread.join()
    assert len(report.rewritten) == 1


@pytest.mark.parametrize("where", ["globally", "in the options of the compile"])
def test_a_pass_of_the_user_runs_before_ours(where: str) -> None:
    observer = Observer()
    with fo_compiler.installed(rewrite="always") as report:
        if where == "globally":
            with config.patch(post_grad_custom_post_pass=observer):
                torch.compile(gathered_matmul)(*inputs())
        else:
            torch.compile(gathered_matmul, options={"post_grad_custom_post_pass": observer})(*inputs())
    (graph,) = observer.graphs
    assert "all_gather_into_tensor" in graph
    assert len(report.rewritten) == 1


@pytest.mark.slow
def test_of_nested_blocks_the_innermost_counts_and_then_the_outer_one_again() -> None:
    def compile_and_run() -> list[tuple[str, str | None]]:
        torch._dynamo.reset()
        return run(torch.compile(gathered_matmul))

    with fo_compiler.installed(rewrite="always", schedule="ring") as outer:
        first = compile_and_run()
        with fo_compiler.installed(rewrite="always", schedule="direct") as inner:
            second = compile_and_run()
        third = compile_and_run()
    assert [first, second, third] == [[("inference", family)] for family in ("ring", "direct", "ring")]
    assert [record.schedule for record in inner.records] == ["direct"]
    assert {record.schedule for record in outer.records} == {"ring", "direct"}


@pytest.mark.slow
def test_blocks_may_close_in_any_order() -> None:
    original = inductor.compile_fx
    first, second = fo_compiler.installed(rewrite="always"), fo_compiler.installed(rewrite="always")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert run(torch.compile(gathered_matmul)) != []
    second.__exit__(None, None, None)
    torch._dynamo.reset()
    assert run(torch.compile(gathered_matmul)) == []
    inductor.compile_fx = original


def test_a_compile_that_has_our_pass_already_keeps_its_own() -> None:
    observer = Observer()
    with config.patch(post_grad_custom_post_pass=observer), fo_compiler.installed(rewrite="never"):
        backend = torch.compile(
            gathered_matmul, backend="flashoverlap", options={"rewrite": "always", "schedule": "ring"}
        )
        assert run(backend) == [("inference", "ring")]
        torch._dynamo.reset()
        named = FlashOverlapPass(Options(rewrite="always", schedule="direct"))
        alone = torch.compile(gathered_matmul, options={"post_grad_custom_post_pass": named})
        assert run(alone) == [("inference", "direct")]
    assert len(observer.graphs) == 1, "the backend keeps the pass of the user; options of a compile replace it"


def test_the_backend_keeps_the_passes_that_ran_before_a_pass_of_ours() -> None:
    observer = Observer()
    configured = FlashOverlapPass(Options(rewrite="never"), before=(observer,))
    with config.patch(post_grad_custom_post_pass=configured):
        schedules = run(torch.compile(gathered_matmul, backend="flashoverlap", options={"rewrite": "always"}))
    assert [schedule is not None for _, schedule in schedules] == [True]
    assert len(observer.graphs) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewite": "always"}, "Did you mean 'rewrite'"),
        ({"schedule": "zigzag"}, "option 'schedule'"),
        ({"agreement": "plain"}, "only backend='flashoverlap' knows 'plain'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_installed(options: dict[str, Any], message: str) -> None:
    original = inductor.compile_fx
    with pytest.raises(OptionError, match=message), fo_compiler.installed(**options):
        raise AssertionError("the block was entered")
    assert inductor.compile_fx is original
