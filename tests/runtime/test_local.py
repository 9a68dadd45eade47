from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from fo_compiler.runtime.local import LocalWorld, random_delays
from fo_compiler.runtime.transport import Transport, current_transport, use_transport


def swap(transport: Transport, value: Tensor, group: str = "0") -> Tensor:
    """Send to the next rank of a group, receive from the one before."""
    rank, size = transport.rank_and_size(group)
    received = torch.empty_like(value)
    transport.post(group, (value, (rank + 1) % size), (received, (rank - 1) % size)).wait()
    return received


def test_each_rank_gets_what_the_one_before_it_sent() -> None:
    results = LocalWorld(3).run(lambda rank: swap(current_transport(), torch.full((2,), float(rank))).tolist())
    assert results == [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]


def test_ranks_of_a_group_are_numbered_in_its_order() -> None:
    world = LocalWorld(4, {"tp": [[2, 0], [1, 3]]})
    assert world.run(lambda _: current_transport().rank_and_size("tp")) == [(1, 2), (0, 2), (0, 2), (1, 2)]
    results = world.run(lambda rank: swap(current_transport(), torch.tensor([rank]), "tp").item())
    assert results == [2, 3, 0, 1]


def test_groups_with_different_names_do_not_meet() -> None:
    world = LocalWorld(2, {"a": [[0, 1]], "b": [[0, 1]]})

    def program(rank: int) -> list[int]:
        transport = current_transport()
        peer = 1 - rank
        received = {name: torch.zeros(1, dtype=torch.int64) for name in "ab"}
        order = "ab" if rank == 0 else "ba"  # posted in different orders
        transfers = {
            name: transport.post(name, (torch.tensor([ord(name)]), peer), (received[name], peer)) for name in order
        }
        for name in "ab":
            transfers[name].wait()
        return [received[name].item() for name in "ab"]

    assert world.run(program) == [[ord("a"), ord("b")]] * 2


def test_messages_between_two_ranks_arrive_in_the_order_they_were_sent() -> None:
    def program(rank: int) -> list[float]:
        transport = current_transport()
        if rank == 0:
            transfers = [transport.post("0", (torch.tensor([float(i)]), 1), None) for i in range(3)]
            for transfer in transfers:
                transfer.wait()
            return []
        buffers = [torch.empty(1) for _ in range(3)]
        for transfer in [transport.post("0", None, (buffer, 0)) for buffer in buffers][::-1]:
            transfer.wait()
        return [buffer.item() for buffer in buffers]

    assert LocalWorld(2).run(program)[1] == [0.0, 1.0, 2.0]


def test_a_buffer_that_is_reused_while_in_flight_gives_wrong_values_here_as_on_a_network() -> None:
    posted, spoiled = threading.Event(), threading.Event()

    def program(rank: int) -> float:
        transport = current_transport()
        if rank == 0:
            buffer = torch.ones(1)
            transfer = transport.post("0", (buffer, 1), None)
            buffer.fill_(-1)
            spoiled.set()
            transfer.wait()
            return 0.0
        received = torch.empty(1)
        transfer = transport.post("0", None, (received, 0))
        posted.set()
        assert spoiled.wait(30)
        transfer.wait()
        return received.item()

    assert LocalWorld(2).run(program)[1] == -1.0


def test_a_send_is_done_only_when_it_was_received() -> None:
    received = threading.Event()

    def program(rank: int) -> bool:
        transport = current_transport()
        if rank == 0:
            transport.post("0", (torch.ones(1), 1), None).wait()
            return received.is_set()
        received.set()
        transport.post("0", None, (torch.empty(1), 0)).wait()
        return True

    assert LocalWorld(2).run(program) == [True, True]


def test_waits_may_cross() -> None:
    """Each rank awaits its transfers in another order than its peers: on a network all of them arrive, here too."""

    def program(rank: int) -> list[float]:
        transport, ranks = current_transport(), 3
        peers = [(rank + shift) % ranks for shift in range(1, ranks)]
        buffers = {peer: torch.empty(1) for peer in peers}
        transfers = {
            peer: transport.post("0", (torch.tensor([10.0 * rank + peer]), peer), (buffers[peer], peer))
            for peer in peers
        }
        for peer in sorted(peers, reverse=rank % 2 == 0):
            transfers[peer].wait()
        return [buffers[peer].item() for peer in sorted(peers)]

    assert LocalWorld(3, timeout_s=10).run(program) == [[10, 20], [1, 21], [2, 12]]


