"""The c10d transport on the fake process group: what it asks of torch.distributed (tests/distributed moves real bytes)."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fo_compiler.runtime import transport
from fo_compiler.runtime.transport import INLINE_BYTES, C10dTransport, current_transport
from fo_compiler.torch_adapter import fake_process_group, init_fake_process_group


@pytest.fixture
def fake_world() -> Iterator[None]:
    with fake_process_group(3, 4):
        yield


class FakeWork:
    def __init__(self, ops: list[dist.P2POp]) -> None:
        self.ops = ops
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[FakeWork]:
    seen: list[FakeWork] = []

    def batch_isend_irecv(ops: list[dist.P2POp]) -> list[FakeWork]:
        seen.append(FakeWork(ops))
        return [seen[-1]]

    monkeypatch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
    # As NCCL, which needs a send and a receive in one batch.
    monkeypatch.setattr("fo_compiler.runtime.transport.coalesces", lambda *_: True)
    return seen


class FakeGroup:
    """A group that needs no batches, and its backend. Sends fail where `failure` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.threads: set[int] = set()
        self.failure: Exception | None = None
        self.gate = threading.Event()  # sends wait for it
        self.gate.set()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> FakeWork:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(timeout=20)
        if self.failure:
            raise self.failure
        self.calls.append(("send", rank, tag))
        return FakeWork([])

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> FakeWork:
        self.calls.append(("recv", rank, tag))
        return FakeWork([])


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    made = FakeGroup()
    use(monkeypatch, made)
    return made


def use(monkeypatch: pytest.MonkeyPatch, made: FakeGroup) -> None:
    """Let this be the group of every name."""
    monkeypatch.setattr(transport, "resolve_process_group", lambda name: made)
    monkeypatch.setattr(transport, "has_name", lambda group, name: group is made)
    monkeypatch.setattr(transport, "coalesces", lambda group, device: False)
    monkeypatch.setattr(transport, "point_to_point", lambda group, device: group)


LARGE = INLINE_BYTES // 4 + 1  # floats that a thread sends


@pytest.fixture(params=[2, LARGE], ids=["inline", "by the thread"])
def message(request: pytest.FixtureRequest) -> Tensor:
    return torch.ones(request.param)


def test_without_batches_the_receive_is_posted_first_and_a_large_send_by_another_thread(group: FakeGroup) -> None:
    c10d = C10dTransport()
    for rank in range(20):
        c10d.post("0", (torch.ones(LARGE), rank), (torch.empty(2), rank)).wait()
    assert [rank for kind, rank, _ in group.calls if kind == "send"] == list(range(20))
    assert group.calls[0][0] == "recv"
    assert len(group.threads) == 1
    assert threading.get_ident() not in group.threads


def test_a_small_send_does_not_overtake_a_large_one(group: FakeGroup) -> None:
    """Where pieces shrink the large ones are needed first."""
    c10d = C10dTransport()
    group.gate.clear()
    sizes = (LARGE, 2, LARGE, 3)
    transfers = [c10d.post("0", (torch.ones(size), peer), None) for peer, size in enumerate(sizes)]
    group.gate.set()
    for transfer in transfers:
        transfer.wait()
    assert [peer for _, peer, _ in group.calls] == [0, 1, 2, 3]
    assert threading.get_ident() not in group.threads
    c10d.post("0", (torch.ones(2), 4), None)
    assert threading.get_ident() in group.threads, "nothing waits any more"


def test_a_small_send_is_posted_behind_its_receive_by_the_thread_that_posts_it(group: FakeGroup) -> None:
    C10dTransport().post("0", (torch.ones(LARGE - 1), 2), (torch.empty(2), 3))
    assert [call[:2] for call in group.calls] == [("recv", 3), ("send", 2)]
    assert group.threads == {threading.get_ident()}


def test_how_a_group_posts_is_asked_once_and_again_of_another_group_of_the_same_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[FakeGroup] = []
    c10d, groups = C10dTransport(), [FakeGroup(), FakeGroup()]
    for group in groups:  # as after destroy_process_group
        use(monkeypatch, group)
        monkeypatch.setattr(transport, "point_to_point", lambda group, device: asked.append(group) or group)
        for _ in range(3):
            c10d.post("0", None, (torch.empty(2), 1)).wait()
    assert asked == groups
    assert [len(group.calls) for group in groups] == [3, 3]


