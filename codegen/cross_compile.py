"""Compile kernels for a GPU that is not there, and read what became of them.

Works with the CPU build of torch beside Triton 3.6 or newer: Triton brings LLVM, `ptxas` and `cuobjdump`.

    for spec in all_specs("sm_90"):
        report = compile_kernel(spec, "sm_90")
        print(report.name, report.registers, report.spills, report.tensor_core_instruction)
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..errors import KernelError
from .launch import Launch
from .tiles import TARGETS

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
}
# In PTX, newest first: fifth-generation tensor cores, warp-group matmul, warp matmul.
_TENSOR_CORE_INSTRUCTIONS = {
    "tcgen05": r"\btcgen05\.mma\b",
    "wgmma": r"\bwgmma\.mma_async\b",
    "mma.sync": r"\bmma\.sync\b",
}


@dataclass(frozen=True)
class KernelSpec:
    """A kernel with the types and constants that it is compiled for, as Triton's own launcher would derive them."""

    name: str
    kernel: Any = field(repr=False)
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    warps: int
    stages: int


@dataclass(frozen=True)
class KernelReport:
    """What a kernel became on `target`.

    - `registers`: a thread
    - `shared_memory_bytes`: a block
    - `spills`: bytes of local memory a thread (our kernels have no local arrays, so all of it is spilled registers)
    - `tensor_core_instruction`: "tcgen05", "wgmma", "mma.sync", or None
    """

    name: str
    target: str
    registers: int
    shared_memory_bytes: int
    spills: int
    tensor_core_instruction: str | None
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)


def spec_of(launch: Launch) -> KernelSpec:
    """What Triton compiles for a launch: sizes of 1 become constants; sizes and pointers divisible by 16 are known to be.

    Tensors may be on the meta device, and count as aligned.
    """
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def type_of(value: Any, path: tuple[int, ...], constant: bool, any_address: bool) -> Any:
        if isinstance(value, tuple) and not constant:
            return tuple(type_of(v, (*path, i), False, any_address) for i, v in enumerate(value))
        if constant or value is None or (type(value) is int and value == 1):
            constants[path] = value
            return "constexpr"
        aligned = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            if not any_address and (value.device.type == "meta" or value.data_ptr() % 16 == 0):
                attributes[path] = aligned
            return f"*{_TYPES[value.dtype]}"
        if type(value) is int:
            if value % 16 == 0:
                attributes[path] = aligned
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        raise KernelError.wrong("argument", "a tensor, an int, None or a tuple of them", repr(value))

    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        signature[parameter.name] = type_of(
            value, (index,), parameter.is_constexpr, parameter.do_not_specialize_on_alignment
        )
    return KernelSpec(launch.name, launch.kernel, signature, constants, attributes, launch.warps, launch.stages)


def compile_kernel(spec: KernelSpec, target: str) -> KernelReport:
    """Compile `spec` for `target` ("sm_80", "sm_90", "sm_100"). Raises KernelError for another target."""
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    if target not in TARGETS:
        raise KernelError.wrong("target", f"one of {', '.join(TARGETS)}", target)
    source = ASTSource(spec.kernel, dict(spec.signature), dict(spec.constants), dict(spec.attributes))
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", int(target.removeprefix("sm_")), 32),
        options={"num_warps": spec.warps, "num_stages": spec.stages},
    )
    return report_of(spec.name, target, compiled)


def report_of(name: str, target: str, compiled: Any) -> KernelReport:
    """What Triton's compiled kernel needs on `target`."""
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    usage = resource_usage(cubin)
    return KernelReport(
        name,
        target,
        usage["REG"],
        int(compiled.metadata.shared),
        usage["STACK"] + usage["LOCAL"],
        tensor_core_instruction(ptx),
        ptx,
        cubin,
    )


def tensor_core_instruction(ptx: str) -> str | None:
    """The newest kind of tensor-core instruction in a PTX text."""
    return next((name for name, pattern in _TENSOR_CORE_INSTRUCTIONS.items() if re.search(pattern, ptx)), None)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """`cuobjdump --dump-resource-usage` of a cubin with one kernel: REG, STACK, SHARED, LOCAL ..."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [_tool("cuobjdump"), "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", text)}


@lru_cache
def _tool(name: str) -> str:
    """A program of CUDA that Triton brings. Raises KernelError where it does not."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise KernelError.wrong("tools", f"{name} beside Triton, as its Linux wheels have it", f"no {path}")
    return str(path)


def all_specs(target: str) -> list[KernelSpec]:
    """Every kernel of ours at its default tiles for `target`, one spec a kind of operands and form."""
    from .kernels.examples import launches

    return [spec_of(launch) for launch in launches(target)]
