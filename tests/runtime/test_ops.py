"""The ops on their own: what a compiler is told of them, and what they do when they run."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fo_compiler import TransferError, record
from fo_compiler.records import GraphRecords, Record
from fo_compiler.runtime import ops
from fo_compiler.runtime.agreement import Agreements, Meeting
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.runtime.transport import Transfer, use_transport


class Done:
    def wait(self) -> None: ...


class Loopback:
    """A transport on which each transfer is done at once, and a message comes back to its sender."""

    def __init__(self) -> None:
        self.posted: list[tuple[tuple[Tensor, int] | None, tuple[Tensor, int] | None]] = []

        self.agreements = Agreements()

    def rank_and_size(self, group_name: str) -> tuple[int, int]:
        return 0, 2

    def meeting(self, group_name: str) -> Meeting | None:
        return None

    def begin(self, group_names: Iterable[str]) -> None: ...

    def post(self, group_name: str, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> Transfer:
        self.posted.append((send, recv))
        if send is not None and recv is not None:
            recv[0].copy_(send[0])
        return Done()


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    transport = Loopback()
    with use_transport(transport):
        yield transport
    ops._pending.clear()


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    assert ops.pending_transfers() == []
    yield
    assert ops.pending_transfers() == []


# All but AOT dispatch: that refuses every op that returns an alias, and these are put into a graph after it.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
TENSORS = {
    "contiguous": torch.arange(12.0).view(3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "column": torch.arange(12.0).view(3, 4)[:, 1:2],
    "strided": torch.arange(24.0).view(3, 8)[:, ::2],
    "expanded": torch.arange(3.0).view(3, 1).expand(3, 4),
    "with an offset": torch.arange(12.0).view(3, 4)[1:],
    "a scalar": torch.tensor(2.0),
    "empty": torch.empty(0, 4),
    "bfloat16": torch.ones(2, 2, dtype=torch.bfloat16),
    "int64": torch.arange(4),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_exchange_passes_the_operator_check(loopback: Loopback, tensor: Tensor) -> None:
    torch.library.opcheck(ops.exchange, (tensor, 1, 1, "0", "check"))


def test_exchange_passes_the_operator_check_without_one_direction(loopback: Loopback) -> None:
    # What is not received has no values to compare.
    torch.library.opcheck(ops.exchange, (torch.ones(2, 3), -1, 1, "0", "check"), test_utils=CHECKS)
    torch.library.opcheck(ops.exchange, (torch.ones(2, 3), 1, -1, "0", "check"), test_utils=CHECKS)


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_announce_passes_the_operator_check(tensor: Tensor) -> None:
    torch.library.opcheck(ops.announce, (tensor, GraphRecords(()).to_payload()), test_utils=CHECKS)


def test_wait_is_an_alias_of_what_it_waits_for_in_schema_and_fake() -> None:
    (returned,) = ops.wait._schema.returns
    recv, sent, _ = ops.wait._schema.arguments
    assert recv.alias_info is not None
    assert returned.alias_info is not None
    assert recv.alias_info.before_set == returned.alias_info.before_set
    assert not recv.alias_info.is_write
    assert sent.alias_info is None
    with FakeTensorMode():
        buffer = torch.empty(3, 4)
        data = ops.wait(buffer, buffer)
        assert data.untyped_storage()._cdata == buffer.untyped_storage()._cdata
        assert data.stride() == buffer.stride()


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_the_fake_has_shape_strides_dtype_and_device_of_what_runs(loopback: Loopback, tensor: Tensor) -> None:
    real = ops.wait(ops.exchange(tensor, 1, 1, "0", "real"), tensor)
    with FakeTensorMode() as mode:
        sent = mode.from_tensor(tensor)
        fake = ops.wait(ops.exchange(sent, 1, 1, "0", "fake"), sent)
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
        real.shape,
        real.stride(),
        real.dtype,
        real.device,
    )


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_what_is_handed_to_the_transport_is_contiguous_and_arrives_with_its_values(
    loopback: Loopback, tensor: Tensor
) -> None:
    data = ops.wait(ops.exchange(tensor, 1, 1, "0", "values"), tensor)
    torch.testing.assert_close(data, tensor)
    ((send, recv),) = loopback.posted
    assert send is not None
    assert send[0].is_contiguous()
    assert recv is not None
    assert recv[0].is_contiguous()


@pytest.mark.parametrize(("dst", "src"), [(1, -1), (-1, 1)])
def test_a_negative_peer_means_no_transfer_in_that_direction(loopback: Loopback, dst: int, src: int) -> None:
    sent = torch.ones(2)
    ops.wait(ops.exchange(sent, dst, src, "0", "one way"), sent)
    ((send, recv),) = loopback.posted
    assert (send is not None, recv is not None) == (dst >= 0, src >= 0)


def test_a_transfer_is_pending_under_its_label_until_it_is_awaited(loopback: Loopback) -> None:
    sent = torch.ones(2)
    first = ops.exchange(sent, 1, 1, "0", "first")
    second = ops.exchange(sent, 1, 1, "0", "second")
    assert ops.pending_transfers() == ["first", "second"]
    ops.wait(first, sent)
    assert ops.pending_transfers() == ["second"]
    ops.wait(second, sent)
    assert ops.pending_transfers() == []


def test_several_empty_transfers_are_told_apart(loopback: Loopback) -> None:
    sent = torch.empty(0, 4)
    buffers = [ops.exchange(sent, 1, 1, "0", f"empty {i}") for i in range(3)]
    assert len(ops.pending_transfers()) == 3
    for buffer in buffers:
        assert ops.wait(buffer, sent).shape == (0, 4)


def test_a_step_that_fails_half_way_leaves_nothing_pending(loopback: Loopback) -> None:
    loopback.post = lambda *_: Done()  # type: ignore[method-assign]

    def step(sent: Tensor) -> None:
        buffers = [ops.exchange(sent, 1, 1, "0", f"transfer {i}") for i in range(3)]
        ops.wait(buffers[1], sent)
        assert ops.pending_transfers() == ["transfer 0", "transfer 2"]
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        step(torch.ones(2))
    assert ops.pending_transfers() == []


class _Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Tensor) -> Tensor:
        ctx.save_for_backward(held)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (held,) = ctx.saved_tensors
        return ops.wait(held, held), None


def test_a_transfer_stays_pending_while_nothing_but_c_plus_plus_holds_its_buffer(loopback: Loopback) -> None:
    x, sent = torch.ones(2, requires_grad=True), torch.full((2,), 3.0)
    y = _Holds.apply(x, ops.exchange(sent, 1, 1, "0", "held"))
    gc.collect()
    assert ops.pending_transfers() == ["held"]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    y = _Holds.apply(x, ops.exchange(sent, 1, 1, "0", "dropped"))
    del y
    loopback.posted.clear()
    gc.collect()
    assert ops.pending_transfers() == []


def test_a_view_of_the_receive_buffer_is_awaited_like_the_buffer(loopback: Loopback) -> None:
    sent = torch.arange(6.0).view(2, 3)
    buffer = ops.exchange(sent, 1, 1, "0", "view")
    data = ops.wait(buffer.view(6), sent)
    assert data.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_view_of_another_part_of_the_buffer_and_an_empty_one_are_awaited_like_the_buffer(loopback: Loopback) -> None:
    sent = torch.arange(6.0).view(2, 3)
    assert ops.wait(ops.exchange(sent, 1, 1, "0", "row")[1], sent).tolist() == [3, 4, 5]
    assert ops.wait(ops.exchange(sent, 1, 1, "0", "none")[2:], sent).shape == (0, 3)


def test_what_a_program_calls_directly_does_what_the_op_does(loopback: Loopback) -> None:
    sent = torch.arange(6.0).view(3, 2).t()
    buffer = torch.ops.fo_compiler.exchange.direct(sent, 1, 1, "0", "direct")
    assert ops.pending_transfers() == ["direct"]
    data = torch.ops.fo_compiler.wait.direct(buffer, sent)
    assert ops.pending_transfers() == []
    torch.testing.assert_close(data, sent)
    with pytest.raises(TransferError, match="awaited twice"):
        torch.ops.fo_compiler.wait.direct(buffer, sent)


def test_waiting_without_an_exchange_is_an_error_that_says_so(loopback: Loopback) -> None:
    with pytest.raises(TransferError, match=r"shape \(2, 3\).*awaited twice"):
        ops.wait(torch.ones(2, 3), torch.ones(1))


def test_waiting_twice_is_an_error(loopback: Loopback) -> None:
    sent = torch.ones(2)
    data = ops.wait(ops.exchange(sent, 1, 1, "0", "once"), sent)
    with pytest.raises(TransferError, match="awaited twice"):
        ops.wait(data, sent)


def test_a_transfer_that_fails_is_named_by_its_label_and_cause() -> None:
    world = LocalWorld(2, timeout_s=0.05)

    def program(rank: int) -> None:
        if rank == 1:
            sent = torch.ones(2)
            ops.wait(ops.exchange(sent, -1, 0, "0", "region ag7, step 3"), sent)

    with pytest.raises(TransferError, match=r"failed: region ag7, step 3\. Cause: receive .* nothing came"):
        world.run(program)


def test_a_transfer_that_cannot_start_is_named_by_its_label_and_leaves_nothing_pending() -> None:
    class Broken(Loopback):
        def post(self, *_: object) -> Transfer:
            raise RuntimeError("no route")

    with (
        use_transport(Broken()),
        pytest.raises(TransferError, match=r"could not be started: region rs1.*no route"),
    ):
        ops.exchange(torch.ones(2), 1, 1, "0", "region rs1")


def test_a_transfer_in_a_group_that_does_not_exist_is_named_by_its_label() -> None:
    with pytest.raises(TransferError, match=r"could not be started: region ag0"):
        ops.exchange(torch.ones(2), 1, 1, "no such group", "region ag0")


def test_a_sent_tensor_that_had_to_be_copied_lives_until_the_transfer_is_done() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Watching(Loopback):
        """Holds what is sent for as long as the transfer runs, as C10dTransport does."""

        def post(self, group_name: str, send: tuple[Tensor, int] | None, recv: tuple[Tensor, int] | None) -> Transfer:
            assert send is not None
            seen.append(weakref.ref(send[0]))
            from fo_compiler.runtime.transport import _C10dTransfer, _Run

            return _C10dTransfer(_Run(), [], None, send[0])

    with use_transport(Watching()):
        sent = torch.ones(4, 4).t()[1:]
        buffer = ops.exchange(sent, 1, 1, "0", "copied")
        gc.collect()
        assert seen[0]() is not None
        ops.wait(buffer, sent)
        gc.collect()
        assert seen[0]() is None


def test_announce_publishes_the_records_it_carries_and_hands_no_tensor_on() -> None:
    row = Record("inference", "all_reduce (of the announce test)", 2, False, None, (), "because")
    tensor = torch.ones(3)
    with record() as report:
        done = ops.announce(tensor, GraphRecords((row,)).to_payload())
        ops.announce(tensor, GraphRecords((row,)).to_payload())
    assert done.numel() == 0, "an alias is one more name for memory that a collective may write to"
    assert report.records == [row]


def test_a_ring_of_exchanges_gathers_on_every_rank() -> None:
    ranks = 4

    def program(rank: int) -> list[float]:
        held = torch.tensor([float(rank)])
        found = [rank]
        for step in range(ranks - 1):
            held = ops.wait(ops.exchange(held, (rank + 1) % ranks, (rank - 1) % ranks, "0", f"step {step}"), held)
            found.append(int(held.item()))
        return found

    assert LocalWorld(ranks).run(program) == [[(rank - i) % ranks for i in range(ranks)] for rank in range(ranks)]
