from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import fx

from fo_compiler import OptionError, torch_adapter
from fo_compiler.torch_adapter import (
    SymmetricMemory,
    as_pass_list,
    compile_with_inductor,
    configured_post_passes,
    fake_process_group,
    functional_collective,
    group_members,
    group_timeout,
    inductor_option_names,
    mode_options,
    resolve_process_group,
    run_after,
    with_own_code,
    without_peer_memory,
)
from tests.graphs import capture


@pytest.fixture
def fake_world() -> Iterator[None]:
    with fake_process_group(1, 4):
        yield


def test_every_private_name_that_the_adapter_imports_is_in_the_installed_torch() -> None:
    source = Path(torch_adapter.__file__).read_text()
    imports = re.findall(r"^ +from (torch\.[\w.]+) import ([\w, ]+?)(?:  #.*)?$", source, re.MULTILINE)
    assert len(imports) >= 5
    for module, names in imports:
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


def test_groups_are_listed_with_their_global_ranks_in_group_order(fake_world: None) -> None:
    pair = dist.new_group([1, 3])
    dist.new_group([0, 2])  # one that this rank is not in
    members = group_members()
    assert len(members) == 2
    assert members[dist.group.WORLD.group_name] == [0, 1, 2, 3]
    assert members[pair.group_name] == [1, 3]


def test_a_group_is_found_by_its_name(fake_world: None) -> None:
    pair = dist.new_group([1, 3])
    group = resolve_process_group(pair.group_name)
    assert (group.rank(), group.size()) == (0, 2)


def test_there_are_no_groups_before_a_process_group_is_made() -> None:
    assert group_members() == {}


def test_modes_are_those_of_inductor() -> None:
    assert mode_options(None) == mode_options("default") == {}
    assert mode_options("max-autotune-no-cudagraphs")["max_autotune"] is True
    with pytest.raises(OptionError, match="max-autotune-no-cudagraphs"):
        mode_options("fastest")


def test_options_of_inductor_are_known_by_name() -> None:
    assert {"max_autotune", "post_grad_custom_post_pass"} <= inductor_option_names()


def test_passes_may_be_configured_as_none_one_or_a_list() -> None:
    from torch._inductor import config

    def one(graph: fx.Graph) -> None: ...

    assert as_pass_list(None) == []
    assert as_pass_list(one) == [one]
    assert as_pass_list((one, one)) == [one, one]
    with config.patch(post_grad_custom_post_pass=one):
        assert configured_post_passes() == [one]


def three_matmuls() -> fx.GraphModule:
    """Three matmuls that do not depend on each other, joined in one buffer."""
    return capture(
        lambda a, b, c, w: torch.cat([a @ w, b @ w, c @ w]),
        [*(torch.randn(4, 8) for _ in range(3)), torch.randn(8, 8)],
    )


def compiled_code(order: list[int]) -> tuple[str, list[torch.Tensor], torch.Tensor]:
    """Inductor's code for `three_matmuls`, run in the given order."""
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.utils import fresh_cache, run_and_get_code

    class InOrder(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            matmuls = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
            first = matmuls[order[0]]
            # An order that is not the graph's own has to be topological first: move them in front of the cat.
            (cat,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
            for index in order:
                cat.prepend(matmuls[index])
            previous = first
            for index in order[1:]:
                previous = run_after(matmuls[index], (previous,))
            graph.lint()

        def uuid(self) -> None:
            return None

    inputs = [*(torch.randn(4, 8) for _ in range(3)), torch.randn(8, 8)]

    def backend(gm: fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        return compile_with_inductor(gm, example_inputs, {"post_grad_custom_post_pass": InOrder()})

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat([a @ w, b @ w, c @ w])

    torch._dynamo.reset()
    with fresh_cache(), torch.no_grad():
        result, (code,) = run_and_get_code(torch.compile(function, backend=backend), *inputs)
    torch._dynamo.reset()
    torch.testing.assert_close(result, function(*inputs))
    return code, inputs, result


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_run_after_keeps_the_order_that_was_asked_for(order: list[int]) -> None:
    code, _, _ = compiled_code(order)
    launches = re.findall(r"extern_kernels\.mm\(arg(\d)_1", code)
    assert launches == ["023"[index] for index in order]  # the weight is argument 1


def test_run_after_lets_a_matmul_write_into_its_part_of_the_joined_buffer() -> None:
    code, _, _ = compiled_code([0, 1, 2])
    joined = re.findall(r"extern_kernels\.mm\(.*out=(\w+)\)", code)
    aliases = re.findall(r"(\w+) = reinterpret_tensor\(.*# alias", code)
    assert len(joined) == 3
    assert set(joined) <= set(aliases)
    assert "cpp_fused_cat" not in code


def test_run_after_keeps_name_value_and_readers_of_the_node() -> None:
    gm = three_matmuls()
    first, second, _ = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    name, value, readers = second.name, second.meta["val"], list(second.users)
    second.meta["fo"] = "kept"
    ordered = run_after(second, (first,))
    gm.graph.lint()
    assert ordered.name == name
    assert ordered.meta["val"] is value
    assert ordered.meta["fo"] == "kept"
    assert list(ordered.users) == readers
    assert first in ordered.all_input_nodes


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["allow_tf32", "fp32_precision", "all backends", "set_float32_matmul_precision"])
def test_tf32_is_known_by_whichever_setting_it_was_allowed(setting: str) -> None:
    """In a process of its own: torch does not like its settings mixed, and says so to whoever reads the older one."""
    how = {
        "allow_tf32": "torch.backends.cuda.matmul.allow_tf32 = {}",
        "fp32_precision": "torch.backends.cuda.matmul.fp32_precision = 'tf32' if {} else 'ieee'",
        "all backends": "torch.backends.fp32_precision = 'tf32' if {} else 'ieee'",
        "set_float32_matmul_precision": "torch.set_float32_matmul_precision('high' if {} else 'highest')",
    }[setting]
    lines = ["import torch", "from fo_compiler.torch_adapter import allows_tf32", "assert not allows_tf32()"]
    for allowed in (True, False):
        lines += [how.format(allowed), f"assert allows_tf32() is {allowed}"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=120)


def test_the_time_out_of_a_group_for_the_cpu_is_known_on_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    timeout = timedelta(seconds=77)
    dist.init_process_group("cpu:gloo", rank=0, world_size=1, store=dist.HashStore(), timeout=timeout)
    try:
        assert group_timeout(dist.group.WORLD) == timeout
    finally:
        dist.destroy_process_group()


class FakeSymmetricMemory:
    """What torch's extension has, as far as it is used; its own docstrings say which arguments there are."""

    asked: ClassVar[list[tuple[Any, ...]]] = []
    rank = 1

    @classmethod
    def empty_strided_p2p(cls, size: Any, stride: Any, dtype: Any, device: Any) -> str:
        cls.asked.append(("empty_strided_p2p", size, stride, dtype, device))
        return "memory"

    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int) -> None:
        self.asked.append(("put_signal", dst_rank, channel, timeout_ms))

    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int) -> None:
        self.asked.append(("wait_signal", src_rank, channel, timeout_ms))

    def get_buffer(self, rank: int, sizes: Any, dtype: Any, storage_offset: int) -> None:
        self.asked.append(("get_buffer", rank, tuple(sizes), dtype, storage_offset))


