"""Denoise: table 2, with the data as published and corrected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ncgru.lab.recipes.common import MEASURE_EVERY, MODELS, NOTES, Settings, paper_losses
from ncgru.lab.recipes.parenthesis import RELEASED_RESET
from ncgru.lab.recipes.recipe import OptimizerSpec, Recipe
from ncgru.lab.tasks import Denoise

LENGTHS = (200, 400)
SETTINGS = Settings(
    sizes={"lstm": 90, "gru": 100, "scornn": 200, "goru": 128, "nc-gru": 118},
    negatives={"scornn": 50, "nc-gru": 50},
    reset_every=50,
    readout="denoise",
    init={"nc-gru-c": "he-normal-candidate", "nc-gru-rc": "normal-biases"},
)
PAPER = {
    200: paper_losses(2, -2, "10.08 9.799 8.258 4.453 1.639 1.633"),
    400: paper_losses(2, -2, "5.427 5.2338 3.812 2.29 0.878 0.774"),
}
FIXED_SET = "The paper's minimum is over 10,000 evaluations on one batch of 128; here, over 200 on 1,280 sequences."


def denoise(length: int, model: str) -> Recipe:
    """A model on the published data, in which symbols may be lost."""
    return Recipe(
        name=f"denoise-{length}/{model}",
        task=Denoise(length=length),
        model=SETTINGS.model(model),
        optimizer=OptimizerSpec(),
        steps=10_000,
        batch_size=128,
        log_every=50,
        eval_every=50,
        eval_batch_size=128,
        measure_every=MEASURE_EVERY,
        headline="test",
        paper=PAPER[length].get(model),
        note=f"{NOTES.get(model, '')} {FIXED_SET}".strip(),
    )


def corrected(length: int, model: str) -> Recipe:
    """The same where no symbol is lost and the marker has an input of its own."""
    return replace(
        denoise(length, model),
        name=f"denoise-corrected-{length}/{model}",
        task=Denoise(length=length, variant="corrected"),
        paper=None,
        note=f"{NOTES.get(model, '')} Positions without replacement, inputs of width 11.".strip(),
    )


def variants(length: int) -> Iterator[Recipe]:
    """The other readings of the table's rows."""
    goru, scornn = denoise(length, "goru"), denoise(length, "scornn")
    yield goru.variant("120", "120 units, as in the released script.", model={"hidden_sizes": (120,)})
    yield scornn.variant(
        "own",
        "The optimiser of the released script: RMSprop at 1e-4 for A.",
        optimizer={"skew_name": "rmsprop", "skew_lr": 1e-4, "alpha": 0.9},
    )
    for model in ("nc-gru-c", "nc-gru-rc"):
        yield denoise(length, model).variant(
            "released",
            "The released code's update: learning rate times raw gradient in the series"
            + (", U_r's gradient and A_c's inverse for both matrices." if model == "nc-gru-rc" else "."),
            model={"released": True, "reset_every": RELEASED_RESET},
        )


def recipes() -> Iterator[Recipe]:
    """All recipes of this task."""
    for length in LENGTHS:
        yield from (denoise(length, model) for model in MODELS)
        yield from variants(length)
        yield from (corrected(length, model) for model in MODELS)
