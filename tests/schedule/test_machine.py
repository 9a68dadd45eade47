"""Machines: JSON round trip, strict reading, and times that follow from the numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fo_compiler.calibration import MATMUL_SHAPES
from fo_compiler.errors import MachineError
from fo_compiler.schedule import Kind
from fo_compiler.schedule.machine import CollectiveTime, Machine, simple_machine
from fo_compiler.schedule.matmul import MatmulPoint, Measured, Roofline, dtype_name
from fo_compiler.schedule.network import Matrix, TwoLevel, Uniform
from fo_compiler.schedule.presets import PRESETS, default_machine, find_machine

SKEWED = simple_machine(
    "skewed",
    network=Matrix(((0.0, 5.0), (7.0, 0.0)), ((0.0, 10.0), (2.0, 0.0))),
    matmul=Measured((MatmulPoint(64, 64, 64, "bf16", 10.0), MatmulPoint(128, 128, 128, "bf16", 40.0)), 100.0),
    compute_scale=(1.0, 1.5),
    collectives=(CollectiveTime("all_to_all", 2, 100.0, 5.0, margin=0.2),),
)


@pytest.mark.parametrize("machine", [*PRESETS.values(), SKEWED], ids=lambda machine: machine.name)
def test_a_machine_survives_json(machine: Machine, tmp_path: Path) -> None:
    machine.save(tmp_path / "machine.json")
    loaded = find_machine(str(tmp_path / "machine.json"))
    assert loaded == machine
    assert loaded.digest() == machine.digest()


def test_different_machines_have_different_digests() -> None:
    assert len({machine.digest() for machine in PRESETS.values()}) == len(PRESETS)


def changed(path: str, value: object) -> str:
    """The JSON of a two-level preset with one entry replaced (or, by the value `...`, removed)."""
    data = json.loads(PRESETS["h100-nvlink-infiniband"].to_json())
    *parents, last = path.split(".")
    at: Any = data
    for name in parents:
        at = at[name]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("network.inside.latency_us", "6", r"network\.inside\.latency_us: expected a number, got '6'"),
        ("network.inside.latency_us", -1, r"latency_us: expected a finite number of at least 0, got -1"),
        ("network.inside.bandwidth_GBps", 0, r"bandwidth_GBps: expected a finite number above 0, got 0"),
        ("network.inside.bandwidth_GBps", math.inf, r"bandwidth_GBps: expected a finite number"),
        ("network.inside.full_duplex", 1, r"full_duplex: expected true or false, got 1"),
        ("network.ranks_per_node", 2.5, r"ranks_per_node: expected a whole number, got 2\.5"),
        ("network.type", "torus", r"network\.type: expected one of uniform, two_level, matrix, got 'torus'"),
        ("network.inside", 3, r"network\.inside: expected an object with the fields of Uniform, got 3"),
        ("network.lateny_us", 3, r"'m\.network\.lateny_us' is not known"),
        ("launch_uss", 3, r"'m\.launch_uss' is not known\. Did you mean 'm\.launch_us'\?"),
        ("matmul.peak_TFLOPS.bf17", 3.0, r"dtype: expected one of fp64"),
        ("matmul.peak_TFLOPS.bf16", 0.0, r"peak_TFLOPS\.bf16: expected a finite number above 0"),
        ("matmul.memory_GBps", ..., r"matmul\.memory_GBps: expected a value, got 'nothing'"),
        ("compute_slowdown", 0.5, r"compute_slowdown: expected a factor of at least 1, got 0\.5"),
        ("compute_scale", 2.0, r"compute_scale: expected a list, got 2\.0"),
        ("name", True, r"name: expected a string, got True"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field(path: str, value: object, message: str) -> None:
    with pytest.raises(MachineError, match=message):
        Machine.from_json(changed(path, value), "m")


def test_a_file_that_is_no_json_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="expected JSON"):
        Machine.from_json("{", "m")
    with pytest.raises(MachineError, match="expected a readable machine file, got 'No such file"):
        find_machine(str(tmp_path / "absent.json"))
    with pytest.raises(MachineError, match="Did you mean 'h100-nvlink'"):
        find_machine("h100-nvlnk")


@pytest.mark.parametrize(
    ("latency", "bandwidth", "ports"),
    [(((0.0,),), ((0.0, 1.0), (1.0, 0.0)), ()), (((0.0, 1.0), (1.0, 0.0)),) * 2 + ((1.0,),)],
)
def test_a_ragged_matrix_is_refused(latency: Any, bandwidth: Any, ports: Any) -> None:
    with pytest.raises(MachineError, match="network"):
        Matrix(latency, bandwidth, ports)
    with pytest.raises(MachineError, match="above 0"):
        Matrix(((0.0, 1.0), (1.0, 0.0)), ((0.0, 0.0), (1.0, 0.0)))


def test_a_machine_of_another_size_is_refused() -> None:
    with pytest.raises(MachineError, match="links of a group of 4 ranks"):
        SKEWED.fabric(4)
    with pytest.raises(MachineError, match="divisor of the group's 12 ranks"):
        PRESETS["h100-nvlink-infiniband"].fabric(12)
    with pytest.raises(MachineError, match="a factor for rank 2"):
        SKEWED.scale(2)


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    fabric = simple_machine(latency_us=5.0, bandwidth_GBps=2.0).fabric(4)
    assert fabric.transfer_us(0, 3, 4000) == 5.0 + 2.0
    assert SKEWED.fabric(2).transfer_us(1, 0, 4000) == 7.0 + 2.0


def test_nodes_share_their_adapter_and_nothing_inside() -> None:
    network = TwoLevel(2, Uniform(1.0, 100.0), Uniform(10.0, 8.0), adapter_GBps=10.0)
    fabric = network.fabric(4)
    assert set(fabric.ports[fabric.link(0, 2)]) == set(fabric.ports[fabric.link(1, 3)])
    assert not set(fabric.ports[fabric.link(0, 2)]) & set(fabric.ports[fabric.link(2, 0)])
    assert not set(fabric.ports[fabric.link(0, 1)]) & set(fabric.ports[fabric.link(0, 2)])
    assert fabric.islands == ((0, 1), (2, 3))
    assert network.fabric(2) == Uniform(1.0, 100.0).fabric(2)


def test_half_duplex_joins_the_two_ports_of_a_rank() -> None:
    fabric = Uniform(1.0, 1.0, full_duplex=False).fabric(3)
    assert set(fabric.ports[fabric.link(0, 1)]) & set(fabric.ports[fabric.link(2, 0)])


def test_a_thin_matmul_is_less_efficient_than_a_thick_one() -> None:
    h100 = PRESETS["h100-nvlink"]
    whole = h100.matmul_us(8192, 8192, 8192)
    assert 8192**3 * 2 / whole / 1e6 == pytest.approx(0.8 * 989.4, rel=0.1)
    assert 8 * h100.matmul_us(1024, 8192, 8192) > whole
    assert h100.matmul_us(1, 8192, 8192) > 8192 * 8192 * 2 / 3350e3  # bounded by reading the weight


def test_measured_points_are_met_and_joined() -> None:
    measured = SKEWED.matmul
    assert measured.time_us(64, 64, 64, "bf16") == pytest.approx(10.0)
    assert measured.time_us(128, 128, 128, "bf16") == pytest.approx(40.0)
    assert 10.0 < measured.time_us(64, 128, 128, "bf16") < 40.0
    with pytest.raises(MachineError, match="a point for fp32"):
        measured.time_us(1, 1, 1, "fp32")


sizes = st.integers(1, 4096)
costs = st.tuples(*(st.sampled_from([0.0, unit, 30 * unit]) for unit in (1e-5, 1e-4, 1e-4, 1e-4, 1.0))).filter(any)


@settings(deadline=None)
@given(costs, sizes, sizes, sizes)
def test_a_law_of_shapes_is_found_in_the_measured_points(costs: tuple[float, ...], m: int, k: int, n: int) -> None:
    """Times that FLOP, factors, result and a start explain, as those of thin matmuls: also for shapes without a point."""

    def time_us(m: int, k: int, n: int) -> float:
        return sum(c * term for c, term in zip(costs, (2 * m * k * n, m * k, k * n, m * n, 1), strict=True))

    measured = Measured(tuple(MatmulPoint(*shape, "fp32", time_us(*shape)) for shape in MATMUL_SHAPES), 10.0)
    for shape in MATMUL_SHAPES:
        assert measured.time_us(*shape, "fp32") == pytest.approx(time_us(*shape))
    assert measured.time_us(m, k, n, "fp32") == pytest.approx(time_us(m, k, n), rel=0.5)


@settings(deadline=None)
@given(st.lists(st.tuples(sizes, sizes, sizes, st.floats(1.0, 1e6)), min_size=1, max_size=8), sizes, sizes, sizes)
def test_measured_times_are_met_and_nothing_takes_no_time(
    points: list[tuple[int, int, int, float]], m: int, k: int, n: int
) -> None:
    measured = Measured(tuple(MatmulPoint(m, k, n, "fp32", us) for m, k, n, us in points), 10.0)
    assert 0 < measured.time_us(m, k, n, "fp32") < math.inf
    for m, k, n, us in points:
        if [point[:3] for point in points].count((m, k, n)) == 1:
            assert measured.time_us(m, k, n, "fp32") == pytest.approx(us)


@pytest.mark.parametrize("sizes_and_time", [(0, 1, 1, 1.0), (1, 1, -1, 1.0), (1, 1, 1, 0.0), (1, 1, 1, math.nan)])
def test_a_point_of_no_size_or_no_time_is_refused(sizes_and_time: tuple[int, int, int, float]) -> None:
    m, k, n, us = sizes_and_time
    with pytest.raises(MachineError, match="times above 0"):
        Measured((MatmulPoint(m, k, n, "fp32", us),), 10.0)


@settings(deadline=None)
@given(sizes)
def test_more_rows_never_take_less_time_by_the_roofline(rows: int) -> None:
    model = Roofline({"fp32": 1.0}, 10.0, 4)
    assert model.time_us(rows + 1, 64, 64, "fp32") >= model.time_us(rows, 64, 64, "fp32") * (1 - 1e-9)


def test_dtypes_have_one_name() -> None:
    assert dtype_name("torch.bfloat16") == dtype_name("bfloat16") == "bf16"


def test_the_default_depends_on_the_device() -> None:
    assert default_machine("cpu").name == "loopback"
    assert default_machine("cuda").name == default_machine("xpu").name == "h100-nvlink"


def test_a_measured_collective_is_for_its_kind_and_its_number_of_ranks() -> None:
    for kind in (Kind.ALL_TO_ALL, Kind.ALL_TO_ALL_OUT):  # one collective, seen from its two sides
        assert SKEWED.collective_us(kind, 2, 1e6) == pytest.approx(100 + 200)
    for kind in (Kind.ALL_GATHER, Kind.ALL_GATHER_OUT):
        assert SKEWED.collective_us(kind, 2, 1e6) is None
    assert SKEWED.collective_us(Kind.ALL_TO_ALL, 4, 1e6) is None


def test_a_measured_collective_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(MachineError, match="all_gather, reduce_scatter, all_reduce, all_to_all"):
        CollectiveTime("broadcast", 2, 0.0, 1.0)
