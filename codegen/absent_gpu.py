"""Inductor's program, and its kernels, for a GPU that is not there.

    model on fake CPU memory -> Dynamo, AOTAutograd -> the graph moves to "cuda" -> our pass -> Inductor -> text

Works with the CPU build of torch beside Triton: what Inductor asks about a device is answered by a table, and it is
stopped before it loads what it wrote. The graph is captured on the CPU, because autograd wants a device that is linked
in; the ops that only CPUs have are exchanged for those that CUDA has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from ..errors import CommandError
from ..options import Options
from ..passes.overlap_pass import FlashOverlapPass
from ..records import Report, record
from ..torch_adapter import (
    compile_triton_kernel,
    compile_with_inductor,
    fake_module,
    fake_tensor_on,
    forget_devices,
    generate_code,
)
from .cross_compile import KernelReport, report_of
from .program import triton_sources
from .tiles import MULTIPROCESSORS, SHARED_MEMORY_BYTES, TARGETS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

MEMORY_GB = {"sm_80": 80, "sm_90": 80, "sm_100": 180}  # A100, H100 and B200, by their data sheets


@dataclass(frozen=True)
class Program:
    """What Inductor generated for one graph."""

    graph: str
    """`forward`, `backward` or `inference`."""
    source: str = field(repr=False)


def kernel_reports(program: Program, target: str) -> list[tuple[str, KernelReport]]:
    """Compile the Triton kernels of a program for `target`: the source and what became of it.

    Where Inductor offers several configurations, each is a report (`name/0`, `name/1` ...): which one is launched is
    found out by timing them on the device.
    """
    reports = []
    with absent_gpu(target):
        for name, source in triton_sources(program.source).items():
            compiled = compile_triton_kernel(name, source)
            for index, kernel in enumerate(compiled):
                label = name if len(compiled) == 1 else f"{name}/{index}"
                reports.append((source, report_of(label, target, kernel)))
    return reports


def generate(
    model: nn.Module, inputs: Sequence[torch.Tensor], target: str, options: Options, backward: bool = True
) -> tuple[list[Program], Report]:
    """The programs of a model's forward and backward for `target`, and the records of its collectives.

    The model and its inputs are on the meta device. Process groups are the caller's; a fake one will do.
    """
    programs: list[Program] = []
    post = _OnCuda(options)

    def inner(gm: fx.GraphModule, example_inputs: list[Any], **arguments: Any) -> Any:
        which = "backward" if arguments.get("is_backward") else "forward" if backward else "inference"
        with absent_gpu(target):
            source = generate_code(copy.deepcopy(gm), example_inputs, _to_cuda, **arguments)
        programs.append(Program(which, source))

        def run(args: list[Any]) -> Any:
            return fx.Interpreter(gm).run(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        return compile_with_inductor(gm, example_inputs, {"post_grad_custom_post_pass": post}, inner)

    mode, fakes = fake_module(model, inputs)
    with record() as report, mode, torch.set_grad_enabled(backward):
        result = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*fakes)
        if backward:
            result.sum().backward()
    return programs, report


class _OnCuda(FlashOverlapPass):
    """Our pass on a graph that was captured on the CPU, as it would see it on CUDA."""

    def __call__(self, graph: fx.Graph) -> None:
        owner = graph.owning_module
        assert owner is not None
        move_graph(owner, CUDA)
        super().__call__(graph)
        move_graph(owner, CPU)  # Inductor's own passes run tensors through ops, for which CUDA would have to be there


def _to_cuda(gm: fx.GraphModule, inputs: list[Any]) -> list[Any]:
    move_graph(gm, CUDA)
    _use_cuda_attention(gm.graph)
    return [fake_tensor_on(value, CUDA) for value in inputs]


def move_graph(gm: nn.Module, device: torch.device) -> None:
    """Say of every fake tensor in a graph, its sub-graphs included, and of every device argument, that it is `device`."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = fx.node.map_aggregate(node.meta["val"], lambda value: fake_tensor_on(value, device))
            node.args = tuple(device if isinstance(arg, torch.device) else arg for arg in node.args)
            node.kwargs = {k: device if isinstance(arg, torch.device) else arg for k, arg in node.kwargs.items()}


