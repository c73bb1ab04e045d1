"""The registry: a recipe for every number of the paper, for every ablation; names, quick forms, two steps of each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ncgru.lab import recipes
from ncgru.lab.models import build_model
from ncgru.lab.optim import Optimizers
from ncgru.lab.recipes import Recipe
from ncgru.lab.tasks import OwnText
from ncgru.lab.tasks.language import LanguageTask

# Tables 1 to 4 as printed: LSTM, GRU, scoRNN, GORU, NC-GRU(U_c), NC-GRU(U_r, U_c).
SYNTHETIC = {
    "parenthesis-100": (1, 1e-3, (0.62, 29.94, 24.85, 1.199, 0.286, 0.149)),
    "parenthesis-200": (1, 1e-3, (6.93, 1.526, 18.957, 1.66, 0.227, 0.167)),
    "denoise-200": (2, 1e-2, (10.08, 9.799, 8.258, 4.453, 1.639, 1.633)),
    "denoise-400": (2, 1e-2, (5.427, 5.2338, 3.812, 2.29, 0.878, 0.774)),
    "adding-200": (3, 1e-5, (2.2829, 1.776, 51.49, 2.758, 1.022, 5.0)),
    "adding-400": (3, 1e-5, (269.7, 1.2976, 16295.05, 2.3067, 0.81, 4.93)),
    "copying-1000": (4, 1e-2, (2.040, 2.039, 0.002, 1.488, 0.904, 0.882)),
    "copying-2000": (4, 1e-2, (1.03, 0.89, 0.03, 0.718, 0.44, 0.496)),
}
ROWS = ("lstm", "gru", "scornn", "goru", "nc-gru-c", "nc-gru-rc")
LANGUAGE = {
    "ptb-char": (5, "bits_per_character", (1.4, 1.455, 1.6, 1.385)),
    "ptb-word": (6, "perplexity", (78.93, 80.73, 123.90, 77.00)),
}
LANGUAGE_ROWS = ("lstm", "gru", "scornn", "nc-gru-c")


@pytest.mark.parametrize("task", SYNTHETIC)
def test_every_number_of_tables_1_to_4_has_its_recipe(task: str) -> None:
    table, unit, numbers = SYNTHETIC[task]
    for row, number in zip(ROWS, numbers, strict=True):
        paper = recipes.get(f"{task}/{row}").paper
        assert paper is not None
        assert paper.table == table
        assert paper.metric == "loss"
        assert paper.value == pytest.approx(number * unit, rel=1e-12)
        assert float(paper.text.replace(",", "")) == number
        assert paper.unit == {1e-3: "×10⁻³", 1e-2: "×10⁻²", 1e-5: "×10⁻⁵"}[unit]


@pytest.mark.parametrize("task", LANGUAGE)
def test_every_number_of_tables_5_and_6_has_its_recipe(task: str) -> None:
    table, metric, numbers = LANGUAGE[task]
    for row, number in zip(LANGUAGE_ROWS, numbers, strict=True):
        paper = recipes.get(f"{task}/{row}").paper
        assert paper is not None
        assert (paper.table, paper.metric, paper.value, float(paper.text)) == (table, metric, number, number)


@pytest.mark.parametrize("task", [*SYNTHETIC, "denoise-corrected-200", "denoise-corrected-400"])
def test_every_synthetic_task_has_eight_models(task: str) -> None:
    for row in (*ROWS, "nc-gru-ruc", "cho-gru"):
        recipe = recipes.get(f"{task}/{row}")
        assert recipe.task.name == task
        if row.startswith("nc-gru"):
            assert recipe.model.orthogonal == row.removeprefix("nc-gru-")
            assert (recipe.model.inverse, recipe.model.order) == ("neumann", 2)
            assert recipe.model.reset_every == (20 if task.startswith("copying") else 50)


def test_the_papers_settings() -> None:
    """Steps, batch, rates and -1's as section 4 of the paper prints them."""
    for name, steps, batch, lr, skew_lr, negatives in [
        ("parenthesis-100/nc-gru-c", 20_000, 16, 1e-3, None, 40),
        ("parenthesis-100/scornn", 20_000, 16, 1e-3, None, 20),
        ("denoise-400/nc-gru-rc", 10_000, 128, 1e-3, None, 50),
        ("adding-200/nc-gru-c", 20_000, 50, 1e-3, None, 43),
        ("adding-200/scornn", 20_000, 50, 1e-3, None, 95),
        ("copying-2000/nc-gru-rc", 10_000, 50, 1e-3, 1e-4, 80),
        ("copying-2000/scornn", 10_000, 50, 1e-3, 1e-4, 95),
        ("ptb-char/nc-gru-c", 161_300, 32, 5e-4, None, 50),
        ("ptb-word/nc-gru-c", 342_000, 20, 5e-4, None, 50),
    ]:
        recipe = recipes.get(name)
        assert (recipe.steps, recipe.batch_size) == (steps, batch)
        assert recipe.optimizer.name == "adam"
        assert (recipe.optimizer.lr, recipe.optimizer.skew_lr) == (lr, skew_lr)
        assert recipe.model.negatives == negatives


def test_headlines_are_the_papers_series() -> None:
    assert recipes.get("parenthesis-100/gru").headline == "train"
    assert recipes.get("parenthesis-100/gru").steps // recipes.get("parenthesis-100/gru").log_every == 200
    assert recipes.get("adding-200/gru").headline == "test"
    assert (recipes.get("ptb-char/gru").headline, recipes.get("ptb-char/gru").select) == ("test", "valid")


