from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from fo_compiler import OptionError, Options
from fo_compiler.options import split_options
from fo_compiler.schedule import FAMILY_NAMES


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Options.names():
        monkeypatch.delenv(f"FO_{name.upper()}", raising=False)


def inductor_names() -> set[str]:
    return {"max_autotune", "triton.cudagraphs"}


def test_options_are_frozen_and_name_every_field() -> None:
    options = Options()
    assert Options.names() == tuple(field.name for field in dataclasses.fields(Options))
    assert set(options.to_dict()) == set(Options.names())
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.rewrite = "never"  # type: ignore[misc]


def test_every_option_that_is_documented_may_be_given() -> None:
    options = Options.create({"rewrite": "always", "schedule": "ring", "slices_per_rank": 2, "dump_dir": Path("d")})
    assert (options.rewrite, options.schedule, options.slices_per_rank) == ("always", "ring", 2)
    assert options.dump_dir == Path("d")


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_each_schedule_family_may_be_forced(family: str) -> None:
    assert Options(schedule=family).schedule == family


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rewrite", "sometimes", "'auto', 'always', 'never'"),
        ("rewrite", True, "'auto', 'always', 'never'"),
        ("schedule", "rings", "'ring'"),
        ("slices_per_rank", 0, "whole number of at least 1"),
        ("depth", 0, "whole number of at least 1"),
        ("slices_per_rank", 1.5, "whole number of at least 1"),
        ("slices_per_rank", True, "whole number of at least 1"),
        ("slices_per_rank", "2", "whole number of at least 1"),
        ("dump_dir", 3, "a path"),
        ("dump_dir", "", "a path that is not empty"),
        ("compute_streams", True, "1 or 2"),
        ("machine", 3, "a preset"),
        ("margin", 1, "a number of at least 0 and below 1, or None"),
        ("margin", -0.1, "a number of at least 0 and below 1, or None"),
        ("margin", float("nan"), "a number of at least 0 and below 1, or None"),
        ("margin", "0.1", "a number of at least 0 and below 1, or None"),
        ("max_buffer_mb", -1, "at least 0"),
        ("max_buffer_mb", float("nan"), "at least 0"),
        ("max_buffer_mb", True, "at least 0"),
        ("agreement", "perhaps", "'error', 'plain', 'off'"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(name: str, value: object, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.create({name: value})
    message = str(caught.value)
    assert name in message
    assert expected in message
    assert repr(value) in message


def test_an_unhashable_value_is_refused_like_any_other() -> None:
    with pytest.raises(OptionError, match="rewrite"):
        Options.create({"rewrite": ["always"]})


def test_an_unknown_name_lists_the_known_ones_and_the_closest() -> None:
    with pytest.raises(OptionError) as caught:
        split_options({"slices_per_ranks": 2}, inductor_names)
    message = str(caught.value)
    for name in Options.names():
        assert name in message
    assert "Did you mean 'slices_per_rank'?" in message


def test_inductor_is_named_only_where_it_was_asked() -> None:
    with pytest.raises(OptionError) as caught:
        Options.create({"max_autotune": True})
    assert "neither has Inductor" not in str(caught.value)
    with pytest.raises(OptionError, match="neither has Inductor"):
        split_options({"no_such_option": True}, inductor_names)


def test_options_that_are_no_dict_are_refused() -> None:
    with pytest.raises(OptionError, match=r"expected a dict, got \['rewrite'\]"):
        split_options(["rewrite"], inductor_names)  # type: ignore[arg-type]


def test_a_misspelt_environment_variable_is_refused_and_others_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FO_TEST_EXAMPLES", "10")
    monkeypatch.setenv("FO_SOMETHING_ELSE", "1")
    assert Options.create() == Options()
    monkeypatch.setenv("FO_REWRIT", "always")
    with pytest.raises(OptionError, match=r"FO_REWRIT: not known\. Did you mean FO_REWRITE\?"):
        Options.create()


def test_a_name_that_is_no_string_is_refused() -> None:
    with pytest.raises(OptionError, match="expected names as strings"):
        split_options({1: 2}, inductor_names)  # type: ignore[dict-item]


def test_options_of_ours_and_of_inductor_are_told_apart() -> None:
    ours, inductors = split_options(
        {"rewrite": "never", "max-autotune": True, "triton.cudagraphs": False}, inductor_names
    )
    assert ours == Options(rewrite="never")
    assert inductors == {"max_autotune": True, "triton.cudagraphs": False}


def test_inductor_is_not_asked_for_its_names_if_all_options_are_ours() -> None:
    def slow() -> set[str]:
        raise AssertionError("asked")

    assert split_options({"rewrite": "never"}, slow) == (Options(rewrite="never"), {})
    assert split_options(None, slow) == (Options(), {})


def test_the_environment_gives_defaults_and_an_explicit_option_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FO_REWRITE", "never")
    monkeypatch.setenv("FO_SCHEDULE", "direct")
    monkeypatch.setenv("FO_SLICES_PER_RANK", "3")
    monkeypatch.setenv("FO_MARGIN", "0.5")
    monkeypatch.setenv("FO_DUMP_DIR", "somewhere")
    given = Options(rewrite="never", schedule="direct", slices_per_rank=3, margin=0.5, dump_dir="somewhere")
    assert Options.create() == given
    assert Options.create({"rewrite": "always", "slices_per_rank": None}) == replace(
        given, rewrite="always", slices_per_rank=None
    )


def test_an_empty_environment_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FO_REWRITE", "")
    assert Options.create() == Options()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("FO_REWRITE", "yes"),
        ("FO_SCHEDULE", "RING"),
        ("FO_SLICES_PER_RANK", "two"),
        ("FO_SLICES_PER_RANK", "0"),
        ("FO_MARGIN", "5%"),
        ("FO_MAX_BUFFER_MB", "1GB"),
        ("FO_MARGIN", "1"),
        ("FO_MAX_BUFFER_MB", "-1"),
        ("FO_COMPUTE_STREAMS", "3"),
        ("FO_AGREEMENT", "none"),
    ],
)
def test_a_wrong_environment_variable_is_named_in_the_error(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError) as caught:
        Options.create()
    assert variable in str(caught.value)
    assert repr(text) in str(caught.value)
