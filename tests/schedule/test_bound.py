"""The lower bound against an exact solver, and against every schedule that we can build.

The solver (CP-SAT of ortools, a test extra) gets the same machine in whole numbers: each rank computes every slice once it
has it, slices come from any rank that has them, a port carries one transfer at a time. Its optimum is what a bound must not
exceed, and what a schedule with a certificate of optimality must not exceed either.

FO_TEST_INSTANCES=3000 runs thousands of random instances instead of the few of an ordinary test run.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.schedule import FAMILIES, Kind, build
from fo_compiler.schedule.bound import Bound, Certificate, lower_bound
from fo_compiler.schedule.machine import Machine, simple_machine
from fo_compiler.schedule.network import Matrix, TwoLevel, Uniform
from fo_compiler.schedule.search import search
from fo_compiler.schedule.simulate import RegionCost, simulate

INSTANCES = int(os.environ.get("FO_TEST_INSTANCES", "60"))
LEAVING = {Kind.ALL_GATHER: Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL: Kind.ALL_TO_ALL_OUT}


@dataclass(frozen=True)
class Instance:
    """A small group: whole microseconds of compute by rank, of latency and of one slice's bytes by link."""

    ranks: int
    m: int
    compute_us: tuple[int, ...]
    latency_us: tuple[tuple[int, ...], ...]
    transfer_us: tuple[tuple[int, ...], ...]

    def machine(self, *, mirrored: bool = False) -> Machine:
        """One slice has 1000 bytes, so a link of 1 / t GB/s takes t microseconds for it."""

        def rows(table: tuple[tuple[int, ...], ...]) -> list[list[int]]:
            return [list(column) for column in zip(*table, strict=True)] if mirrored else [list(row) for row in table]

        bandwidth = tuple(tuple(1 / t for t in row) for row in rows(self.transfer_us))
        latency = tuple(tuple(float(t) for t in row) for row in rows(self.latency_us))
        scales = tuple(float(t) for t in self.compute_us)
        return simple_machine(network=Matrix(latency, bandwidth), compute_scale=scales)

    @property
    def cost(self) -> RegionCost:
        return RegionCost(1.0, 1000.0)


def random_instance(rng: random.Random, *, uniform: bool) -> Instance:
    ranks = rng.choice((2, 3, 3, 4))
    m = rng.choice((1, 2)) if ranks < 4 else 1

    def table(low: int, high: int) -> tuple[tuple[int, ...], ...]:
        one = rng.randint(low, high)
        return tuple(tuple(one if uniform else rng.randint(low, high) for _ in range(ranks)) for _ in range(ranks))

    compute = rng.randint(1, 9)
    return Instance(
        ranks,
        m,
        tuple(compute if uniform else rng.randint(1, 9) for _ in range(ranks)),
        table(0, rng.choice((0, 3))),
        table(1, 9),
    )


def optimum_us(instance: Instance, kind: Kind = Kind.ALL_GATHER) -> int | None:
    """The shortest makespan of a gather, an exchange (straight from the source) or a gather of results.

    None where time runs out.
    """
    exchange, results = kind is Kind.ALL_TO_ALL, kind is Kind.ALL_GATHER_OUT
    cp_model = pytest.importorskip("ortools.sat.python.cp_model", reason="needs ortools (a test extra)")
    model = cp_model.CpModel()
    ranks, m = instance.ranks, instance.m
    horizon = sum(instance.compute_us) * ranks * m + ranks**2 * m * 12
    slices = range(ranks * m)
    ports_out: dict[int, list[object]] = {rank: [] for rank in range(ranks)}
    ports_in: dict[int, list[object]] = {rank: [] for rank in range(ranks)}
    held = {(rank, s): model.NewIntVar(0, horizon, "") for rank in range(ranks) for s in slices}
    ends = []
    for rank in range(ranks):
        work = []
        for s in slices:
            if s // m == rank or not results:
                begin = model.NewIntVar(0, horizon, "")
                end = begin + instance.compute_us[rank]
                work.append(model.NewFixedSizeIntervalVar(begin, instance.compute_us[rank], ""))
            ends.append(held[rank, s] if results else end)
            if not results:
                model.Add(begin >= held[rank, s])
            if s // m == rank:
                model.Add(held[rank, s] == (end if results else 0))
                continue
            chosen = []
            for source in (s // m,) if exchange else range(ranks):
                if source == rank:
                    continue
                used, start = model.NewBoolVar(""), model.NewIntVar(0, horizon, "")
                size, latency = instance.transfer_us[source][rank], instance.latency_us[source][rank]
                interval = model.NewOptionalFixedSizeIntervalVar(start, size, used, "")
                ports_out[source].append(interval)
                ports_in[rank].append(interval)
                # The ports carry bytes after the latency, and latencies overlap.
                since = 0 if exchange else held[source, s]
                model.Add(start >= since + latency).OnlyEnforceIf(used)
                model.Add(held[rank, s] >= start + size).OnlyEnforceIf(used)
                chosen.append(used)
            model.AddExactlyOne(chosen)
        model.AddNoOverlap(work)
    for intervals in (*ports_out.values(), *ports_in.values()):
        model.AddNoOverlap(intervals)
    makespan = model.NewIntVar(0, horizon, "")
    model.AddMaxEquality(makespan, ends)
    model.Minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = 2.0
    return int(solver.ObjectiveValue()) if solver.Solve(model) == cp_model.OPTIMAL else None


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "not uniform"])
@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_GATHER_OUT])
def test_an_exact_solver_finds_no_counterexample(uniform: bool, kind: Kind) -> None:
    rng = random.Random(f"{uniform} {kind is Kind.ALL_TO_ALL}")
    solved = met = 0
    for _ in range(INSTANCES):
        instance = random_instance(rng, uniform=uniform)
        best = optimum_us(instance, kind)
        if best is None:
            continue
        solved += 1
        machine, cost = instance.machine(), instance.cost
        bound = lower_bound(kind, machine, instance.ranks, instance.m, cost)
        assert bound.us <= best + 1e-6, (instance, bound, best)
        # Run backwards in time, the same optimum holds for results that leave through the mirrored links.
        if kind in LEAVING:
            leaving = lower_bound(LEAVING[kind], instance.machine(mirrored=True), instance.ranks, instance.m, cost)
            assert leaving.us <= best + 1e-6, (instance, leaving, best)
        for family in FAMILIES[kind]:
            us = simulate(build(kind, family, instance.ranks, instance.m), machine, cost).makespan_us
            if Certificate(us, bound).is_optimal:
                met += 1
                assert us <= best + 1e-6, (instance, family, us, best)
    assert solved >= 0.9 * INSTANCES
    assert met > 0 or not uniform


