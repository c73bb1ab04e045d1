"""Parameter counts of every model at the paper's sizes, read-out included, one bias a gate, n(n-1)/2 for A."""

from __future__ import annotations

import pytest

from ncgru.lab import recipes
from ncgru.lab.models import SequenceModel, build_model
from ncgru.lab.recipes import Recipe
from ncgru.lab.tasks.corpus import Corpus

SYNTHETIC = {
    "parenthesis-100/lstm": 9_174,
    "parenthesis-100/gru": 9_618,
    "parenthesis-100/gru@100": 34_218,
    "parenthesis-100/scornn": 8_873,
    "parenthesis-100/goru": 11_024,
    "parenthesis-100/goru@60": 9_856,
    "parenthesis-100/nc-gru-c": 10_182,
    "parenthesis-100/nc-gru-rc": 8_586,
    "denoise-200/lstm": 37_270,
    "denoise-200/gru": 34_310,
    "denoise-200/scornn": 24_110,
    "denoise-200/goru": 38_536,
    "denoise-200/goru@120": 34_208,
    "denoise-200/nc-gru-c": 39_835,
    "denoise-200/nc-gru-rc": 32_814,
    "adding-200/lstm": 19_381,
    "adding-200/gru": 15_401,
    "adding-200/scornn": 18_716,
    "adding-200/goru": 34_303,
    "adding-200/nc-gru-c": 16_761,
    "adding-200/nc-gru-rc": 13_521,
    "copying-1000/lstm": 22_109,
    "copying-1000/gru": 21_537,
    "copying-1000/scornn": 21_764,
    "copying-1000/goru": 24_407,
    "copying-1000/nc-gru-c": 27_033,
    "copying-1000/nc-gru-rc": 22_377,
}

# In millions, as rounded.
LANGUAGE = {
    "ptb-char/lstm": "1.000",
    "ptb-char/gru": "1.057",
    "ptb-char/scornn": "0.400",
    "ptb-char/nc-gru-c": "1.040",
    "ptb-char/lstm@three-layers": "12.28",
    "ptb-char/gru@three-layers": "11.04",
    "ptb-char/scornn@three-layers": "10.15",
    "ptb-char/nc-gru-c@three-layers": "11.07",
    "ptb-char/lstm@literal": "7.06",
    "ptb-char/gru@literal": "6.65",
    "ptb-char/scornn@literal": "4.53",
    "ptb-char/nc-gru-c@literal": "6.59",
    "ptb-word/lstm": "24.22",
    "ptb-word/gru": "19.17",
    "ptb-word/scornn": "7.66",
    "ptb-word/nc-gru-c": "17.76",
}


@pytest.fixture(autouse=True)
def without_first_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts need no initialisation, which takes most of the time at the sizes of the language models."""
    for module in ("layer.initialise", "sequence.initialise_readout"):
        monkeypatch.setattr(f"ncgru.lab.models.{module}", lambda *_: None)


def with_vocabulary(recipe: Recipe, size: int) -> Recipe:
    """The recipe with a text of `size` token types in the place of the files."""
    vars(recipe.task)["corpus"] = Corpus(tuple(map(str, range(size))), {})
    return recipe


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_counts(name: str) -> None:
    assert build_model(recipes.get(name)).parameter_count() == SYNTHETIC[name]


@pytest.mark.parametrize("model", ["lstm", "gru", "scornn", "goru", "nc-gru-c", "nc-gru-rc", "nc-gru-ruc", "cho-gru"])
@pytest.mark.parametrize(
    ("short", "long"),
    [("parenthesis-100", "parenthesis-200"), ("adding-200", "adding-400"), ("copying-1000", "copying-2000")],
)
def test_length_does_not_matter(short: str, long: str, model: str) -> None:
    counts = {build_model(recipes.get(f"{task}/{model}")).parameter_count() for task in (short, long)}
    assert len(counts) == 1


def test_three_orthogonal_matrices_lose_as_many_again() -> None:
    one, two, three = (
        build_model(recipes.get(f"copying-1000/nc-gru-{letters}")).parameter_count() for letters in ("c", "rc", "ruc")
    )
    assert one - two == two - three == 96**2 - 96 * 95 // 2


def test_both_grus_have_the_same_count() -> None:
    for task in ("parenthesis-100", "denoise-200", "adding-200", "copying-1000"):
        assert len({build_model(recipes.get(f"{task}/{gru}")).parameter_count() for gru in ("gru", "cho-gru")}) == 1


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_counts(name: str) -> None:
    types = 50 if name.startswith("ptb-char") else 10_000
    count = build_model(with_vocabulary(recipes.get(name), types)).parameter_count() / 1e6
    digits = len(LANGUAGE[name].partition(".")[2])
    assert f"{count:.{digits}f}" == LANGUAGE[name]


def test_the_tied_weight_is_one() -> None:
    recipe = with_vocabulary(recipes.get("ptb-char/gru"), 50)
    model = build_model(recipe)
    assert isinstance(model, SequenceModel)
    assert model.embedding is not None
    assert model.readout.weight is model.embedding.weight
