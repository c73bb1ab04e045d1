"""Parenthesis: table 1, the ablations, and what the released code does otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ncgru.lab.recipes.common import MEASURE_EVERY, MODELS, NOTES, Settings, paper_losses
from ncgru.lab.recipes.recipe import OptimizerSpec, Recipe
from ncgru.lab.tasks import Parenthesis

LENGTHS = (100, 200)
SETTINGS = Settings(
    sizes={"lstm": 42, "gru": 50, "scornn": 110, "goru": 64, "nc-gru": 56},
    negatives={"scornn": 20, "nc-gru": 40},
    reset_every=50,
    readout="tiny-normal",
    init={"nc-gru-rc": "he-normal-gates"},
    extra={"weight_decay_readout": 1e-4},
)
PAPER = {
    100: paper_losses(1, -3, "0.62 29.94 24.85 1.199 0.286 0.149"),
    200: paper_losses(1, -3, "6.93 1.526 18.957 1.66 0.227 0.167"),
}
RELEASED_RESET = 49
OTHER_SUBSETS = ("r", "u", "ru", "uc")
NEGATIVES = (0, 7, 14, 28, 42)  # 0, n/8, n/4, n/2, 3n/4
CADENCES = (1, 20)


def parenthesis(length: int, model: str) -> Recipe:
    """A model on sequences of `length`: 200 logged means of 100 updates each, the smallest of which counts."""
    # The released code decays every variable whose name starts with W; these are the ones beside the read-out.
    gates = 1e-4 if model in ("goru", "nc-gru-rc") else 0.0
    return Recipe(
        name=f"parenthesis-{length}/{model}",
        task=Parenthesis(length=length),
        model=replace(SETTINGS.model(model), weight_decay_recurrent=gates),
        optimizer=OptimizerSpec(),
        steps=20_000,
        batch_size=16,
        log_every=100,
        eval_every=1000,
        eval_batch_size=400,
        measure_every=MEASURE_EVERY,
        headline="train",
        paper=PAPER[length].get(model),
        note=NOTES.get(model, ""),
    )


def variants(length: int) -> Iterator[Recipe]:
    """The other readings of the table's rows."""
    gru, scornn, goru = (parenthesis(length, model) for model in ("gru", "scornn", "goru"))
    yield gru.variant("100", "100 units, as in the released script for T=200.", model={"hidden_sizes": (100,)})
    yield goru.variant("60", "60 units, as in the released script.", model={"hidden_sizes": (60,)})
    yield scornn.variant(
        "own",
        "The optimisers of the released script: RMSprop for the rest, Adam for A.",
        optimizer={"name": "rmsprop", "alpha": 0.9, "skew_name": "adam"},
    )
    for model in ("nc-gru-c", "nc-gru-rc"):
        yield parenthesis(length, model).variant(
            "released",
            "The released code's update: learning rate times raw gradient in the series"
            + (", U_r's gradient and A_c's inverse for both matrices." if model == "nc-gru-rc" else "."),
            model={"released": True, "reset_every": RELEASED_RESET},
        )


def ablations(length: int) -> Iterator[Recipe]:
    """How the inverse is followed, which matrices are orthogonal, how often it is reset, how many -1's D has."""
    for letters in OTHER_SUBSETS:
        yield parenthesis(length, f"nc-gru-{letters}")
    base = parenthesis(length, "nc-gru-c")
    two = parenthesis(length, "nc-gru-rc")
    yield two.variant(
        "he",
        "Initialisation and weight decay as the other subsets of r, u and c have them.",
        model={"init": "he", "weight_decay_recurrent": 0.0},
    )
    yield base.variant("exact", "An exact inverse at every update.", model={"inverse": "exact", "reset_every": None})
    yield base.variant(
        "hyperpower",
        "The series in the measured residual, without reset.",
        model={"inverse": "hyperpower", "reset_every": None},
    )
    for order in (1, 3):
        yield base.variant(f"neumann-{order}", f"The series of order {order}.", model={"order": order})
    for cadence in CADENCES:
        note = f"An exact inverse at every {cadence}th update." if cadence > 1 else "A series that is always reset."
        yield base.variant(f"reset-{cadence}", note, model={"reset_every": cadence})
    yield base.variant("reset-never", "The series without reset (the guard still acts).", model={"reset_every": None})
    for count in NEGATIVES:
        yield base.variant(f"negatives-{count}", f"{count} -1's in D.", model={"negatives": count})


def groups(length: int) -> dict[str, tuple[str, ...]]:
    """The ablations by name: which recipes are held against each other."""
    task, base = f"parenthesis-{length}", f"parenthesis-{length}/nc-gru-c"
    subsets = [f"{task}/nc-gru-{letters}" for letters in ("c", "r", "u", "rc@he", "ru", "uc", "ruc")]
    inverses = [f"@{mark}" for mark in ("exact", "neumann-1", "neumann-3", "hyperpower")]
    return {
        f"{task}/inverse": (base, *(base + mark for mark in inverses)),
        f"{task}/matrices": tuple(subsets),
        f"{task}/cadence": (base, *(f"{base}@reset-{cadence}" for cadence in (*CADENCES, "never"))),
        f"{task}/negatives": (base, *(f"{base}@negatives-{count}" for count in NEGATIVES)),
        f"{task}/released": tuple(f"{task}/nc-gru-{x}{mark}" for x in ("c", "rc") for mark in ("", "@released")),
    }


def recipes() -> Iterator[Recipe]:
    """All recipes of this task."""
    for length in LENGTHS:
        yield from (parenthesis(length, model) for model in MODELS)
        yield from variants(length)
        yield from ablations(length)
