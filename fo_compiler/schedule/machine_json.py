"""Machines as JSON: written plainly, read strictly. An error names the field, what was expected and what came."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union

from ..errors import MachineError
from .matmul import Measured, Roofline, dtype_name
from .network import Matrix, TwoLevel, Uniform

_VARIANTS: dict[str, type] = {
    "uniform": Uniform,
    "two_level": TwoLevel,
    "matrix": Matrix,
    "roofline": Roofline,
    "measured": Measured,
}
_WORDS = {float: "a number", int: "a whole number", str: "a string", bool: "true or false"}
_NAME_OF = {cls: name for name, cls in _VARIANTS.items()}


def encode(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        tag = {"type": _NAME_OF[type(value)]} if type(value) in _NAME_OF else {}
        return tag | {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def decode(expected: Any, data: Any, where: str) -> Any:
    """`data` as an `expected`, strictly: every field known, every type right, no number below 0 and none infinite."""
    origin = typing.get_origin(expected)
    if origin in (Union, types.UnionType):
        choices = {_NAME_OF[cls]: cls for cls in typing.get_args(expected)}
        tag = data.get("type") if isinstance(data, dict) else None
        if not isinstance(tag, str) or tag not in choices:
            raise MachineError.wrong(f"{where}.type", f"one of {', '.join(choices)}", tag)
        return decode(choices[tag], data, where)
    if is_dataclass(expected):
        return _decode_record(expected, data, where)
    if origin is tuple:
        item = typing.get_args(expected)[0]
        if not isinstance(data, list):
            raise MachineError.wrong(where, "a list", data)
        return tuple(decode(item, value, f"{where}[{i}]") for i, value in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise MachineError.wrong(where, "an object", data)
        return {dtype_name(key): decode(float, value, f"{where}.{key}") for key, value in data.items()}
    accepted = (int, float) if expected is float else (expected,)
    if not isinstance(data, accepted) or (isinstance(data, bool) and expected is not bool):
        raise MachineError.wrong(where, _WORDS[expected], data)
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        _check_number(data, where)
        return expected(data)
    return data


# Quantities that are divided by, so that 0 is a mistake. `port_GBps` and `adapter_GBps` are not: there 0 has a meaning.
# (The rows of a matrix are checked by `Matrix`, which does not read the diagonal.)
_POSITIVE = frozenset(
    ["bandwidth_GBps", "memory_GBps", "time_us", "units", "tile", "efficiency", "ranks_per_node", "m", "k", "n"]
)


def _check_number(value: float, where: str) -> None:
    *_, record, name = where.split(".")
    positive = name in _POSITIVE or record == "peak_TFLOPS"
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise MachineError.wrong(where, "a finite number " + ("above 0" if positive else "of at least 0"), value)


def _decode_record(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise MachineError.wrong(where, f"an object with the fields of {cls.__name__}", data)
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in fields(cls)}
    given = {key: value for key, value in data.items() if not (key == "type" and cls in _NAME_OF)}
    for key in given:
        if key not in known:
            raise MachineError.unknown(f"{where}.{key}", (f"{where}.{name}" for name in known))
    for name, field in known.items():
        if name not in given and field.default is MISSING:
            raise MachineError.wrong(f"{where}.{name}", "a value", "nothing")
    return cls(**{key: decode(hints[key], value, f"{where}.{key}") for key, value in given.items()})
