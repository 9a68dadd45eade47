"""Kernels compiled for GPUs that are not there: types derived as Triton's launcher does, what is read from the code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fo_compiler.codegen.cross_compile import KernelReport, all_specs, compile_kernel, spec_of
from fo_compiler.codegen.kernels import (
    all_gather_matmul_launch,
    matmul_into_launch,
    matmul_reduce_scatter_launch,
    set_flags_launch,
    sum_partials_launch,
    wait_flags_launch,
)
from fo_compiler.codegen.kernels.examples import launches
from fo_compiler.codegen.launch import Launch
from fo_compiler.codegen.tiles import SHARED_MEMORY_BYTES, TARGETS, Tile
from fo_compiler.errors import KernelError

SMALL = Tile(16, 16, 16, 4, 2)


def small_spec(dtype: torch.dtype = torch.float32, rows: int = 17, **kwargs: object):  # type: ignore[no-untyped-def]
    a, b = torch.empty(rows, 32, dtype=dtype, device="meta"), torch.empty(32, 48, dtype=dtype, device="meta")
    out = torch.empty(rows, 48, dtype=torch.float32, device="meta")
    launch = matmul_into_launch(a, b, out, tile=SMALL, **kwargs)  # type: ignore[arg-type]
    assert launch is not None
    return spec_of(launch)


def test_a_spec_has_the_types_that_triton_s_launcher_derives() -> None:
    spec = small_spec()
    names = list(spec.signature)
    assert spec.signature["a_ptr"] == "*fp32"
    assert spec.signature["rows"] == "i32"
    assert spec.signature["bias_ptr"] == "constexpr"  # None
    assert spec.constants[(names.index("bias_ptr"),)] is None
    assert spec.signature["a_k"] == "constexpr"  # a stride of 1
    assert spec.constants[(names.index("a_k"),)] == 1
    assert (names.index("depth"),) in spec.attributes  # divisible by 16
    assert (names.index("rows"),) not in spec.attributes
    assert spec.constants[(names.index("BLOCK_M"),)] == 16


def test_a_kernel_is_compiled_without_a_gpu_and_its_resources_are_read() -> None:
    report = compile_kernel(small_spec(torch.bfloat16), "sm_80")
    assert report.tensor_core_instruction == "mma.sync"
    assert 16 <= report.registers <= 255
    assert report.shared_memory_bytes > 0
    assert report.spills == 0
    assert ".target sm_80" in report.ptx
    assert report.cubin.startswith(b"\x7fELF")


def test_a_flag_at_any_address_is_the_same_kernel_which_is_loaded_before_another_one_waits() -> None:
    """To load a kernel may have to wait for the kernel that waits for this flag."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.backends.nvidia.compiler import CUDABackend  # type: ignore[import-untyped]
    from triton.runtime.jit import create_function_from_signature  # type: ignore[import-untyped]

    numbers, addresses = torch.zeros(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int64)
    kinds: dict[str, set[str]] = {}
    for i in range(5):
        one, address = numbers[i : i + 1], addresses[i : i + 1]
        for launch in (wait_flags_launch(one, one, one), set_flags_launch(address, one)):
            kernel = launch.kernel
            bind = create_function_from_signature(
                kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32))
            )
            spec = spec_of(launch)
            kinds.setdefault(launch.name, set()).add(
                f"{bind(**launch.arguments)[1]} {spec.signature} {spec.attributes}"
            )
    assert {name: len(found) for name, found in kinds.items()} == {"wait_flags": 1, "set_flags": 1}


class RecordingKernel:
    """Says what device was current when it was launched."""

    def __init__(self) -> None:
        self.on: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **_: self.on.append(torch.cuda.current_device())


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel, mode = RecordingKernel(), FakeTensorMode()
    for index in (1, 0):
        tensor = FakeTensor(mode, torch.empty(2, device="meta"), torch.device("cuda", index))
        Launch("any", kernel, (1,), {"parts": (tensor,), "out": tensor, "size": 3}, warps=1, stages=1).run()
    assert kernel.on == [1, 0]
    assert current == [0]


def test_spilled_registers_are_seen() -> None:
    a = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    launch = matmul_into_launch(a, a, a, tile=Tile(256, 128, 32, 4, 2))  # 256 sums a thread; there are 255 registers
    assert launch is not None
    assert compile_kernel(spec_of(launch), "sm_80").spills > 0


def test_an_unknown_target_is_refused_by_name() -> None:
    with pytest.raises(KernelError, match=r"sm_80, sm_90, sm_100, got sm_70"):
        compile_kernel(small_spec(), "sm_70")


