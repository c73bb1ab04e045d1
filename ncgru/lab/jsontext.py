"""JSON as the laboratory writes it: one line, keys in their order, numbers exact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def plain(value: object, place: str) -> Any:
    """`value` made of dicts, lists, str, int, float, bool and None alone (tuples become lists), else an error.

    Args:
        value: what shall be written.
        place: how `value` is called in an error.

    Raises:
        TypeError: if JSON could not give back what lies somewhere in `value`.
    """
    if value is None or isinstance(value, bool):
        return value
    # float(), int() and str() strip subclasses, such as NumPy's float64, that JSON would not give back.
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{place} must have keys of type str, got {key!r}; write str(key) or use flatten()")
        return {str(key): plain(item, f"{place}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{place} must be something JSON can hold, got {type(value).__name__}; "
        "pass .item() or .tolist() of a tensor, to_dict() of a recipe"
    )


def dumps(value: object) -> str:
    """One line of JSON; NaN and infinities as Python writes them, so that `json.loads` gives them back."""
    return json.dumps(value, separators=(",", ":"))


def encode_not_finite(value: Any) -> Any:
    """NaN and infinities as strings, for files that other programs read: strict JSON has no such numbers."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return _each(value, encode_not_finite)


def decode_not_finite(value: Any) -> Any:
    """The inverse of `encode_not_finite`."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    return _each(value, decode_not_finite)


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    return value
