from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from fo_compiler import records as records_module
from fo_compiler.records import GraphRecords, Record, format_table, publish, publish_payload, record
from fo_compiler.schedule import FAMILIES

DONE = Record("forward", "all_gather_into_tensor (ag_1)", 4, True, "ring x2", ("mm", "mm_1"), "float32[8, 4]: 8 slices")
LEFT = Record("backward", "all_reduce (all_reduce)", 2, False, None, (), "not a kind that is sliced — yet, 'quoted'")


@pytest.fixture(autouse=True)
def _nothing_published_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(records_module, "_published", set())
    yield
    assert records_module._recorders == []


def test_the_table_has_a_row_a_record_and_counts_them() -> None:
    text = format_table([DONE, LEFT])
    lines = text.splitlines()
    assert lines[0].split() == ["graph", "collective", "ranks", "schedule", "matmuls", "why"]
    assert lines[2].startswith("forward   ag_1")
    assert "ring x2" in lines[2]
    assert "mm, mm_1" in lines[2]
    assert "left alone" in lines[3]
    assert LEFT.reason in lines[3]
    assert lines[-1] == "1 of 2 collectives rewritten"


def test_the_table_wraps_long_reasons_and_keeps_every_word() -> None:
    reason = " ".join(f"word{i}" for i in range(60))
    text = format_table([replace(LEFT, reason=reason)], width=100)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert [word for word in text.split() if word.startswith("word")] == reason.split()


def test_the_table_breaks_no_name_of_a_schedule() -> None:
    for family in {name for families in FAMILIES.values() for name in families}:
        assert family in format_table([replace(DONE, schedule=f"{family} x8")])


def test_the_table_breaks_a_name_that_is_wider_than_its_column() -> None:
    name = "all_gather_into_tensor_" + "x" * 200
    text = format_table([replace(DONE, collective=f"op ({name})")], width=150)
    assert all(len(line) <= 150 for line in text.splitlines())
    assert text.count("x") >= 200


def test_the_table_of_nothing_says_so() -> None:
    assert "no collectives" in format_table([])


def test_a_payload_survives_the_way_through_a_graph() -> None:
    graph = GraphRecords((DONE, LEFT))
    again = GraphRecords.from_payload(graph.to_payload())
    assert again == graph
    assert isinstance(again.records[0].region, tuple)


def test_the_key_tells_different_records_apart_and_only_those() -> None:
    assert GraphRecords((DONE,)).key == GraphRecords((replace(DONE),)).key
    for change in ({"rewritten": False}, {"schedule": "direct"}, {"reason": "other"}, {"group_size": 2}):
        assert GraphRecords((DONE,)).key != GraphRecords((replace(DONE, **change),)).key
    assert GraphRecords((DONE, LEFT)).key != GraphRecords((LEFT, DONE)).key


def test_a_report_as_json_has_the_fields_of_a_record() -> None:
    with record() as report:
        publish(GraphRecords((DONE, LEFT)))
    rows = json.loads(report.to_json())
    assert rows == [{**asdict(DONE), "region": list(DONE.region)}, {**asdict(LEFT), "region": []}]


def test_a_graph_that_is_published_twice_appears_once() -> None:
    graph = GraphRecords((DONE, LEFT))
    with record() as report:
        publish(graph)
        publish(graph)
        publish_payload(graph.to_payload())
    assert report.records == [DONE, LEFT]
    assert report.rewritten == [DONE]


def test_a_graph_from_a_cache_is_recorded_in_each_block_that_runs_it() -> None:
    payload = GraphRecords((DONE,)).to_payload()
    for _ in range(2):
        with record() as report:
            assert report.records == []
            publish_payload(payload)
            publish_payload(payload)
        assert report.records == [DONE]


def test_a_block_inside_a_block_has_its_own_records_and_the_outer_has_all() -> None:
    with record() as outer:
        publish(GraphRecords((DONE,)))
        with record() as inner:
            publish(GraphRecords((LEFT,)))
        assert inner.records == [LEFT]
        assert outer.records == [DONE, LEFT]


def test_an_inner_block_that_ends_does_not_end_the_outer_one_with_equal_records() -> None:
    with record() as outer:
        with record() as inner:
            publish(GraphRecords((DONE,)))
        publish(GraphRecords((LEFT,)))
    assert inner.records == [DONE]
    assert outer.records == [DONE, LEFT]


def test_a_block_that_raises_stops_recording() -> None:
    with pytest.raises(ZeroDivisionError), record() as report:
        1 / 0  # noqa: B018
    publish(GraphRecords((DONE,)))
    assert report.records == []


def test_records_are_logged_once_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fo_compiler"):
        publish(GraphRecords((DONE, LEFT)))
        publish_payload(GraphRecords((DONE, LEFT)).to_payload())
    messages = [entry.getMessage() for entry in caplog.records]
    assert messages == ["1 of 2 collectives of a graph rewritten", str(DONE), str(LEFT)]
    assert LEFT.reason in messages[2]
