"""Runs small enough for tests: every kind of model, on tasks of a few steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ncgru.lab.recipes.recipe import ModelSpec, OptimizerSpec, Recipe
from ncgru.lab.rundir import read_log
from ncgru.lab.stopping import StopFlag
from ncgru.lab.tasks import OwnText, Parenthesis

SIZES: dict[str, Any] = {"hidden_sizes": (6,), "readout": "tiny-normal", "weight_decay_readout": 1e-3}
MODELS: dict[str, ModelSpec] = {
    "lstm": ModelSpec("lstm", **SIZES),
    "gru": ModelSpec("gru", **SIZES),
    "cho-gru": ModelSpec("cho-gru", **SIZES),
    "scornn": ModelSpec("scornn", negatives=2, inverse="exact", **SIZES),
    "goru": ModelSpec("goru", **SIZES),
    "nc-gru-c": ModelSpec("nc-gru", orthogonal="c", negatives=2, reset_every=7, **SIZES),
    "nc-gru-rc": ModelSpec("nc-gru", orthogonal="rc", inverse="hyperpower", **SIZES),
    "nc-gru-ruc": ModelSpec("nc-gru", orthogonal="ruc", order=1, reset_every=4, angles="henaff", **SIZES),
    "released": ModelSpec("nc-gru", orthogonal="rc", reset_every=9, released=True, **SIZES),
}


def small_recipe(model: str = "nc-gru-c", **changes: Any) -> Recipe:
    """Parenthesis over ten steps, with logs, evaluations, measurements and checkpoints at different cadences."""
    recipe = Recipe(
        name=f"small/{model}",
        task=Parenthesis(length=10, test_size=8),
        model=MODELS[model],
        optimizer=OptimizerSpec(lr=0.01),
        steps=24,
        batch_size=4,
        log_every=4,
        eval_every=8,
        eval_batch_size=4,
        measure_every=6,
        checkpoint_every=5,
        headline="train",
    )
    return replace(recipe, **changes)


def text_recipe(text: Path, **changes: Any) -> Recipe:
    """Characters of a text with everything that has a state: carried states, random lengths, locked dropouts."""
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40, encoding="utf-8")
    model = ModelSpec(
        "nc-gru", (8, 6), orthogonal="c", init="torch", readout="language", embedding=6, tied=True, dropout=0.2,
        dropout_input=0.1, dropout_hidden=0.3, dropout_embedding=0.1, activation_penalty=1.0, slowness_penalty=0.5,
    )  # fmt: skip
    recipe = Recipe(
        name="small/text",
        task=OwnText(bptt=12, train=str(text), fractions=(0.6, 0.2, 0.2)),
        model=model,
        optimizer=OptimizerSpec(lr=0.01, weight_decay=1e-4, skew_name="rmsprop", skew_lr=1e-3),
        steps=40,
        batch_size=4,
        log_every=4,
        eval_every=16,
        eval_splits=("valid", "test"),
        eval_batch_size=2,
        clip=0.25,
        checkpoint_every=7,
        headline="test",
        select="valid",
    )
    return replace(recipe, **changes)


class StopAfter(StopFlag):
    """Asks for the stop once it has been looked at so many times; the loop looks once a step."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._left = looks

    def __bool__(self) -> bool:
        self._left -= 1
        if self._left <= 0:
            self.set("enough")
        return super().__bool__()


def timeless_log(path: Path) -> list[dict[str, Any]]:
    """The records of a run but for starts and ends, and without times."""
    records = [record for record in read_log(path) if record["kind"] not in ("start", "end")]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]