def _use_cuda_attention(graph: fx.Graph) -> None:
    """Exchange the CPU's flash attention for CUDA's memory-efficient one, whose first two results mean the same."""
    aten = torch.ops.aten
    for node in list(graph.nodes):
        if node.target is aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, key, value, *rest = node.args
            causal = rest[1] if len(rest) > 1 else node.kwargs.get("is_causal", False)
            scale, mask = node.kwargs.get("scale"), node.kwargs.get("attn_mask")
            node.target = aten._scaled_dot_product_efficient_attention.default
            node.args, node.kwargs = (query, key, value, mask, True, 0.0, causal), {"scale": scale}
            out, logsumexp = node.meta["val"]
            seed = fake_tensor_on(logsumexp, CUDA).new_empty((), dtype=torch.int64)
            node.meta["val"] = (out, logsumexp, seed, seed)
        elif node.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
            grad, query, key, value, out, logsumexp, _, causal = node.args[:8]
            with graph.inserting_before(node):
                seed = graph.call_function(aten.full.default, ([], 0), {"dtype": torch.int64, "device": CUDA})
            seed.meta["val"] = node.meta["val"][0].new_empty((), dtype=torch.int64)
            scale, mask = node.kwargs.get("scale"), node.kwargs.get("attn_mask")
            node.target = aten._scaled_dot_product_efficient_attention_backward.default
            node.args = (
                grad,
                query,
                key,
                value,
                mask,
                out,
                logsumexp,
                seed,
                seed,
                0.0,
                [True, True, True, False],
                causal,
            )
            node.kwargs = {"scale": scale}
            node.meta["val"] = (*node.meta["val"], None)


@contextmanager
def absent_gpu(target: str) -> Iterator[None]:
    """Let torch and Triton believe, inside the block, that device 0 is a `target`. Raises CommandError for another one."""
    if target not in TARGETS:
        raise CommandError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}.")
    import triton  # type: ignore[import-untyped]

    capability = int(target.removeprefix("sm_"))
    properties = _properties(target, capability)
    answers: dict[str, Any] = {
        "torch.cuda.is_available": True,
        "torch.cuda.is_initialized": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.current_device": 0,
        "torch.cuda.get_device_properties": properties,
        "torch.cuda._get_device_properties": properties,
        "torch.cuda.get_device_capability": divmod(capability, 10),
        "torch.cuda.get_device_name": target,
        "torch.cuda._lazy_init": None,
        "torch.cuda._exchange_device": 0,
        "torch.cuda._maybe_exchange_device": 0,
        "torch.cuda.set_device": None,
        "torch.cuda.synchronize": None,
        "torch.cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": None,
        "torch._C._cuda_getCurrentRawStream": 0,
        "torch._subclasses.fake_tensor.init_gpu_context": None,  # a CUDA build would want a driver
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, _always(answer), create=True))
        driver = triton.runtime.driver
        before = driver._active
        driver.set_active(_Driver(capability, properties))
        stack.callback(setattr, driver, "_active", before)
        forget_devices()
        stack.callback(forget_devices)
        yield


def _always(answer: Any) -> Any:
    return lambda *_, **__: answer


def _properties(target: str, capability: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=target,
        major=capability // 10,
        minor=capability % 10,
        multi_processor_count=MULTIPROCESSORS[target],
        total_memory=MEMORY_GB[target] * 10**9,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65_536,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=SHARED_MEMORY_BYTES[target],
        shared_memory_per_multiprocessor=SHARED_MEMORY_BYTES[target] + 1024,
        L2_cache_size=40 << 20,
        gcnArchName="",
        is_integrated=0,
        uuid=target,
    )


class _Driver:
    """What Triton asks of a driver while it compiles."""

    def __init__(self, capability: int, properties: SimpleNamespace) -> None:
        self.capability = capability
        self.properties = properties
        self.utils = SimpleNamespace(
            get_device_properties=_always(
                {
                    "max_shared_mem": properties.shared_memory_per_block_optin,
                    "multiprocessor_count": properties.multi_processor_count,
                    "warpSize": 32,
                }
            )
        )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]

        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return divmod(self.capability, 10)
