"""Penn Treebank by character (table 5) and by word (table 6).

The paper gives three hidden sizes a model, (a, b, c) with c = a. In the code that it builds on, a is the width of the
embedding and b that of the inner layers, so the layers go a → b → b → a ("three layers"); taken by the letter they are
a → a → b → a ("literal"). The released code runs one layer a → a, and only this fits the numbers in table 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ncgru.lab.recipes.recipe import ModelSpec, OptimizerSpec, PaperNumber, Recipe
from ncgru.lab.tasks import PennTreebank

CHARACTER_SIZES = {"lstm": (350, 880), "gru": (415, 950), "scornn": (500, 2000), "nc-gru-c": (430, 1000)}
CHARACTER_PAPER = {"lstm": "1.4", "gru": "1.455", "scornn": "1.6", "nc-gru-c": "1.385"}
CHARACTER_EPOCH = 1613
"""Updates in an epoch, about: 156,796 steps of text in each of the 32 columns, some 97 in the mean segment."""
CHARACTER_DROPOUTS = {"dropout": 0.15, "dropout_input": 0.15, "dropout_hidden": 0.15, "dropout_embedding": 0.15}

WORD_SIZES = (400, 1150)
WORD_PAPER = {"lstm": "78.93", "gru": "80.73", "scornn": "123.90", "nc-gru-c": "77.00"}
WORD_EPOCH = 684
"""Updates in an epoch, about: 46,479 steps of text in each of the 20 columns, some 68 in the mean segment."""
WORD_MODEL = {
    "dropout": 0.4,
    "dropout_input": 0.4,
    "dropout_hidden": 0.25,
    "dropout_embedding": 0.1,
    "activation_penalty": 2.0,
    "slowness_penalty": 1.0,
}
WORD_NOTES = {
    "lstm": "The paper quotes 78.93 from Bai et al. (2018), another recipe; here it has NC-GRU's recipe.",
    "gru": "Beside its own 80.73 the paper quotes 92.48 from Bai et al. (2018).",
}
RESET_EVERY = 100
NEGATIVES = 50


def language_model(model: str, embedding: int, hidden_sizes: tuple[int, ...], **more: Any) -> ModelSpec:
    """The model called `model` with PyTorch's initialisation and the decoder tied to the embedding."""
    orthogonal: Mapping[str, Any] = {}
    if model == "nc-gru-c":
        orthogonal = {"orthogonal": "c", "negatives": NEGATIVES, "reset_every": RESET_EVERY}
    elif model == "scornn":
        orthogonal = {"negatives": NEGATIVES, "inverse": "exact"}
    kind = model.removesuffix("-c")
    settings = {
        "init": "small" if kind == "scornn" else "torch",
        "embedding": embedding,
        "tied": True,
        "readout": "language",
        **orthogonal,
        **more,
    }
    return ModelSpec(kind, hidden_sizes, **settings)


def three_layers(embedding: int, inner: int) -> tuple[int, ...]:
    """The hidden sizes of three layers as AWD-LSTM's code reads its two widths."""
    return inner, inner, embedding


def character(model: str) -> Recipe:
    """One layer without dropout, as the released code runs it, at the paper's size and learning rate."""
    size, _ = CHARACTER_SIZES[model]
    text = CHARACTER_PAPER[model]
    return Recipe(
        name=f"ptb-char/{model}",
        task=PennTreebank("character", bptt=100),
        model=language_model(model, size, (size,)),
        optimizer=OptimizerSpec(lr=5e-4),
        steps=100 * CHARACTER_EPOCH,
        batch_size=32,
        log_every=100,
        eval_every=CHARACTER_EPOCH,
        eval_splits=("valid", "test"),
        eval_batch_size=10,
        measure_every=CHARACTER_EPOCH,
        headline="test",
        select="valid",
        paper=PaperNumber(5, float(text), text, "bits per character", "bits_per_character"),
        note="One layer without dropout for 100 epochs as released, with the sizes and learning rate of the text.",
    )


def character_variants(model: str) -> Iterator[Recipe]:
    """The two readings of the three sizes in the text."""
    base = character(model)
    size, inner = CHARACTER_SIZES[model]
    for mark, sizes in (("three-layers", three_layers(size, inner)), ("literal", (size, inner, size))):
        yield base.variant(
            mark,
            f"Layers of {', '.join(map(str, sizes))} units, all dropouts 0.15.",
            model={"hidden_sizes": sizes, **CHARACTER_DROPOUTS},
        )


def character_inverses() -> Iterator[Recipe]:
    """For the time of an epoch, by how the inverse is followed; 435 units and the released update besides."""
    base = character("nc-gru-c")
    three = next(character_variants("nc-gru-c"))
    for recipe in (base, three):
        prefix = "" if recipe is base else "three-layers-"
        dropouts = "" if recipe is base else f" {three.note}"
        for method in ("exact", "hyperpower"):
            yield base.variant(
                f"{prefix}{method}",
                f"{method.capitalize()} inverse without reset.{dropouts}",
                model={**_fields(recipe), "inverse": method, "reset_every": None},
            )
        for order in (1, 3):
            yield base.variant(
                f"{prefix}neumann-{order}",
                f"The series of order {order}.{dropouts}",
                model={**_fields(recipe), "order": order},
            )
    for mark, released in (("435", False), ("released", True)):
        update = "the released code's update" if released else "Algorithm 1"
        yield base.variant(
            mark,
            f"435 units and learning rate 7e-4 as in the released script, with {update}; its gate r ⊙ (U_c h) is ours "
            "before the product.",
            model={"hidden_sizes": (435,), "embedding": 435, "released": released},
            optimizer={"lr": 7e-4},
        )


def word(model: str) -> Recipe:
    """Three layers with AWD-LSTM's settings, where the paper gives none of its own."""
    embedding, inner = WORD_SIZES
    text = WORD_PAPER[model]
    return Recipe(
        name=f"ptb-word/{model}",
        task=PennTreebank("word", bptt=70),
        model=language_model(model, embedding, three_layers(embedding, inner), **WORD_MODEL),
        optimizer=OptimizerSpec(lr=5e-4, weight_decay=1.2e-6),
        steps=500 * WORD_EPOCH,
        batch_size=20,
        log_every=100,
        eval_every=WORD_EPOCH,
        eval_splits=("valid", "test"),
        eval_batch_size=10,
        clip=0.25,
        measure_every=WORD_EPOCH,
        headline="test",
        select="valid",
        paper=PaperNumber(6, float(text), text, "perplexity", "perplexity"),
        note=f"{WORD_NOTES.get(model, '')} Layers of 1150, 1150, 400 units; what the paper leaves out is AWD-LSTM's: "
        "up to 500 epochs, clipping at 0.25.".strip(),
    )


def recipes() -> Iterator[Recipe]:
    """All recipes of both tasks."""
    for model in CHARACTER_SIZES:
        yield character(model)
        yield from character_variants(model)
    yield from character_inverses()
    for model in WORD_PAPER:
        base = word(model)
        yield base
        yield base.variant("one-layer", "One layer of 400 units.", model={"hidden_sizes": (WORD_SIZES[0],)})


def _fields(recipe: Recipe) -> dict[str, Any]:
    """What the readings of the sizes change in the model."""
    return {name: getattr(recipe.model, name) for name in ("hidden_sizes", *CHARACTER_DROPOUTS)}
