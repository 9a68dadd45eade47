"""The simulator: the paper's arithmetic, what sockets showed, contention, ports, and its own two paths compared."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.errors import ScheduleError
from fo_compiler.schedule import Action, Compute, Kind, Post, Recv, Schedule, Stream, Wait, build
from fo_compiler.schedule.families import FAMILIES
from fo_compiler.schedule.machine import Machine, simple_machine
from fo_compiler.schedule.network import Matrix, TwoLevel, Uniform
from fo_compiler.schedule.presets import PRESETS
from fo_compiler.schedule.simulate import RegionCost, simulate

BOTH = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
GIGABIT = simple_machine(bandwidth_GBps=0.125)


def all_posted_at_once(schedule: Schedule) -> Schedule:
    """The same transfers without the paper's timing: every post first."""
    assert schedule.relative is not None
    posts: list[Action] = [action for action in schedule.relative if isinstance(action, Post)]
    return replace(schedule, relative=tuple(posts + [a for a in schedule.relative if not isinstance(a, Post)]))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("family", ["ring", "direct"])
@pytest.mark.parametrize(("t_c", "t_p"), [(10.0, 4.0), (10.0, 10.0), (10.0, 25.0)])
def test_the_time_is_that_of_the_paper(kind: Kind, family: str, t_c: float, t_p: float) -> None:
    for ranks in (2, 3, 4, 8):
        simulation = simulate(build(kind, family, ranks), simple_machine(), RegionCost(t_c, t_p * 1e3))
        assert simulation.makespan_us == pytest.approx(t_c + (ranks - 1) * max(t_c, t_p))
        assert simulation.exposed_us == pytest.approx((ranks - 1) * max(0.0, t_p - t_c))


def test_the_order_of_posting_is_the_method_as_on_real_sockets() -> None:
    # docs/scheduling.md: measured 103 and 103.6 ms one step ahead, 123 ms all at once, 101 ms of compute alone.
    direct = build(Kind.ALL_GATHER, "direct", 4)
    cost = RegionCost(25e3, 2e6)
    assert simulate(direct, GIGABIT, cost).makespan_us == pytest.approx(100e3)
    assert simulate(all_posted_at_once(direct), GIGABIT, cost).makespan_us == pytest.approx(123e3)
    # Transfer-bound: measured 110.6 and 152 ms.
    cost = RegionCost(25e3, 3e6)
    assert simulate(all_posted_at_once(direct), GIGABIT, cost).makespan_us == pytest.approx(147e3)


def test_messages_of_one_link_keep_their_order_and_overlap_their_latency() -> None:
    machine = simple_machine(latency_us=100.0, bandwidth_GBps=1.0)
    # Two slices of 50 us each on one link: posted at 0 and 10, they are there at 150 and 200.
    simulation = simulate(build(Kind.ALL_GATHER, "ring", 2, 2), machine, RegionCost(10.0, 50e3), spans=True)
    arrivals = [s.end_us for s in simulation.spans if s.rank == 0 and s.label.startswith("recv")]
    assert arrivals == pytest.approx([150.0, 200.0])


def test_an_adapter_is_shared_by_the_ranks_of_a_node() -> None:
    network = TwoLevel(2, Uniform(0.0, 100.0), Uniform(0.0, 1.0), adapter_GBps=1.0)
    # Of the three steps of a direct schedule the second one takes both ranks of a node across.
    cost = RegionCost(1.0, 10e3)
    shared = simulate(build(Kind.ALL_GATHER, "direct", 4), simple_machine(network=network), cost)
    own = simulate(
        build(Kind.ALL_GATHER, "direct", 4), simple_machine(network=replace(network, adapter_GBps=0.0)), cost
    )
    assert (shared.makespan_us, own.makespan_us) == pytest.approx((10 + 20 + 10 + 1, 30 + 1))


def test_half_duplex_halves_the_rate_of_a_ring() -> None:
    machine = simple_machine(network=Uniform(0.0, 1.0, full_duplex=False))
    assert simulate(build(Kind.ALL_GATHER, "ring", 4), machine, RegionCost(1.0, 10e3)).makespan_us == pytest.approx(
        61.0
    )


def test_compute_is_slower_while_a_transfer_is_in_flight() -> None:
    machine = simple_machine(compute_slowdown=1.5)
    # 10 us of transfer lets 6.67 us of work be done; the other 13.33 us run at full speed.
    assert simulate(build(Kind.ALL_GATHER, "ring", 2), machine, RegionCost(20.0, 10e3)).makespan_us == pytest.approx(
        10 + 20 - 10 / 1.5 + 20
    )


def test_a_transfer_is_slower_while_an_end_computes() -> None:
    machine = simple_machine(transfer_slowdown=2.0)
    # While 20 us of compute run, half of 30 us of bytes flow every two; 20 us are left for the time after.
    assert simulate(build(Kind.ALL_GATHER, "ring", 2), machine, RegionCost(20.0, 30e3)).makespan_us == pytest.approx(
        20 + 20 + 20
    )