@pytest.mark.slow
def test_what_is_found_by_search_is_near_the_optimum() -> None:
    rng = random.Random(7)
    ratios = []
    for _ in range(max(10, INSTANCES // 6)):
        instance = random_instance(rng, uniform=False)
        best = optimum_us(instance)
        if best is None:
            continue
        schedule = search(Kind.ALL_GATHER, instance.machine(), instance.ranks, instance.m, instance.cost)
        ratios.append(simulate(schedule, instance.machine(), instance.cost).makespan_us / best)
    assert sum(ratio <= 1 + 1e-9 for ratio in ratios) >= 0.7 * len(ratios)
    assert sum(ratios) / len(ratios) < 1.02


@given(st.sampled_from([Kind.ALL_GATHER, Kind.REDUCE_SCATTER]), st.integers(2, 9), st.integers(1, 4), st.data())
@settings(deadline=None)
def test_a_uniform_schedule_is_optimal_when_a_transfer_fits_under_a_slice(
    kind: Kind, ranks: int, m: int, data: st.DataObject
) -> None:
    t_c = data.draw(st.floats(1.0, 50.0))
    t_p = data.draw(st.floats(0.0, 1.0)) * t_c
    cost = RegionCost(t_c, t_p * 1e3)
    for family in ("ring", "direct"):
        us = simulate(build(kind, family, ranks, m), simple_machine(), cost).makespan_us
        assert Certificate(us, lower_bound(kind, simple_machine(), ranks, m, cost)).is_optimal


@given(st.integers(2, 9), st.integers(1, 6), st.data())
@settings(deadline=None)
def test_a_direct_gather_of_results_is_optimal_and_its_bound_has_the_tail(
    ranks: int, m: int, data: st.DataObject
) -> None:
    kind, t_c, t_p = Kind.ALL_GATHER_OUT, data.draw(st.floats(1.0, 50.0)), data.draw(st.floats(0.1, 50.0))
    machine, cost = simple_machine(latency_us=data.draw(st.sampled_from([0.0, 3.0]))), RegionCost(t_c, t_p * 1e3)
    bound = lower_bound(kind, machine, ranks, m, cost)
    assert bound.us >= m * t_c + (ranks - 1) * t_p * (1 - 1e-9)
    assert Certificate(simulate(build(kind, "direct", ranks, m), machine, cost).makespan_us, bound).is_optimal


def random_machine(data: st.DataObject, ranks: int) -> Machine:
    number = st.floats(0.2, 5.0)
    latency = st.sampled_from([0.0, 1.0, 7.0])
    uniform = st.builds(Uniform, latency, number, port_GBps=st.sampled_from([0.0, 1.0]), full_duplex=st.booleans())
    shape = data.draw(st.sampled_from(["uniform", "two-level", "matrix"]))
    if shape == "uniform":
        network: Uniform | TwoLevel | Matrix = data.draw(uniform)
    elif shape == "two-level":
        k = data.draw(st.sampled_from([k for k in (1, 2, 3) if ranks % k == 0]))
        network = TwoLevel(k, data.draw(uniform), data.draw(uniform), data.draw(st.sampled_from([0.0, 0.5])))
    else:
        row = st.lists(number, min_size=ranks, max_size=ranks).map(tuple)
        square = st.lists(row, min_size=ranks, max_size=ranks).map(tuple)
        network = Matrix(data.draw(square), data.draw(square), full_duplex=data.draw(st.booleans()))
    scales = tuple(data.draw(st.lists(st.floats(0.5, 3.0), min_size=ranks, max_size=ranks)))
    return simple_machine(
        network=network,
        post_us=data.draw(st.sampled_from([0.0, 1.0])),
        gap_us=data.draw(st.sampled_from([0.0, 0.5])),
        compute_slowdown=data.draw(st.sampled_from([1.0, 1.5])),
        transfer_slowdown=data.draw(st.sampled_from([1.0, 1.2, 3.0])),
        compute_scale=data.draw(st.sampled_from([(), scales])),
    )


@pytest.mark.slow
@settings(max_examples=max(60, INSTANCES), deadline=None)
@given(st.data())
def test_no_schedule_on_any_machine_beats_the_bound(data: st.DataObject) -> None:
    ranks, m = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    machine = random_machine(data, ranks)
    cost = RegionCost(
        data.draw(st.floats(0.1, 20.0)), data.draw(st.floats(1.0, 2e4)), data.draw(st.sampled_from([0.0, 0.4]))
    )
    for kind, families in FAMILIES.items():
        bound = lower_bound(kind, machine, ranks, m, cost)
        for family in families:
            us = simulate(build(kind, family, ranks, m), machine, cost).makespan_us
            assert us >= bound.us * (1 - 1e-9), (kind, family, us, bound)
        for k in (k for k in (1, 2, 3) if ranks % k == 0 and kind is not Kind.CHAIN):  # a chain has no such schedule
            us = simulate(build(kind, "two_level", ranks, m, k), machine, cost).makespan_us
            assert us >= bound.us * (1 - 1e-9), (kind, "two_level", k, us, bound)


def test_two_links_of_a_half_duplex_port_may_be_busy_at_once() -> None:
    # A port of 1 GB/s takes a message of 0.5 GB/s in and one out at a time: neither waits for the other.
    network = Uniform(0.0, 0.5, port_GBps=1.0, full_duplex=False)
    machine, cost = simple_machine(network=network, compute_slowdown=1.5), RegionCost(1.0, 1.0)
    us = simulate(build(Kind.ALL_GATHER, "ring", 2), machine, cost).makespan_us
    assert Certificate(us, lower_bound(Kind.ALL_GATHER, machine, 2, 1, cost)).is_optimal


def test_a_narrow_border_is_seen() -> None:
    network = TwoLevel(4, Uniform(0.0, 100.0), Uniform(0.0, 1.0), adapter_GBps=1.0)
    bound = lower_bound(Kind.ALL_GATHER, simple_machine(network=network), 8, 1, RegionCost(1.0, 10e3))
    assert bound.us == pytest.approx(4 * 10 + 1)
    assert "group 0, 1, 2, 3" in bound.why


def test_a_certificate_tells_the_gap() -> None:
    certificate = Certificate(110.0, Bound(100.0, "work"))
    assert certificate.gap_us == pytest.approx(10.0)
    assert not certificate.is_optimal
    assert "9.1% above the lower bound" in str(certificate)
    assert "optimal: it meets" in str(Certificate(100.0, Bound(100.0, "work")))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_where_all_ranks_are_alike_one_of_them_speaks_for_all(data: st.DataObject) -> None:
    """The short way through equal nodes gives what the bound finds when it looks at every rank and every group."""

    def level() -> Uniform:
        latency, GBps = data.draw(st.sampled_from([0.0, 1.0, 20.0])), data.draw(st.sampled_from([1.0, 5.0, 50.0]))
        return Uniform(latency, GBps, data.draw(st.sampled_from([0.0, GBps, 3 * GBps])), data.draw(st.booleans()))

    per_node, nodes = data.draw(st.sampled_from([2, 3, 4])), data.draw(st.sampled_from([1, 2, 3]))
    inside, across = level(), level()
    if across.bandwidth_GBps > inside.bandwidth_GBps:
        inside, across = across, inside  # else nodes are no groups with a narrow border
    network = TwoLevel(per_node, inside, across, data.draw(st.sampled_from([0.0, 2.0, 30.0])))
    ranks, kind, m = per_node * nodes, data.draw(st.sampled_from(list(Kind))), data.draw(st.sampled_from([1, 2, 5]))
    cost = RegionCost(data.draw(st.sampled_from([0.1, 10.0, 1000.0])), data.draw(st.sampled_from([10.0, 1e4, 1e6])))
    alike = simple_machine(network=network, gap_us=0.5)
    unlike = simple_machine(network=network, gap_us=0.5, compute_scale=(*[1.0] * (ranks - 1), 1.0 + 1e-12))
    assert alike.has_equal_ranks
    assert not unlike.has_equal_ranks
    short, full = (lower_bound(kind, machine, ranks, m, cost) for machine in (alike, unlike))
    assert short.us == pytest.approx(full.us, rel=1e-9), (short, full)
