"""Adding: table 3."""

from __future__ import annotations

from collections.abc import Iterator

from ncgru.lab.recipes.common import MEASURE_EVERY, MODELS, NOTES, Settings, paper_losses
from ncgru.lab.recipes.recipe import OptimizerSpec, Recipe
from ncgru.lab.tasks import Adding

LENGTHS = (200, 400)
SETTINGS = Settings(
    sizes={"lstm": 68, "gru": 70, "scornn": 190, "goru": 128, "nc-gru": 80},
    negatives={"scornn": 95, "nc-gru": 43},
    reset_every=50,
    readout="glorot",
)
PAPER = {
    200: paper_losses(3, -5, "2.2829 1.776 51.49 2.758 1.022 5.0"),
    400: paper_losses(3, -5, "269.7 1.2976 16,295.05 2.3067 0.81 4.93"),
}


def adding(length: int, model: str) -> Recipe:
    """A model on sequences of `length`: 10 epochs of 100,000 sequences, the whole test set every 100 updates."""
    return Recipe(
        name=f"adding-{length}/{model}",
        task=Adding(length=length),
        model=SETTINGS.model(model),
        optimizer=OptimizerSpec(),
        steps=20_000,
        batch_size=50,
        log_every=100,
        eval_every=100,
        eval_batch_size=1000,
        measure_every=MEASURE_EVERY,
        headline="test",
        paper=PAPER[length].get(model),
        note=NOTES.get(model, ""),
    )


def recipes() -> Iterator[Recipe]:
    """All recipes of this task."""
    for length in LENGTHS:
        yield from (adding(length, model) for model in MODELS)
        yield adding(length, "scornn").variant(
            "own",
            "scoRNN's own settings: 170 units with 85 -1's, RMSprop at 1e-4 for A.",
            model={"hidden_sizes": (170,), "negatives": 85},
            optimizer={"skew_name": "rmsprop", "skew_lr": 1e-4, "alpha": 0.9},
        )
