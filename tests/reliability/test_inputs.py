"""What users hand in: broken machine files, operators that we do not know, and the ways in which PyTorch runs compiled code.

Each ends in a clear error of ours, or in a record that says why a collective was left alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache

import fo_compiler
from fo_compiler import OptionError, Options
from fo_compiler.errors import MachineError
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.schedule.machine import Machine
from fo_compiler.schedule.presets import find_machine
from fo_compiler.torch_adapter import fake_process_group
from tests.graphs import all_gather, capture

RANKS = 4
ALWAYS = {"rewrite": "always"}


@pytest.fixture
def fake_world() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_process_group(0, RANKS), fresh_cache(), config.patch(fallback_by_default=True):
        yield
    torch._dynamo.reset()


# --- options ---------------------------------------------------------------------------------------------------------

WRONG_FOR_ALL = [..., [], {}, (), b"auto", 1j, float("inf"), float("nan"), -1, "no such thing", ""]


@pytest.mark.parametrize("value", WRONG_FOR_ALL, ids=repr)
@pytest.mark.parametrize("name", Options.names())
def test_every_option_refuses_or_takes_a_value_and_never_fails_in_another_way(name: str, value: Any) -> None:
    refusal = ""
    try:
        taken = Options.create({name: value})
    except OptionError as error:
        refusal = str(error)
    if refusal:
        assert name in refusal
        assert repr(value) in refusal
    else:
        assert getattr(taken, name) is value


# --- machine files ---------------------------------------------------------------------------------------------------


def machine_text() -> str:
    return find_machine("h100-nvlink").to_json()


def refused_or_read(text: str) -> bool:
    """Whether a machine file is refused, with an error of ours; what is read has to be a machine."""
    try:
        machine = Machine.from_json(text)
    except MachineError:
        return True
    assert machine.digest()
    return False


def test_a_machine_file_that_is_cut_off_anywhere_is_refused() -> None:
    text = machine_text()
    assert not refused_or_read(text)
    for end in range(0, len(text.rstrip()), 7):
        assert refused_or_read(text[:end]), text[:end]


def edits(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every place of nested containers."""
    yield path, data
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, child in children:
        yield from edits(child, (*path, key))


@pytest.mark.parametrize("value", [None, -1, "x", [], {}, True, 1e400, float("nan")], ids=repr)
def test_a_machine_file_with_a_wrong_value_anywhere_is_refused_or_still_a_machine(value: Any) -> None:
    for path, _ in list(edits(json.loads(machine_text())))[1:]:
        data = json.loads(machine_text())
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        refused_or_read(json.dumps(data))
        if isinstance(place, dict):
            del place[path[-1]]
            refused_or_read(json.dumps(data))


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"[]", b"null", b"3", b'"h100"', b"[" * 200_000], ids=lambda b: repr(b[:9])
)
def test_a_file_that_is_no_machine_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(MachineError):
        find_machine(str(path))


# --- operators that we do not know -----------------------------------------------------------------------------------


@torch.library.custom_op("fo_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def records_of(function: Callable[..., Any], *inputs: Tensor) -> list[fo_compiler.Record]:
    gm = capture(function, inputs)
    return list(overlap(gm.graph, Options(rewrite="always"), LocalWorld(2).transport(0)).records)


def test_an_unknown_operator_between_collective_and_matmul_is_named_in_the_reason() -> None:
    (record,) = records_of(lambda x, w: twice(all_gather(x, 0, 2)) @ w, torch.ones(4, 6), torch.ones(6, 5))
    assert not record.rewritten
    assert "twice" in record.reason


def test_an_unknown_operator_beside_the_matmul_does_not_matter() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        gathered = all_gather(x, 0, 2)
        return twice(gathered), twice(gathered @ w)

    (record,) = records_of(function, torch.ones(4, 6), torch.ones(6, 5))
    assert record.rewritten


def test_a_collective_that_is_not_known_gets_a_record() -> None:
    c10d = torch.ops._c10d_functional

    def function(x: Tensor, w: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.broadcast(x, 0, "0")) @ w

    (record,) = records_of(function, torch.ones(4, 6), torch.ones(6, 5))
    assert not record.rewritten
    assert "broadcast" in record.collective
    assert record.reason


# --- ways to run -----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD))
        return out


def compile_(model: nn.Module, **settings: Any) -> Any:
    return torch.compile(model, backend="flashoverlap", options=ALWAYS, **settings)


def run_under(context: Any, **settings: Any) -> tuple[list[fo_compiler.Record], Tensor]:
    with fo_compiler.record() as report, context:
        y = compile_(Layer(), **settings)(torch.ones(8, 32))
    return report.records, y


@pytest.mark.slow
@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad], ids=lambda c: c.__name__)
def test_a_model_runs_in_each_grad_mode_with_fullgraph(fake_world: None, context: Callable[[], Any]) -> None:
    records, y = run_under(context(), fullgraph=True)
    assert [record.rewritten for record in records] == [True] * len(records)
    assert [record.graph for record in records][:1] == ["forward" if context is torch.enable_grad else "inference"]
    assert y.shape == (8 * RANKS, 24)
    assert y.is_inference() == (context is torch.inference_mode)


@pytest.mark.slow
def test_autocast_casts_as_without_us(fake_world: None) -> None:
    records, y = run_under(torch.autocast("cpu", torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert [record.rewritten for record in records] == [True] * len(records)
    assert records


@pytest.mark.slow
def test_a_compiled_module_exports_as_the_module_that_it_compiles(fake_world: None) -> None:
    """torch.export looks through torch.compile; our backend is no part of what it exports."""
    compiled = compile_(Layer())
    compiled(torch.ones(8, 32))
    exported = torch.export.export(compiled, (torch.ones(8, 32),))
    targets = {str(node.target) for node in exported.graph.nodes}
    assert any("all_gather_into_tensor" in target for target in targets)
    assert not any("fo_compiler" in target for target in targets)