def test_symmetric_memory_is_an_allocation_of_its_own_whose_signals_have_the_time_out_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._C._distributed_c10d as c10d
    import torch.distributed._symmetric_memory as symmetric_memory

    for name in ("put_signal", "wait_signal", "get_buffer"):
        arguments = list(signature(getattr(FakeSymmetricMemory, name)).parameters)[1:]
        assert re.findall(r"(\w+): ", getattr(c10d._SymmetricMemory, name).__doc__)[1:] == arguments
    assert "(size: Tuple[int, ...], stride: Tuple[int, ...], dtype:" in c10d._SymmetricMemory.empty_strided_p2p.__doc__
    asked = FakeSymmetricMemory.asked
    asked.clear()
    monkeypatch.setattr(c10d, "_SymmetricMemory", FakeSymmetricMemory)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda memory, group: FakeSymmetricMemory())
    monkeypatch.setattr(torch_adapter, "resolve_process_group", lambda name: name)
    monkeypatch.setattr(torch_adapter, "group_timeout", lambda group: timedelta(seconds=5))
    device = torch.device("cuda", 0)
    memory = SymmetricMemory("0", device, ranks=4, slots=2, slot_bytes=64)
    memory.put_signal(3, 1)
    memory.wait_signal(2, 0)
    memory.slot(3, 2, 1, torch.empty(2, 3, dtype=torch.bfloat16))
    assert asked == [
        ("empty_strided_p2p", (512,), (1,), torch.uint8, device),
        ("put_signal", 3, 1, 5000),
        ("wait_signal", 2, 0, 5000),
        ("get_buffer", 3, (2, 3), torch.bfloat16, 5 * 64 // 2),
    ]


@pytest.mark.parametrize(("backend", "reason"), [("CUDA", ""), ("NVSHMEM", "by NVSHMEM here"), (None, "no backend")])
def test_only_torch_s_own_symmetric_memory_will_do(
    backend: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._C._distributed_c10d as c10d

    monkeypatch.setattr(c10d._SymmetricMemory, "get_backend", staticmethod(lambda device: backend))
    found = without_peer_memory(torch.device("cuda"))
    assert reason in found
    assert bool(reason) == bool(found)


def test_a_function_with_code_of_its_own_is_compiled_however_often_the_same_code_was() -> None:
    compiled = []

    def backend(module: torch.fx.GraphModule, inputs: object) -> object:
        compiled.append(module)
        return module.forward

    bias = torch.ones(2)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + bias

    for i in range(12):  # torch leaves a code object alone after eight
        way = torch.compile(with_own_code(shifted), backend=lambda *args: backend(*args))
        assert torch.equal(way(torch.full((2,), float(i))), torch.full((2,), i + 1.0))
    assert len(compiled) == 12


@pytest.mark.parametrize("names", [("all_gather_single", "all_gather_tensor"), ("all_reduce",)])
def test_a_functional_collective_has_the_name_of_the_newer_torch(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an older torch the new name is absent."""
    module = importlib.import_module("torch.distributed._functional_collectives")
    for number, name in enumerate(names):
        of_this_torch = object()
        monkeypatch.setattr(module, name, of_this_torch, raising=False)
        assert functional_collective(names[0]) is of_this_torch
        if number + 1 < len(names):
            monkeypatch.delattr(module, name)
