"""Texts of one's own, by character and by word; the paper has no numbers for these."""

from __future__ import annotations

from collections.abc import Iterator

from ncgru.lab.recipes.common import MEASURE_EVERY
from ncgru.lab.recipes.penn import language_model
from ncgru.lab.recipes.recipe import OptimizerSpec, Recipe
from ncgru.lab.tasks import OwnText

MODELS = ("lstm", "gru", "scornn", "nc-gru-c")
UNITS = {"char": "character", "word": "word"}
SIZE = 256
TEXT = "text.txt"


def text(unit: str, model: str) -> Recipe:
    """One layer with the dropouts of the paper's character models: a start for texts of about a megabyte."""
    return Recipe(
        name=f"text-{unit}/{model}",
        task=OwnText(UNITS[unit], bptt=100 if unit == "char" else 50, train=TEXT),
        model=language_model(model, SIZE, (SIZE,), dropout=0.15, dropout_input=0.15),
        optimizer=OptimizerSpec(),
        steps=10_000,
        batch_size=32,
        log_every=100,
        eval_every=500,
        eval_splits=("valid", "test"),
        eval_batch_size=10,
        clip=1.0,
        measure_every=MEASURE_EVERY,
        headline="test",
        select="valid",
        note=f"A text of your own, {TEXT} unless --set text=FILE names another; nine tenths of it are trained on.",
    )


def recipes() -> Iterator[Recipe]:
    """All recipes of these tasks."""
    for unit in UNITS:
        yield from (text(unit, model) for model in MODELS)