def test_posting_adding_and_message_gaps_take_time() -> None:
    machine = simple_machine(post_us=2.0, gap_us=3.0)
    gather = simulate(build(Kind.ALL_GATHER, "ring", 3), machine, RegionCost(1.0, 10e3))
    assert gather.makespan_us == pytest.approx(2 * (2 + 3 + 10) + 1)
    scatter = simulate(build(Kind.REDUCE_SCATTER, "ring", 3), machine, RegionCost(1.0, 10e3, add_us=5.0))
    assert scatter.makespan_us == pytest.approx(1 + 2 * (2 + 3 + 10 + 5))


def test_a_slow_rank_takes_longer_and_holds_up_a_ring() -> None:
    machine = simple_machine(compute_scale=(1.0, 3.0, 1.0, 1.0))
    simulation = simulate(build(Kind.ALL_GATHER, "ring", 4), machine, RegionCost(10.0, 1e3))
    assert simulation.compute_us == pytest.approx((40.0, 120.0, 40.0, 40.0))
    assert simulation.makespan_us == pytest.approx(120.0)
    assert simulation.finish_us[2] > 60


def random_machine(data: st.DataObject) -> Machine:
    number = st.floats(0.0, 20.0)
    return simple_machine(
        network=Uniform(data.draw(number), data.draw(st.floats(0.1, 5.0)), full_duplex=data.draw(st.booleans())),
        post_us=data.draw(st.sampled_from([0.0, 1.0])),
        gap_us=data.draw(st.sampled_from([0.0, 2.0])),
        compute_slowdown=data.draw(st.sampled_from([1.0, 1.4])),
        transfer_slowdown=data.draw(st.sampled_from([1.0, 1.2])),
    )


@settings(deadline=None)
@given(st.data())
def test_one_rank_of_a_uniform_schedule_stands_for_all(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(FAMILIES)))
    family = data.draw(st.sampled_from(sorted(FAMILIES[kind])))
    schedule = build(kind, family, data.draw(st.integers(2, 6)), data.draw(st.integers(1, 3)))
    machine = random_machine(data)
    cost = RegionCost(data.draw(st.floats(0.1, 30.0)), data.draw(st.floats(1.0, 30e3)), data.draw(st.floats(0.0, 3.0)))
    alone, together = simulate(schedule, machine, cost), simulate(schedule, machine, cost, spans=True)
    assert alone.makespan_us == pytest.approx(together.makespan_us, rel=1e-9)


@settings(deadline=None)
@given(st.data())
def test_a_matrix_of_equal_links_is_a_uniform_network(data: st.DataObject) -> None:
    ranks, latency, bandwidth = 4, data.draw(st.floats(0.0, 9.0)), data.draw(st.floats(0.1, 5.0))
    matrix = Matrix(((latency,) * ranks,) * ranks, ((bandwidth,) * ranks,) * ranks)
    schedule = build(data.draw(st.sampled_from(BOTH)), "direct", ranks, 2)
    cost = RegionCost(data.draw(st.floats(0.1, 30.0)), 5e3)
    assert simulate(schedule, simple_machine(network=matrix), cost).makespan_us == pytest.approx(
        simulate(schedule, simple_machine(network=Uniform(latency, bandwidth)), cost).makespan_us
    )


def test_spans_of_a_stream_fill_the_timeline() -> None:
    simulation = simulate(build(Kind.REDUCE_SCATTER, "ring", 4), GIGABIT, RegionCost(25e3, 2e6), spans=True)
    for rank in range(4):
        compute = [s for s in simulation.spans if s.rank == rank and s.stream is Stream.COMPUTE]
        assert sum(s.end_us - s.start_us for s in compute) == pytest.approx(100e3)
        transfers = [s for s in simulation.spans if s.rank == rank and s.stream is Stream.COMM]
        assert len(transfers) == 6
        assert all(s.end_us - s.start_us == pytest.approx(16e3) for s in transfers)


def test_ranks_that_wait_for_ever_are_named() -> None:
    program = (Compute(0), Post(0, None, Recv(1, 1)), Wait(0), Compute(1))
    schedule = Schedule(Kind.ALL_GATHER, "stuck", 2, 1, programs=(program, (Compute(1),)))
    with pytest.raises(ScheduleError, match=r"rank 0, action Wait\(step=0.*waits forever"):
        simulate(schedule, simple_machine(), RegionCost(1.0, 1.0))


def fits_in_a_second(schedule: Schedule, machine: Machine) -> bool:
    """CPU seconds, and three tries: the machine that runs the tests may be busy."""
    for _ in range(3):
        start = time.process_time()
        simulate(schedule, machine, RegionCost(50.0, 1e6))
        if time.process_time() - start < 1.0:
            return True
    return False


def test_64_ranks_of_a_two_level_machine_take_less_than_a_second() -> None:
    assert fits_in_a_second(build(Kind.ALL_GATHER, "ring", 64, 4), PRESETS["h100-nvlink-infiniband"])


def test_1024_uniform_ranks_take_less_than_a_second() -> None:
    assert fits_in_a_second(build(Kind.ALL_GATHER, "ring", 1024, 4), PRESETS["h100-nvlink"])
