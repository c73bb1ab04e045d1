"""How numbers are written, and their quartiles over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, *, digits: int = 3) -> str:
    """A number with `digits` significant digits: 0.286, 29.9, 16,295, 2.9×10⁻⁵; an en dash for None."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    size = abs(value)
    if not 1e-3 <= float(f"{size:.{digits - 1}e}") < 1e6:
        mantissa, exponent = f"{size:.{digits - 1}e}".split("e")
        text = f"{mantissa}×10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    else:
        exponent10 = int(f"{size:.{digits - 1}e}".split("e")[1])
        text = f"{size:,.{max(0, digits - 1 - exponent10)}f}"
    return f"−{text}" if value < 0 else text


def duration(seconds: float | None) -> str:
    """A time in words short enough for a table: 48 s, 12 min 5 s, 3 h 20 min."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if seconds >= 10 or whole == 0 else f"{seconds:.1f} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def count(amount: int, singular: str, plural: str | None = None) -> str:
    """An amount with its noun: 1 seed, 3 seeds."""
    return f"{amount:,} {singular if amount == 1 else plural or singular + 's'}"


def listing(items: Iterable[object]) -> str:
    """Items as in a sentence: a, b and c."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile by linear interpolation; infinite as soon as an infinite value takes part, NaN if there is none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    weight = position - low
    if weight == 0:
        return ordered[low]
    if math.isinf(ordered[low + 1]):
        return ordered[low + 1]
    return ordered[low] + weight * (ordered[low + 1] - ordered[low])