def test_what_is_kept_of_a_group_goes_with_it(fake_world: None) -> None:
    name = dist.group.WORLD.group_name
    c10d = C10dTransport()
    watch = weakref.ref(dist.group.WORLD)
    c10d.post(name, None, (torch.empty(2), 1)).wait()
    assert c10d._ends
    dist.destroy_process_group()
    gc.collect()
    init_fake_process_group(3, 4)
    assert watch() is None
    assert c10d._ends == {}


def test_a_group_that_was_destroyed_is_not_posted_to_although_somebody_holds_it(fake_world: None) -> None:
    c10d = C10dTransport()
    for _ in range(2):
        held = dist.group.WORLD
        c10d.post(held.group_name, None, (torch.empty(2), 1)).wait()
        ((found, _),) = [(end.group(), end) for end in c10d._ends.values()]
        assert found is held
        dist.destroy_process_group()
        with pytest.raises(RuntimeError):
            c10d.post(held.group_name, None, (torch.empty(2), 1))
        init_fake_process_group(3, 4)


def test_a_receive_alone_needs_no_thread(group: FakeGroup) -> None:
    C10dTransport().post("0", None, (torch.empty(2), 1)).wait()
    assert [call[:2] for call in group.calls] == [("recv", 1)]


def tags(group: FakeGroup, kind: str, peer: int) -> list[int]:
    return [tag for k, p, tag in group.calls if (k, p) == (kind, peer)]


def test_both_ends_give_a_message_the_same_tag_and_no_other_message_has_it(group: FakeGroup) -> None:
    """The k-th message to a peer in a run meets the k-th that it receives, whatever is exchanged with others meanwhile."""
    c10d = C10dTransport()
    tensor = torch.ones(2)
    for _ in range(3):
        c10d.begin(["0"])
        for peer in (1, 2, 1):
            c10d.post("0", (tensor, peer), None).wait()
        for peer in (2, 1, 1):
            c10d.post("0", None, (tensor, peer)).wait()
    for peer, count in ((1, 6), (2, 3)):
        sent = tags(group, "send", peer)
        assert sent == tags(group, "recv", peer)
        assert len(set(sent)) == count
        assert all(1 << 30 <= tag < 1 << 31 for tag in sent), "c10d takes 31 bits; users take the small ones"


def test_what_a_failed_step_left_on_its_way_is_not_taken_for_a_message_of_the_next(group: FakeGroup) -> None:
    here, there = C10dTransport(), C10dTransport()
    for end in (here, there):
        end.begin(["0"])
    for _ in range(3):  # the peer stops after the first
        here.post("0", (torch.ones(2), 1), None).wait()
    there.post("0", None, (torch.ones(2), 0)).wait()
    stale = set(tags(group, "send", 1))
    for end in (here, there):
        end.begin(["0"])
    here.post("0", (torch.ones(2), 1), None).wait()
    there.post("0", None, (torch.ones(2), 0)).wait()
    assert tags(group, "recv", 0)[-1] == tags(group, "send", 1)[-1]
    assert tags(group, "recv", 0)[-1] not in stale


def test_a_run_that_another_thread_interrupts_ends_in_an_error(group: FakeGroup) -> None:
    """Its messages could be taken for those of the other run, by ranks whose threads take turns in another way."""
    c10d = C10dTransport()
    c10d.begin(["0", "1"])
    thread = threading.Thread(target=c10d.begin, args=(["0"],))
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match=r"another thread.*group '0'"):
        c10d.post("0", None, (torch.ones(2), 1))
    c10d.post("1", None, (torch.ones(2), 1)).wait()
    c10d.begin(["0"])
    c10d.post("0", None, (torch.ones(2), 1)).wait()


def test_a_large_send_that_cannot_be_posted_fails_where_it_is_awaited(group: FakeGroup) -> None:
    group.failure = RuntimeError("no route")
    transfer = C10dTransport().post("0", (torch.ones(LARGE), 1), None)
    with pytest.raises(RuntimeError, match="no route"):
        transfer.wait()


