"""Which way transfers travel on CUDA, and the reason that the record gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fo_compiler.codegen.absent_gpu import CUDA, move_graph
from fo_compiler.options import Options
from fo_compiler.passes import transports
from fo_compiler.passes.overlap_pass import overlap
from fo_compiler.passes.transports import with_copy_engine
from fo_compiler.records import Record
from fo_compiler.runtime import ops
from fo_compiler.runtime.local import LocalWorld
from fo_compiler.schedule.presets import PRESETS
from tests.graphs import all_gather, capture

RANKS = 4


def rewritten(cuda: bool = True, **options: Any) -> tuple[Record, set[str]]:
    """The record of a gather with a matmul, and the transports of its transfers."""
    x, w = torch.empty(1, 2048, 4096, dtype=torch.bfloat16), torch.empty(4096, 8192, dtype=torch.bfloat16)
    gm = capture(lambda x, w: all_gather(x, 1, RANKS) @ w, [x, w])
    if cuda:
        move_graph(gm, CUDA)
    made = Options(**{"rewrite": "always", "machine": "h100-nvlink", "transport": "auto", **options})
    (record,) = overlap(gm.graph, made, LocalWorld(RANKS).transport(1), pin=False).records
    exchanges = gm.graph.find_nodes(op="call_function", target=ops.exchange)
    return record, {node.kwargs.get("transport", "c10d") for node in exchanges}


@pytest.fixture
def nvlink(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four GPUs of one host, each of which maps the others' memory."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(transports, "without_peer_memory", lambda device: "")
    monkeypatch.setattr(transports, "group_members", lambda: {"0": [0, 1, 2, 3]})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(transports, "has_atomics_between", lambda one, other: True)
    return monkeypatch


def test_the_copy_engine_is_taken_where_all_have_it_and_it_is_predicted_to_be_faster(
    nvlink: pytest.MonkeyPatch,
) -> None:
    record, used = rewritten()
    assert used == {"copy_engine"}
    assert "transfers by copy_engine: " in record.reason
    assert record.schedule is not None
    assert record.schedule.endswith(", copy engine")  # ranks that chose differently are told, not stuck


def test_c10d_is_taken_where_it_is_predicted_to_be_faster(nvlink: pytest.MonkeyPatch) -> None:
    nvlink.setattr(transports, "with_copy_engine", lambda machine, size: with_copy_engine(machine, 1e9 * size))
    record, used = rewritten()
    assert used == {"c10d"}
    assert "transfers by c10d: " in record.reason
    assert record.schedule is not None
    assert "copy engine" not in record.schedule


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (lambda m: m.delenv("LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is not set"),
        (lambda m: m.setenv("LOCAL_WORLD_SIZE", "2"), "ranks [0, 1, 2, 3] are on several hosts"),
        (lambda m: m.setattr(torch.cuda, "device_count", lambda: 1), "this process sees 1 GPUs"),
        (
            lambda m: m.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (2, 0)),
            "GPU 2 cannot map the memory of GPU 0",
        ),
        (
            lambda m: m.setattr(transports, "has_atomics_between", lambda one, other: (one, other) != (3, 1)),
            "GPU 3 has no atomic operations on the memory of GPU 1 (no NVLink between them)",
        ),
        (lambda m: m.setattr(transports, "without_peer_memory", lambda device: "no backend"), "no backend"),
        (lambda m: m.setattr(transports, "predicted_us", lambda *_: None), "no prediction"),
    ],
)
def test_what_is_missing_is_the_reason_in_the_record(nvlink: pytest.MonkeyPatch, patch: Any, said: str) -> None:
    patch(nvlink)
    record, used = rewritten()
    assert used == {"c10d"}
    assert f"transfers by c10d: {said}" in record.reason or said in record.reason


@pytest.mark.parametrize("name", ["c10d", "copy_engine"])
def test_the_option_decides(name: str) -> None:
    record, used = rewritten(transport=name)
    assert used == {name}
    assert f"option transport='{name}'" in record.reason


def test_by_default_transfers_go_through_c10d(nvlink: pytest.MonkeyPatch) -> None:
    _, used = rewritten(transport=Options().transport)
    assert used == {"c10d"}


def test_on_the_cpu_there_is_nothing_to_choose() -> None:
    record, used = rewritten(cuda=False, transport="copy_engine")
    assert used == {"c10d"}
    assert "transfers" not in record.reason


def test_the_copy_engine_leaves_compute_alone_and_copies_once_more() -> None:
    machine = PRESETS["h100-nvlink"]
    engine = with_copy_engine(machine, 3.35e6)  # H100: 3350 GB/s, so each pass takes a microsecond
    assert engine.compute_slowdown == 1.0
    assert engine.gap_us == pytest.approx(machine.gap_us + 2.0)


class Driver:
    """Of two GPUs, with or without NVLink between them; `broken` is a call that fails."""

    def __init__(self, atomics: int, broken: str) -> None:
        self.atomics, self.broken = atomics, broken

    def cuInit(self, flags: int) -> int:
        return int(self.broken == "cuInit")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 10 + ordinal
        return int(self.broken == "cuDeviceGet")

    def cuDeviceGetP2PAttribute(self, value: Any, attribute: int, one: Any, other: Any) -> int:
        assert (attribute, one.value, other.value) == (3, 10, 11)
        value._obj.value = self.atomics
        return int(self.broken == "cuDeviceGetP2PAttribute")


@pytest.mark.parametrize(
    ("atomics", "broken", "found"),
    [
        (1, "", True),
        (0, "", False),
        (1, "cuInit", False),
        (1, "cuDeviceGet", False),
        (1, "cuDeviceGetP2PAttribute", False),
    ],
)
def test_the_driver_is_asked_for_atomics_between_two_gpus(
    atomics: int, broken: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports.ctypes, "CDLL", lambda name: Driver(atomics, broken))
    assert transports.has_atomics_between(0, 1) is found


def test_without_a_driver_there_are_no_atomics(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(transports.ctypes, "CDLL", missing)
    assert not transports.has_atomics_between(0, 1)
