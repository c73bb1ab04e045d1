"""Copying: table 4."""

from __future__ import annotations

from collections.abc import Iterator

from ncgru.lab.recipes.common import MEASURE_EVERY, MODELS, NOTES, Settings, paper_losses
from ncgru.lab.recipes.recipe import OptimizerSpec, Recipe
from ncgru.lab.tasks import Copying

LENGTHS = (1000, 2000)
SETTINGS = Settings(
    sizes={"lstm": 68, "gru": 78, "scornn": 190, "goru": 100, "nc-gru": 96},
    negatives={"scornn": 95, "nc-gru": 80},
    reset_every=20,
    readout="glorot-bias",
)
PAPER = {
    1000: paper_losses(4, -2, "2.040 2.039 0.002 1.488 0.904 0.882"),
    2000: paper_losses(4, -2, "1.03 0.89 0.03 0.718 0.44 0.496"),
}


def copying(length: int, model: str) -> Recipe:
    """A model with a delay of `length`: fresh data at every update, 1,000 test sequences every 50 updates."""
    return Recipe(
        name=f"copying-{length}/{model}",
        task=Copying(length=length),
        model=SETTINGS.model(model),
        optimizer=OptimizerSpec(skew_lr=1e-4),
        steps=10_000,
        batch_size=50,
        log_every=50,
        eval_every=50,
        eval_batch_size=100,
        measure_every=MEASURE_EVERY,
        headline="test",
        paper=PAPER[length].get(model),
        note=NOTES.get(model, ""),
    )


def recipes() -> Iterator[Recipe]:
    """All recipes of this task."""
    for length in LENGTHS:
        yield from (copying(length, model) for model in MODELS)
        yield copying(length, "scornn").variant(
            "own",
            "scoRNN's own settings: RMSprop at 1e-3, and at 1e-4 for A, 20 sequences a batch; 20,000 training "
            "sequences that come round again.",
            task={"train_size": 20_000},
            optimizer={"name": "rmsprop", "alpha": 0.9},
            batch_size=20,
        )