def test_a_small_send_that_cannot_be_posted_fails_at_once_and_keeps_the_memory_of_its_receive(group: FakeGroup) -> None:
    """The receive is posted by then: a message may still arrive."""
    group.failure = RuntimeError("no route")
    c10d, received, gone = C10dTransport(), torch.empty(2), list[str]()
    weakref.finalize(received.untyped_storage(), gone.append, "received")
    with pytest.raises(RuntimeError, match="no route"):
        c10d.post("0", (torch.ones(2), 1), (received, 1))
    del received
    group.failure = None  # with the frames that it was raised in
    gc.collect()
    assert len(c10d._runs["0"].abandoned) == 1
    assert gone == []


def test_a_sent_tensor_lives_until_the_transfer_is_awaited(group: FakeGroup, message: Tensor) -> None:
    sent = message.clone()
    watch: weakref.ref[Tensor] = weakref.ref(sent)
    transfer = C10dTransport().post("0", (sent, 0), None)
    del sent
    gc.collect()
    assert watch() is not None
    transfer.wait()
    gc.collect()
    assert watch() is None


@pytest.mark.slow
def test_a_transfer_that_nobody_awaits_keeps_its_memory_until_its_message_cannot_come_any_more(
    group: FakeGroup, message: Tensor
) -> None:
    """What arrives late must not be written into a tensor that has the memory now."""
    c10d = C10dTransport()
    c10d.begin(["0"])
    gone: list[str] = []
    received, sent = torch.empty(2), message.clone()
    weakref.finalize(received.untyped_storage(), gone.append, "received")
    weakref.finalize(sent, gone.append, "sent")
    c10d.post("0", (sent, 1), (received, 1))
    c10d.post("0", (torch.ones(2), 1), (torch.ones(2), 1)).wait()
    del sent, received
    c10d.begin(["0"])  # the step that failed is over; the next one
    gc.collect()
    assert gone == []
    for _ in range(3):
        c10d.begin(["0"])
    gc.collect()
    assert sorted(gone) == ["received", "sent"]
    assert c10d._runs["0"].abandoned == []


def test_c10d_is_the_transport_unless_a_thread_says_otherwise() -> None:
    assert isinstance(current_transport(), C10dTransport)


def test_ranks_are_those_of_the_group(fake_world: None) -> None:
    pair = dist.new_group([1, 3])
    c10d = C10dTransport()
    assert c10d.rank_and_size(dist.group.WORLD.group_name) == (3, 4)
    assert c10d.rank_and_size(pair.group_name) == (1, 2)


def test_a_send_and_a_receive_are_posted_as_one_batch_to_ranks_of_the_group(
    fake_world: None, batches: list[FakeWork]
) -> None:
    pair = dist.new_group([1, 3])
    sent, received = torch.ones(2), torch.empty(2)
    C10dTransport().post(pair.group_name, (sent, 0), (received, 0))
    ((send, receive),) = [batch.ops for batch in batches]
    assert (send.op, receive.op) == (dist.isend, dist.irecv)
    assert send.tensor is sent
    assert receive.tensor is received
    assert {send.group_peer, receive.group_peer} == {0}
    assert {send.peer, receive.peer} == {1}  # global rank 1 is rank 0 of the pair


@pytest.mark.parametrize("only", ["send", "receive"])
def test_one_direction_alone_is_posted_alone(fake_world: None, batches: list[FakeWork], only: str) -> None:
    tensor = torch.ones(2)
    name = dist.group.WORLD.group_name
    if only == "send":
        C10dTransport().post(name, (tensor, 0), None)
    else:
        C10dTransport().post(name, None, (tensor, 0))
    ((op,),) = [batch.ops for batch in batches]
    assert op.op is (dist.isend if only == "send" else dist.irecv)


def test_waiting_waits_for_every_work_once_and_lets_the_sent_tensor_go(
    fake_world: None, batches: list[FakeWork]
) -> None:
    sent = torch.ones(2)
    watch: weakref.ref[Tensor] = weakref.ref(sent)
    transfer = C10dTransport().post(dist.group.WORLD.group_name, (sent, 0), None)
    (work,) = batches
    work.ops.clear()
    del sent
    gc.collect()
    assert watch() is not None
    assert work.waited == 0
    transfer.wait()
    gc.collect()
    assert work.waited == 1
    assert watch() is None


def test_a_group_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        C10dTransport().rank_and_size("no such group")