def test_a_message_that_arrives_while_another_is_awaited_is_awaited_like_any_other() -> None:
    def program(rank: int) -> list[float]:
        transport = current_transport()
        buffers = [torch.empty(1), torch.empty(1)]
        values = [torch.full((1,), 10.0 * rank + i) for i in range(2)]
        transfers = [transport.post("0", (v, 1 - rank), (b, 1 - rank)) for v, b in zip(values, buffers, strict=True)]
        for transfer in transfers if rank else transfers[::-1]:
            transfer.wait()
        return [b.item() for b in buffers]

    assert LocalWorld(2, timeout_s=10).run(program) == [[10, 11], [0, 1]]


def test_nothing_is_kept_of_a_message_that_was_taken() -> None:
    world = LocalWorld(2)
    world.run(lambda rank: [swap(current_transport(), torch.ones(2)) for _ in range(5)])
    assert not world.arrived
    assert not any(world.expected.values())


def test_delays_are_the_same_for_a_seed_and_do_not_change_what_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("fo_compiler.runtime.local.time.sleep", slept.append)
    for seed in (1, 1, 2):
        delay = random_delays(seed, 2)
        for _ in range(10):
            delay(1, "wait")
        slept.append(-1)
    runs = " ".join(map(str, slept)).split("-1")
    assert runs[0].split() == runs[1].split() != runs[2].split()
    results = LocalWorld(3, delay=random_delays(3, 3)).run(
        lambda rank: swap(current_transport(), torch.tensor(rank)).item()
    )
    assert results == [2, 0, 1]


def test_a_receive_without_a_send_ends_in_an_error_that_names_it() -> None:
    def program(rank: int) -> None:
        if rank == 1:
            current_transport().post("0", None, (torch.empty(1), 0)).wait()

    with pytest.raises(RuntimeError, match=r"receive \('0', 0, 1\): nothing came within 0.05 s"):
        LocalWorld(2, timeout_s=0.05).run(program)


def test_a_send_that_nobody_takes_ends_in_an_error() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            current_transport().post("0", (torch.ones(1), 1), None).wait()

    with pytest.raises(RuntimeError, match=r"send: nothing came"):
        LocalWorld(2, timeout_s=0.05).run(program)


def test_the_failure_of_one_rank_ends_all_and_is_what_is_raised() -> None:
    ended: list[int] = []

    def program(rank: int) -> None:
        if rank == 2:
            raise ZeroDivisionError("rank 2")
        try:
            current_transport().post("0", None, (torch.empty(1), 2)).wait()
        finally:
            ended.append(rank)

    with pytest.raises(ZeroDivisionError, match="rank 2"):
        LocalWorld(4, timeout_s=60).run(program)
    assert sorted(ended) == [0, 1, 3]


@pytest.mark.parametrize("buffer", [torch.empty(3), torch.empty(2, dtype=torch.float64)])
def test_a_message_of_another_shape_or_dtype_is_refused(buffer: Tensor) -> None:
    def program(rank: int) -> None:
        transport = current_transport()
        if rank == 0:
            transport.post("0", (torch.ones(2), 1), None).wait()
        else:
            transport.post("0", None, (buffer.clone(), 0)).wait()

    with pytest.raises(RuntimeError, match="expected"):
        LocalWorld(2).run(program)


def test_ranks_meet_in_rank_order_of_their_group_and_more_than_once() -> None:
    world = LocalWorld(4, {"tp": [[2, 0], [1, 3]]})

    def program(rank: int) -> list[list[int]]:
        transport = world.transport(rank)
        return [transport.meet("tp", rank * 10 + turn) for turn in range(2)]

    assert world.run(program)[0] == [[20, 0], [21, 1]]
    assert world.run(lambda rank: rank) == [0, 1, 2, 3]


def test_the_transport_of_a_thread_is_its_own_and_ends_with_the_block() -> None:
    world = LocalWorld(2)
    default = current_transport()
    with use_transport(world.transport(0)) as _:
        assert current_transport() is not default
        seen: list[Transport] = []
        thread = threading.Thread(target=lambda: seen.append(current_transport()))
        thread.start()
        thread.join()
        assert seen == [default]
        inner = world.transport(1)
        with use_transport(inner):
            assert current_transport() is inner
        assert current_transport() is not inner
    assert current_transport() is default
