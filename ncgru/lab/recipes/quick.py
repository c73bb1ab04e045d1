"""Smaller runs of the same kind, for a look on a CPU."""

from __future__ import annotations

from dataclasses import replace

from ncgru.lab.recipes.recipe import ModelSpec, Recipe
from ncgru.lab.tasks import Adding, Copying, Denoise, Parenthesis, Task
from ncgru.lab.tasks.language import LanguageTask

MARK = "@quick"


def quick(recipe: Recipe) -> Recipe:
    """See `Recipe.quick`."""
    if recipe.name.endswith(MARK):
        return recipe
    steps = min(recipe.steps, _steps(recipe.task))
    every = max(1, steps // 60)
    return replace(
        recipe,
        name=recipe.name + MARK,
        task=_smaller_task(recipe.task),
        model=_smaller_model(recipe.model),
        steps=steps,
        batch_size=min(recipe.batch_size, 32),
        log_every=every,
        eval_every=None if recipe.eval_every is None else 5 * every,
        eval_batch_size=min(recipe.eval_batch_size, 10 if recipe.task.token_inputs else 100),
        eval_batches=min(recipe.eval_batches or 2, 2),
        # One more, so that measurements meet every phase between two exact inverses.
        measure_every=None if recipe.measure_every is None else every + 1,
        checkpoint_every=10 * every,
        seeds=recipe.seeds[:1],
        paper=None,
        note=f"{recipe.note} Quick: shorter and smaller, not comparable with the paper.".strip(),
    )


def _steps(task: Task) -> int:
    """As many as show what a model can do in a minute or so."""
    if isinstance(task, LanguageTask):
        return 600 if task.unit == "character" else 200
    return 3200 if isinstance(task, Parenthesis) else 1500


def _smaller_task(task: Task) -> Task:
    if isinstance(task, Parenthesis):
        return replace(task, length=min(task.length, 100))
    if isinstance(task, (Adding, Copying, Denoise)):
        return replace(task, length=min(task.length, 50), test_size=1000)
    if isinstance(task, LanguageTask):
        return replace(task, bptt=min(task.bptt, 50))
    return task


def _smaller_model(model: ModelSpec) -> ModelSpec:
    """Language models with at most 128 units; the others are small already."""
    if model.embedding is None:
        return model
    sizes = tuple(min(size, 128) for size in model.hidden_sizes)
    return replace(
        model,
        hidden_sizes=sizes,
        embedding=min(model.embedding, 128),
        negatives=None if model.negatives is None else min(model.negatives, 32),
    )
