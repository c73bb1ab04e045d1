"""Setting fields by name, and what a recipe refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncgru.lab import recipes
from ncgru.lab.recipes import ModelSpec, OptimizerSpec, PaperNumber, Recipe
from ncgru.lab.recipes import settings as settings_module
from ncgru.lab.tasks import Adding, Copying, Denoise, OwnText, Parenthesis, PennTreebank

BASE = recipes.get("parenthesis-100/nc-gru-c")
WORDS = recipes.get("ptb-word/gru")

rates = st.floats(1e-9, 10, allow_nan=False)
counts = st.integers(1, 10**6)
some = st.one_of(st.none(), counts)
vectors = st.one_of(
    st.builds(Parenthesis, length=counts, train_size=some, test_size=counts),
    st.builds(Copying, length=counts, train_size=some),
    st.builds(Denoise, length=counts, variant=st.sampled_from(["published", "corrected"])),
    st.builds(Adding, length=st.integers(3, 10**6), train_size=some),
)
optimizers = st.builds(
    OptimizerSpec,
    name=st.sampled_from(["adam", "adamw", "rmsprop", "sgd"]),
    lr=rates,
    weight_decay=rates,
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    skew_name=st.sampled_from([None, "adam", "rmsprop"]),
    skew_lr=st.one_of(st.none(), rates),
)
models = st.one_of(
    st.builds(
        ModelSpec,
        kind=st.just("nc-gru"),
        hidden_sizes=st.lists(st.integers(3, 99), min_size=1, max_size=3).map(tuple),
        orthogonal=st.sampled_from(["", "r", "u", "c", "rc", "ruc"]),
        negatives=st.one_of(st.none(), st.integers(0, 3)),
        inverse=st.sampled_from(["exact", "neumann", "hyperpower"]),
        order=st.integers(1, 4),
        reset_every=some,
        weight_decay_readout=rates,
    ),
    st.builds(
        ModelSpec,
        kind=st.sampled_from(["lstm", "gru", "cho-gru"]),
        hidden_sizes=st.lists(counts, min_size=1, max_size=3).map(tuple),
        init=st.sampled_from(["", "tensorflow", "torch"]),
        dropout=st.floats(0, 0.99),
    ),
)
numbers = st.builds(PaperNumber, table=st.integers(1, 6), value=rates, text=st.text(), unit=st.text())
described = st.builds(
    Recipe,
    name=st.text(min_size=1),
    task=vectors,
    model=models,
    optimizer=optimizers,
    steps=counts,
    batch_size=counts,
    log_every=counts,
    eval_every=counts,
    clip=st.one_of(st.none(), rates),
    precision=st.sampled_from(["float32", "bfloat16"]),
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4, unique=True).map(tuple),
    paper=st.one_of(
        st.none(), st.builds(PaperNumber, table=st.integers(1, 6), value=rates, text=st.text(), unit=st.text())
    ),
    note=st.text(),
)


@settings(max_examples=60, deadline=None)
@given(described)
def test_json_gives_an_equal_recipe_back(recipe: Recipe) -> None:
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert again == recipe
    assert recipe.difference(again) == []
    assert again.to_dict() == recipe.to_dict()


@pytest.mark.parametrize(
    "task",
    [
        PennTreebank("word", bptt=70),
        OwnText(train="a.txt", valid="b.txt", test="c.txt"),
        OwnText("word", train="a.txt"),
    ],
)
def test_tasks_of_text_survive_json_without_their_files(task: PennTreebank | OwnText) -> None:
    recipe = replace(WORDS, task=task)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@settings(max_examples=40, deadline=None)
@given(rates, counts, st.integers(41, 500), some)
def test_what_is_set_is_what_is_read(lr: float, steps: int, size: int, reset: int | None) -> None:
    changed = BASE.with_settings(
        {"optimizer.lr": repr(lr), "steps": str(steps), "hidden_size": str(size), "reset_every": str(reset).lower()}
    )
    assert (changed.optimizer.lr, changed.steps, changed.model.reset_every) == (lr, steps, reset)
    assert changed.model.hidden_sizes == (size,)
    fields = {name for name, _, _ in BASE.difference(changed)}
    assert fields <= {"optimizer.lr", "steps", "model.hidden_sizes", "model.reset_every", "note"}


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("lr", "3e-4", "optimizer.lr", 3e-4),
        ("learning_rate", "1", "optimizer.lr", 1.0),
        ("length", "50", "task.length", 50),
        ("task.test_size", "32_000", "task.test_size", 32_000),
        ("skew_lr", "none", "optimizer.skew_lr", None),
        ("skew_lr", "1e-5", "optimizer.skew_lr", 1e-5),
        ("orthogonal", "rc", "model.orthogonal", "rc"),
        ("model.orthogonal", "", "model.orthogonal", ""),
        ("released", "TRUE", "model.released", True),
        ("seeds", "0,1, 2", "seeds", [0, 1, 2]),
        ("seeds", "(7,)", "seeds", [7]),
        ("betas", "0.8,0.99", "optimizer.betas", [0.8, 0.99]),
        ("eval_every", "none", "eval_every", None),
        ("name", "x", "name", "x"),
        ("hidden_sizes", "60,70", "model.hidden_sizes", [60, 70]),
        ("note", "mine", "note", "mine"),
    ],
)
def test_values_are_read_by_their_field(name: str, text: str, path: str, value: Any) -> None:
    changed: Any = BASE.with_settings({name: text}).to_dict()
    for part in path.split("."):
        changed = changed[part]
    assert changed == value
    assert type(changed) is type(value)


def test_a_tied_embedding_follows_the_hidden_size() -> None:
    assert WORDS.model.tied
    assert WORDS.with_settings({"hidden_size": "8,16"}).model.embedding == 16
    assert WORDS.with_settings({"hidden_size": "16", "tied": "false"}).model.embedding == WORDS.model.embedding
    assert BASE.with_settings({"hidden_size": "64"}).model.embedding is None
    with pytest.raises(ValueError, match="embedding must equal the last of hidden_sizes"):
        WORDS.with_settings({"embedding": "8", "hidden_size": "16"})
    with pytest.raises(ValueError, match="hidden_sizes must be a tuple"):
        WORDS.with_settings({"hidden_size": ""})


def test_the_note_says_what_was_changed() -> None:
    changed = BASE.with_settings({"lr": "0.01", "steps": "20000"})
    assert changed.note == "Changed: optimizer.lr=0.01."
    assert BASE.with_settings({"steps": "20000"}) is BASE


def test_one_hidden_size_is_for_all_layers() -> None:
    changed = WORDS.with_settings({"hidden_size": "32"})
    assert changed.model.hidden_sizes == (32, 32, 32)
    assert changed == WORDS.with_settings({"hidden_size": "32", "embedding": "32"})
    assert WORDS.with_settings({"hidden_size": "8,16,400"}).model.hidden_sizes == (8, 16, 400)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("hiden_size", "64", "did you mean 'hidden_size'"),
        ("optimizer.learning", "1", "did you mean 'optimizer"),
        ("zzzzzz", "1", "the fields are name, task.length"),
        ("paper", "1", "no field 'paper'"),
        ("kind", "lstm", "init must be one of 'tensorflow', 'torch', got 'he'"),
        ("steps", "1e4", "steps must be a whole number such as 64, got '1e4'"),
        ("steps", "none", "steps must be a whole number"),
        ("lr", "fast", "lr must be a number such as 3e-4, got 'fast'"),
        ("lr", "0", "lr must be above 0, got 0"),
        ("lr", "nan", "lr must be finite, got nan"),
        ("lr", "-1", "lr must be above 0"),
        ("released", "maybe", "true or false, got 'maybe'"),
        ("betas", "0.9", "betas must have 2 items, got 1"),
        ("hidden_size", "0", "hidden_sizes must be at least 1, got 0"),
        ("hidden_size", "20", "negatives must be between 0 and the smallest of hidden_sizes, 20, got 40"),
        ("hidden_size", "", "hidden_sizes must be a tuple"),
        ("length", "0", "length must be at least 1"),
        ("seeds", "1,1", "seeds must be a tuple of different numbers"),
        ("seeds", "-1", "seeds must be from 0"),
        ("precision", "float8", "precision must be one of"),
        ("eval_splits", "valid", "eval_splits must be one of 'train', 'test'"),
        ("headline", "valid", "headline must be 'train' or a split that is evaluated"),
        ("embedding", "10", "model.embedding must be None for a task of vectors"),
        ("init", "small", "init must be one of 'he'"),
        ("dropout", "1", "dropout must be below 1"),
        ("inverse", "newton", "inverse must be one of"),
        ("readout", "zero", "readout must be one of"),
        ("clip", "inf", "clip must be finite"),
        ("alpha", "1", "alpha must be below 1"),
    ],
)
def test_what_cannot_be_set_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        BASE.with_settings({name: text})


def test_an_alias_for_a_field_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"no field 'task\.length'"):
        WORDS.with_settings({"length": "10"})


def test_a_name_of_two_fields_is_ambiguous() -> None:
    """No two fields below the top share a name today, so one more part is put on."""
    known = {path: settings_module.Field(path, float) for path in ("optimizer.alpha", "model.alpha")}
    with pytest.raises(ValueError, match=r"'alpha' is ambiguous in .*; write optimizer\.alpha or model\.alpha"):
        settings_module.find("alpha", known, BASE)


def test_the_same_field_twice() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.lr is set twice"):
        BASE.with_settings({"lr": "1", "learning_rate": "2"})


def test_difference_names_fields_and_values() -> None:
    other = replace(BASE, steps=7, task=Copying(length=9))
    changed = {name: (mine, theirs) for name, mine, theirs in BASE.difference(other)}
    assert changed["steps"] == (20_000, 7)
    assert changed["task.kind"] == ("Parenthesis", "Copying")
    assert changed["task.length"] == (100, 9)
    assert "model.kind" not in changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("steps"), "steps not found"),
        (lambda d: d.update(stepz=3), "no field 'stepz'; did you mean 'steps'"),
        (lambda d: d["model"].update(order="2"), r"recipe.model.order must be of type int, got '2'"),
        (lambda d: d["model"].update(released=1), r"recipe.model.released must be of type bool"),
        (lambda d: d["model"].update(order=True), r"recipe.model.order must be of type int"),
        (lambda d: d["model"].update(order=None), r"recipe.model.order must not be null"),
        (lambda d: d["task"].update(kind="Chess"), r"recipe.task.kind must be one of Adding"),
        (lambda d: d.update(seeds=3), r"recipe.seeds must be a list"),
        (lambda d: d.update(optimizer=[]), r"recipe.optimizer must be an object"),
        (lambda d: d["optimizer"].update(betas=[0.9]), r"recipe.optimizer.betas must have 2 items"),
    ],
)
def test_a_wrong_description_is_refused(change: Any, message: str) -> None:
    description = BASE.to_dict()
    change(description)
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(description)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"steps": 2.0}, TypeError, "steps must be an int"),
        ({"eval_every": 0}, ValueError, "eval_every must be at least 1"),
        ({"task": "adding"}, TypeError, "task must be a Task"),
        ({"seeds": ()}, ValueError, "seeds must be a tuple"),
        ({"seeds": (0.5,)}, TypeError, "seeds must be an int"),
        ({"name": ""}, ValueError, "name must be"),
        ({"select": "test", "eval_every": None}, ValueError, "select must be 'train' or a split that is evaluated"),
        ({"task": PennTreebank()}, ValueError, "headline|eval_splits|model.embedding must be a width"),
    ],
)
def test_a_wrong_recipe_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replace(BASE, **change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kind": "ncgru"}, ValueError, "did you mean 'nc-gru'"),
        ({"kind": "lstm", "orthogonal": "c"}, ValueError, "orthogonal must be '' for kind='lstm'"),
        ({"orthogonal": "cc"}, ValueError, "each at most once"),
        ({"orthogonal": "ruc", "released": True}, ValueError, "released must be False"),
        ({"released": True, "inverse": "exact"}, ValueError, "released must be False"),
        ({"negatives": 1.5}, TypeError, "negatives must be an int"),
        ({"embedding": 9, "tied": True}, ValueError, "embedding must equal the last of hidden_sizes"),
        ({"weight_decay_readout": -1}, ValueError, "weight_decay_readout must be at least 0"),
        ({"hidden_sizes": [56]}, ValueError, "hidden_sizes must be a tuple"),
    ],
)
def test_a_wrong_model_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    fields = {"kind": "nc-gru", "hidden_sizes": (56,), "orthogonal": "c", "init": "", **change}
    with pytest.raises(error, match=message):
        ModelSpec(**fields)