@pytest.fixture(scope="session")
def reports() -> dict[str, list[KernelReport]]:
    """Every kernel for every target; about two minutes, once."""
    return {target: [compile_kernel(spec, target) for spec in all_specs(target)] for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_specs_have_names_of_their_own(target: str) -> None:
    names = [spec.name for spec in all_specs(target)]
    assert len(set(names)) == len(names)


def launches_of_ones() -> Iterator[Launch | None]:
    """Every kernel with every size and count 1, which Triton makes constants of."""

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    one, tables = meta(1, dtype=torch.int32), [meta(1, width, dtype=torch.int64) for width in (5, 2)]
    a, order = meta(1, 1, 1), meta(1, 2, dtype=torch.int32)
    yield matmul_into_launch(a[0], a[0], a[0], bias=a[0, 0], start=a[0], tile=SMALL)
    yield all_gather_matmul_launch(a, a, a[0], a, order, one, one, one, polls=1, tile=SMALL)
    yield matmul_reduce_scatter_launch(a, a[0], a[0], *tables, one, one, one, polls=1, tile=SMALL)
    yield sum_partials_launch([a], a, a)
    yield wait_flags_launch(one, one, one, polls=1)


@pytest.mark.slow
def test_sizes_of_one_are_constants_that_every_kernel_compiles_with() -> None:
    for launch in launches_of_ones():
        assert launch is not None
        assert compile_kernel(spec_of(launch), "sm_80").spills == 0


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_spills_at_its_default_tiles(reports: dict[str, list[KernelReport]], target: str) -> None:
    assert {r.name: r.spills for r in reports[target] if r.spills} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_fits_the_shared_memory_of_a_block(reports: dict[str, list[KernelReport]], target: str) -> None:
    limit = SHARED_MEMORY_BYTES[target]
    assert {r.name: r.shared_memory_bytes for r in reports[target] if r.shared_memory_bytes > limit} == {}


@pytest.mark.nightly
@pytest.mark.parametrize(("target", "instruction"), [("sm_80", "mma.sync"), ("sm_90", "wgmma"), ("sm_100", "tcgen05")])
def test_matmuls_use_the_tensor_cores_of_their_target(
    reports: dict[str, list[KernelReport]], target: str, instruction: str
) -> None:
    used = {r.name: r.tensor_core_instruction for r in reports[target] if "matmul" in r.name and "fp32" not in r.name}
    assert used
    assert {name: found for name, found in used.items() if found != instruction} == {}


def whole_region(name: str) -> str:
    """PTX of a whole-region kernel at a small tile for sm_90."""
    launch = next(launch for launch in launches("sm_90") if launch.name.startswith(name))
    small = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}
    launch = replace(launch, arguments={**launch.arguments, **small}, warps=4)
    return compile_kernel(spec_of(launch), "sm_90").ptx


@pytest.mark.slow
def test_a_slice_is_read_after_its_flag_was_acquired_and_all_threads_have_met() -> None:
    ptx = whole_region("all_gather_matmul[16bit")
    acquire = ptx.index("ld.acquire.sys.global")
    # From the load of the slice's number on, which opens the loop over tiles, nothing is read ahead.
    assert "cp.async" not in ptx[ptx.rindex("ld.global", 0, acquire) : acquire]
    assert "bar.sync" in ptx[acquire : ptx.index("cp.async", acquire)]


@pytest.mark.slow
def test_a_flag_is_raised_after_the_tile_was_stored_by_all_threads_and_counted() -> None:
    ptx = whole_region("matmul_reduce_scatter[16bit,adds")
    count = ptx.index("atom.global.gpu.acq_rel.add")
    assert "bar.sync" in ptx[ptx.rindex("st.global.v4", 0, count) : count]
    release = ptx.index("st.release.sys.global")
    assert count < release
    assert "bar.sync" in ptx[count:release]
    # What is added is read in the block that follows when its flag was seen and all threads have met.
    met = ptx.index("bar.sync", ptx.index("ld.acquire.sys.global"))
    following = re.search(r"bra(?:\.uni)?\s+(\$\w+);", ptx[met:])
    assert following is not None
    block = ptx[ptx.index(f"\n{following[1]}:") :]
    assert "ld.global.v4" in block[: block.index("\n$L__BB", 1)]


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_16_bit_operands_move_16_bytes_at_a_time(reports: dict[str, list[KernelReport]], target: str) -> None:
    for report in reports[target]:
        if "16bit" in report.name:
            sizes = set(re.findall(r"cp\.async\.\w+\.shared\S*global \[[^]]*\], \[[^]]*\], (\w+)", report.ptx))
            assert sizes == {"0x10"}, report.name
            assert "st.global.v4" in report.ptx, report.name
