"""Colours of the models, the same in the page and in the figures."""

from __future__ import annotations

LIGHT = ("#6b7280", "#0072b2", "#009e73", "#b8860b", "#d55e00", "#b0307a", "#6a4fc3", "#3f8fa8")
DARK = ("#a3acb9", "#58a6e8", "#3fc79a", "#e0b13c", "#ff8a4c", "#ef7bb8", "#a996f5", "#6cc3d9")
"""Both from the same hues, apart also for colour-blind eyes; on white and on near black."""

DASHES = ("", "7 3", "2 3", "9 3 2 3")
"""For models beyond the number of colours."""


def colour(number: int, dark: bool = False) -> str:
    """The colour with a number."""
    colours = DARK if dark else LIGHT
    return colours[number % len(colours)]


def dash(number: int) -> str:
    """Dash and gap lengths that go with the colour of a number."""
    return DASHES[number // len(LIGHT) % len(DASHES)]
