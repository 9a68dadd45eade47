"""Side streams and events, against a fake of torch.cuda that writes down what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fo_compiler.errors import TransferError
from fo_compiler.runtime import failures, ops, stream_ops, streams, whole_gather, whole_plan, whole_scatter
from fo_compiler.runtime.late_flags import LateFlags
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.runtime.streams import CALLER, COMM, NO_EVENT, join, launch, side_stream
from fo_compiler.runtime.transport import use_transport
from fo_compiler.runtime.whole_plan import Flags, Plan

DEVICE = torch.device("cuda", 0)


class FakeCuda:
    """The part of torch.cuda that streams use. `log` has what each stream was given, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made = 0
        self.current = FakeStream(self, "caller")

    def current_stream(self, device: int) -> FakeStream:
        return self.current

    def current_device(self) -> int:
        return 0

    def Stream(self, device: int, priority: int) -> FakeStream:
        self.made += 1
        return FakeStream(self, f"side{self.made}")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def stream(self, target: FakeStream) -> Iterator[None]:
        before, self.current = self.current, target
        try:
            yield
        finally:
            self.current = before

    def work(self, name: str) -> None:
        self.log.append(f"{self.current.name}: {name}")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name}: wait {event.where}")

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name}: wait for {other.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.where = cuda, "nothing"

    def record(self, stream: FakeStream) -> None:
        self.where = f"{stream.name}@{sum(line.startswith(stream.name) for line in self.cuda.log)}"
        self.cuda.log.append(f"{stream.name}: record")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(streams.torch, "cuda", fake)
    monkeypatch.setattr(streams, "_streams", {})
    streams._of_thread.__dict__.clear()
    whole_plan._of_thread.__dict__.clear()
    return fake


def test_a_side_stream_forks_from_the_caller_and_joins_it(cuda: FakeCuda) -> None:
    cuda.work("before")
    with launch(DEVICE, COMM, [CALLER], 1):
        cuda.work("transfer")
    cuda.work("matmul")
    join(DEVICE, [1])
    assert cuda.log == [
        "caller: before",
        "side1: wait for caller",
        "side1: transfer",
        "side1: record",
        "caller: matmul",
        "caller: wait side1@2",
    ]


def test_the_number_of_streams_is_bounded_however_many_launches(cuda: FakeCuda) -> None:
    for index in range(100):
        with launch(DEVICE, index % 4, [CALLER], index + 1):
            pass
    assert cuda.made == 3


def test_work_on_the_callers_stream_waits_for_no_event_of_its_own(cuda: FakeCuda) -> None:
    with launch(DEVICE, CALLER, [CALLER], NO_EVENT):
        cuda.work("matmul")
    assert cuda.log == ["caller: matmul"]


def test_each_recording_is_a_new_event(cuda: FakeCuda) -> None:
    """An event from a captured graph must not be waited for in another run."""
    seen = []
    for _ in range(2):
        with launch(DEVICE, COMM, [CALLER], 1):
            pass
        seen.append(streams._events(DEVICE)[1])
    assert seen[0] is not seen[1]


def test_devices_have_streams_of_their_own(cuda: FakeCuda) -> None:
    assert side_stream(DEVICE, COMM) is side_stream(DEVICE, COMM)
    assert side_stream(DEVICE, COMM) is not side_stream(torch.device("cuda", 1), COMM)


@pytest.mark.parametrize("kernel", ["library", "triton"])
@pytest.mark.parametrize("dim", [0, 1])
def test_slice_matmul_writes_its_slice_and_nothing_else(dim: int, kernel: str) -> None:
    a, b = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    out = torch.zeros((7, 5) if dim == 0 else (2, 12), dtype=torch.float64)
    stream_ops.slice_matmul(out, a, b, dim, 4, kernel)
    expected = torch.zeros_like(out)
    expected.narrow(dim, 4, 2 if dim == 0 else 5).copy_(a @ b)
    torch.testing.assert_close(out, expected)


class Posted:
    """A transport that fills what is received when its transfer is waited for, on whatever stream that is."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def prepare(self, group_name: str, like: Tensor) -> None:
        self.cuda.work("prepare")

    def post(self, group_name: str, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> Posted:
        assert send is not None
        assert recv is not None
        self.cuda.work("post")
        self.arrives = recv[0], send[0].clone()
        return self

    def wait(self) -> None:
        self.cuda.work("arrive")
        self.arrives[0].copy_(self.arrives[1])


@pytest.fixture
def on_fake_device(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """CPU tensors, as if their device were the fake one."""
    monkeypatch.setattr(streams, "_index", lambda device: 0)
    monkeypatch.setattr(ops, "current_transport", lambda name="c10d": Posted(cuda))
    monkeypatch.setattr(failures, "current_transport", lambda: LocalWorld(3).transport(1))
    return cuda


def test_an_exchange_is_posted_on_its_stream_and_awaited_by_event_without_the_host(on_fake_device: FakeCuda) -> None:
    sent = torch.ones(3)
    received = ops.exchange(sent, 1, 1, "0", "label", stream=COMM, after=[CALLER], event=1)
    assert on_fake_device.log == ["side1: wait for caller", "side1: post", "side1: arrive", "side1: record"]
    torch.testing.assert_close(ops.wait(received, sent, after=[1]), sent)
    assert set(on_fake_device.log[4:]) == {"caller: wait side1@3"}
    assert not ops.pending_transfers()


def test_memory_of_a_buffer_that_is_dropped_half_way_is_free_behind_its_transfer(on_fake_device: FakeCuda) -> None:
    received = ops.exchange(torch.ones(3), 1, 1, "0", "label", stream=COMM, after=[CALLER], event=1)
    before = len(on_fake_device.log)
    del received
    assert on_fake_device.log[before:] == ["caller: wait side1@3"]
    assert not ops.pending_transfers()


def test_a_matmul_on_a_side_stream_is_joined_by_its_event(on_fake_device: FakeCuda) -> None:
    a, out = torch.eye(2), torch.zeros(4, 2)
    stream_ops.fork([a], event=1)
    stream_ops.slice_matmul(out, a, a, 0, 2, "library", stream=2, after=[1], event=2)
    stream_ops.join(out, [a], after=[2])
    assert on_fake_device.log == ["caller: record", "side1: wait caller@0", "side1: record", "caller: wait side1@1"]
    torch.testing.assert_close(out, torch.cat([torch.zeros(2, 2), a]))


@pytest.mark.slow
def test_compiled_slice_matmuls_write_into_one_buffer_without_a_copy() -> None:
    from torch._inductor.utils import fresh_cache, run_and_get_code

    def sliced(a: Tensor, b: Tensor, w: Tensor) -> Tensor:
        out = torch.empty(5, 4, dtype=a.dtype)
        stream_ops.slice_matmul(out, a, w, 0, 0, "library")
        stream_ops.slice_matmul(out, b, w, 0, 2, "library")
        return out.relu()

    a, b, w = (torch.randn(size, dtype=torch.float64) for size in ((2, 3), (3, 3), (3, 4)))
    with fresh_cache():
        result, (code,) = run_and_get_code(torch.compile(sliced, fullgraph=True), a, b, w)
    torch.testing.assert_close(result, (torch.cat([a, b]) @ w).relu())
    assert code.count("slice_matmul.default(buf0") == 2
    assert code.count("empty_strided_cpu(") <= 2  # the buffer, and the result where relu is not in place


@pytest.fixture
def kernels(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that only say that they were launched."""
    pytest.importorskip("triton")
    from fo_compiler.codegen.kernels import whole_gather as gather_kernel
    from fo_compiler.codegen.kernels import whole_scatter as scatter_kernel

    monkeypatch.setattr(gather_kernel, "all_gather_matmul", lambda *_, **__: cuda.work("kernel"))
    monkeypatch.setattr(scatter_kernel, "matmul_reduce_scatter", lambda *_, **__: cuda.work("kernel"))
    monkeypatch.setattr(Flags, "set", lambda flags, index: cuda.work(f"flag {index}"))
    monkeypatch.setattr(Flags, "wait", lambda flags, index: cuda.work(f"wait for flag {index}"))
    monkeypatch.setattr(LateFlags, "watch", lambda late: cuda.work("marks to the host"))


def gather(cuda: FakeCuda) -> Tensor:
    """A whole all-gather region of rank 1 of 3."""
    plan = Plan.of([1, 0, 0, -1, 2, -1], [1, 2, 0, 0, 0, 2, 2, 0], "0", ["step 0", "step 1"])
    return whole_gather.in_one_kernel(plan, [torch.ones(4, 3)], torch.ones(3, 2), Posted(cuda))  # type: ignore[arg-type]


def scatter(cuda: FakeCuda) -> Tensor:
    """A whole reduce-scatter region of rank 1 of 3, direct."""
    plan = Plan.of([0, -1, 2, -1, 1, 0], [0, 0, 1, 2, 2, 2, 1, 0], "0", ["step 0", "step 1"])
    a, b = torch.ones(3, 4, 3), torch.ones(3, 2)
    return whole_scatter.in_one_kernel(plan, a, b, torch.float32, Posted(cuda))  # type: ignore[arg-type]


@pytest.mark.usefixtures("kernels")
def test_flags_of_a_whole_gather_are_raised_behind_their_transfers_and_the_caller_waits_for_both(
    on_fake_device: FakeCuda,
) -> None:
    assert gather(on_fake_device).shape == (12, 2)
    step = ["side1: post", "side1: arrive"]
    assert on_fake_device.log == [
        "side1: wait for caller", *step, "side1: flag 0", *step, "side1: flag 2", "caller: kernel",
        "caller: marks to the host", "caller: wait for side1",
    ]  # fmt: skip


@pytest.mark.usefixtures("kernels")
def test_transfers_of_a_whole_scatter_are_launched_behind_its_kernel_and_wait_for_the_flags_of_their_slices(
    on_fake_device: FakeCuda,
) -> None:
    """What they need is there before: flags are loaded, the transport is ready, and the side stream waits for no kernel.

    What the kernel gave up is on its way to the host before the caller waits for transfers, which may never end.
    """
    assert scatter(on_fake_device).shape == (4, 2)
    loaded = ["caller: flag 0", "caller: wait for flag 0", "caller: prepare"]
    step = ["side1: post", "side1: arrive"]
    log = [
        "side1: wait for caller", "caller: kernel", "caller: marks to the host",
        "side1: wait for flag 0", *step, "side1: flag 3", "side1: wait for flag 2", *step, "side1: flag 4",
        "caller: wait for side1", "caller: marks to the host",
    ]  # fmt: skip
    assert on_fake_device.log == [*loaded, *log]
    scatter(on_fake_device)
    assert on_fake_device.log == [*loaded, *log, "caller: prepare", *log]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("region", [gather, scatter])
def test_a_whole_region_that_fails_half_way_leaves_its_memory_behind_its_transfers(
    region: Callable[[FakeCuda], Tensor], on_fake_device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Posted) -> None:
        raise RuntimeError("connection closed")

    monkeypatch.setattr(Posted, "wait", fail)
    with pytest.raises(TransferError, match=r"transfer failed: step 0\. Cause: connection closed"):
        region(on_fake_device)
    assert on_fake_device.log[-1] == "caller: wait for side1"
    assert ("caller: kernel" in on_fake_device.log) is (region is scatter)


@pytest.mark.usefixtures("cuda")
def test_what_a_region_keeps_is_not_made_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor taken from another stream, whose steps it would mix up with those of the graph."""
    made: list[int] = []

    def keep(number: int) -> int:
        return whole_plan.kept("plan", DEVICE, lambda: made.append(number) or number)  # type: ignore[func-returns-value]

    fake: Any = torch.cuda
    fake.current.cuda_stream, fake.is_current_stream_capturing = 7, lambda: False
    assert keep(1) == 1
    monkeypatch.setattr(fake, "is_current_stream_capturing", lambda: True)
    assert keep(2) == 1
    fake.current.cuda_stream = 8
    with pytest.raises(TransferError, match="run the model once in the same thread and on the same stream first"):
        keep(3)
    assert made == [1]


@pytest.mark.parametrize(("seconds", "polls"), [(600, 600 << 20), (10**6, 2**31 - 1), (0, 1)])
def test_a_kernel_waits_about_as_long_as_the_group_does(
    seconds: int, polls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is an int32 of the kernel."""
    monkeypatch.setattr(whole_plan, "resolve_process_group", lambda name: name)
    monkeypatch.setattr(whole_plan, "group_timeout", lambda group: timedelta(seconds=seconds))
    assert whole_plan.polls_within("0") == polls


@pytest.mark.parametrize("region", [gather, scatter])
def test_the_kernel_of_a_region_gives_up_when_its_flags_do(
    region: Callable[[FakeCuda], Tensor], on_fake_device: FakeCuda, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fo_compiler.codegen.kernels import whole_gather as gather_kernel
    from fo_compiler.codegen.kernels import whole_scatter as scatter_kernel

    polls: list[int] = []
    for module, name in ((gather_kernel, "all_gather_matmul"), (scatter_kernel, "matmul_reduce_scatter")):
        monkeypatch.setattr(module, name, lambda *_, **launched: polls.append(launched["polls"]))
    init = Flags.__init__

    def short(flags: Flags, *args: Any) -> None:
        init(flags, *args)
        flags.polls = 123

    monkeypatch.setattr(Flags, "__init__", short)
    region(on_fake_device)
    assert polls == [123]


def test_marks_of_a_device_that_has_failed_are_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy engine whose signal never came ends in an error of the device, which every later call to it raises."""
    late = LateFlags(["step 0", "step 1"], "0", torch.device("cpu"))
    late.marks[1] = 1
    late.watch()

    class Failed:
        def zero_(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(late, "marks", Failed())
    with use_transport(LocalWorld(3).transport(1)), pytest.raises(TransferError, match="did not arrive: step 1"):
        late.check()


@pytest.mark.parametrize(
    ("device", "hip", "transport", "dtype", "is_kernel"),
    [
        ("cuda:1", None, "copy_engine", torch.bfloat16, True),
        ("cpu", None, "copy_engine", torch.bfloat16, False),
        ("cuda:1", "7.0", "copy_engine", torch.bfloat16, False),
        ("cuda:1", None, "c10d", torch.bfloat16, False),
        ("cuda:1", None, "copy_engine", torch.float64, False),
    ],
)
def test_a_region_is_one_kernel_where_there_is_one(
    device: str, hip: str | None, transport: str, dtype: torch.dtype, is_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    b = FakeTensor(FakeTensorMode(), torch.empty(2, 2, dtype=dtype, device="meta"), torch.device(device))
    assert whole_plan.in_one_kernel_here(b, transport) is is_kernel