def test_the_ablations_hold_one_thing_against_another() -> None:
    groups = recipes.groups()
    assert all(name in recipes.names() for group in groups.values() for name in group)
    for length in (100, 200):
        task = f"parenthesis-{length}"
        for ablation, fields in {
            "inverse": {"model.inverse", "model.order", "model.reset_every"},
            "matrices": {"model.orthogonal"},
            "cadence": {"model.reset_every"},
            "negatives": {"model.negatives"},
        }.items():
            first, *others = (recipes.get(name) for name in groups[f"{task}/{ablation}"])
            for other in others:
                changed = {field for field, _, _ in first.difference(other)} - {"name", "note"}
                assert {field for field in changed if not field.startswith("paper")} <= fields, other.name
                assert changed
        subsets = {recipes.get(name).model.orthogonal for name in groups[f"{task}/matrices"]}
        assert subsets == {"r", "u", "c", "ru", "rc", "uc", "ruc"}
        counts = [recipes.get(name).model.negatives for name in groups[f"{task}/negatives"]]
        assert counts == [40, 0, 7, 14, 28, 42]


@pytest.mark.parametrize("name", recipes.names())
def test_json_gives_an_equal_recipe_back(name: str) -> None:
    for recipe in (recipes.get(name), recipes.get(f"{name}@quick")):
        assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("name", recipes.names())
def test_quick_is_smaller_and_says_so(name: str) -> None:
    recipe, quick = recipes.get(name), recipes.get(f"{name}@quick")
    assert quick.name == f"{name}@quick"
    assert quick.quick() is quick
    assert quick.steps < recipe.steps
    assert quick.paper is None
    assert "Quick" in quick.note
    assert quick.optimizer == recipe.optimizer
    assert getattr(quick.task, "length", 0) <= 100
    assert getattr(quick.task, "bptt", 0) <= 50
    if not recipe.task.token_inputs:
        quick.task.source("test", batch_size=quick.eval_batch_size)
        assert quick.model == recipe.model


@pytest.mark.parametrize("name", recipes.names())
def test_measurements_see_the_drift_before_an_exact_inverse(name: str) -> None:
    for recipe in (recipes.get(name), recipes.get(f"{name}@quick")):
        every, reset = recipe.measure_every, recipe.model.reset_every
        if every is not None and reset is not None:
            updates_since = {step % reset for step in range(every, recipe.steps, every)}
            assert max(updates_since) >= 0.9 * (reset - 1)


@pytest.mark.parametrize("name", recipes.names())
def test_notes_say_what_a_variant_is(name: str) -> None:
    recipe = recipes.get(name)
    assert recipe.name == name
    assert recipe.note or "@" not in name
    assert recipe.note == recipe.note.strip()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40, encoding="utf-8")
    return path


def reduced(recipe: Recipe, text: Path) -> Recipe:
    """The recipe at sizes that take milliseconds; everything else as it is."""
    model = recipe.model
    sizes = tuple(min(size, 8 + k) for k, size in enumerate(reversed(model.hidden_sizes)))[::-1]
    small = replace(
        model,
        hidden_sizes=sizes,
        embedding=None if model.embedding is None else sizes[-1],
        negatives=None if model.negatives is None else min(model.negatives, 3),
    )
    if isinstance(recipe.task, LanguageTask):
        return replace(recipe, model=small, task=OwnText(recipe.task.unit, bptt=6, train=str(text)), batch_size=4)
    return replace(recipe.with_settings({"length": "6"}), model=small, batch_size=4)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_takes_two_steps(name: str, text: Path) -> None:
    recipe = reduced(recipes.get(name), text)
    model = build_model(recipe)
    source = recipe.task.source("train", batch_size=recipe.batch_size)
    optimizers = Optimizers(recipe.optimizer, model.skew_parameters(), model.other_parameters(), torch.device("cpu"))
    before = {key: value.clone() for key, value in model.named_parameters()}
    state = None
    for step in range(2):
        batch = source.batch(step)
        output = model(batch.inputs, state if source.continues(step) else None)
        loss = recipe.task.loss(output.outputs, batch.targets)
        for parameter in model.parameters():
            parameter.grad = None
        (loss if output.penalty is None else loss + output.penalty).backward()
        optimizers.step()
        state = tuple(part.detach() for part in output.state)
        assert torch.isfinite(loss)
    for key, value in model.named_parameters():
        assert torch.equal(value, before[key]) != value.requires_grad, key
        assert torch.isfinite(value).all()


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="'parenthesis-100/nc-gru-c'"):
        recipes.get("parenthesis-100/ncgru-c")
    with pytest.raises(ValueError, match="did you mean 'denoise-200'"):
        recipes.find("denois-200")


def test_find_takes_tasks_and_patterns() -> None:
    assert {recipe.name for recipe in recipes.find("copying-*/goru")} == {"copying-1000/goru", "copying-2000/goru"}
    assert [recipe.name for recipe in recipes.find("adding-200")] == [
        *(f"adding-200/{row}" for row in (*ROWS, "nc-gru-ruc", "cho-gru")),
        "adding-200/scornn@own",
    ]
    assert [recipe.name for recipe in recipes.find("adding-200/gru@quick")] == ["adding-200/gru@quick"]
    (one,) = recipes.find("adding-400/lstm")
    assert one is recipes.get("adding-400/lstm")
