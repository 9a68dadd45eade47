from __future__ import annotations

import inspect

import pytest

from fo_compiler import errors
from fo_compiler.errors import FlashOverlapError, MachineError, OptionError

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


@pytest.mark.parametrize("class_", CLASSES, ids=lambda c: c.__name__)
def test_every_error_of_ours_has_one_base_and_says_what_it_stands_for(class_: type) -> None:
    assert issubclass(class_, FlashOverlapError)
    assert class_.__doc__


def test_errors_that_a_user_makes_are_also_value_errors() -> None:
    assert issubclass(OptionError, ValueError)
    assert issubclass(MachineError, ValueError)


def test_an_unknown_name_without_a_close_one_gives_no_hint() -> None:
    assert "Did you mean" not in str(OptionError.unknown("xyz", ["rewrite"]))
    assert "Did you mean" not in str(MachineError.unknown("xyz", ["h100"]))


def test_an_unknown_machine_lists_the_known_ones() -> None:
    message = str(MachineError.unknown("h10", ["h100", "b200"]))
    assert "Did you mean 'h100'?" in message
    assert "b200" in message


def test_a_wrong_machine_says_where_and_what_to_do() -> None:
    message = str(MachineError.wrong("links.latency_us", "a positive number", -1))
    assert "links.latency_us" in message
    assert "-1" in message
    assert "calibrate" in message
