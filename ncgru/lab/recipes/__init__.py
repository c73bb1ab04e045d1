"""Recipes: one for every number of the paper's tables, for each ablation, and for the readings in between.

A name is `task/model`, such as `adding-200/nc-gru-c`; `@` marks a variant, and `@quick` at the end its smaller form.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools

from ncgru.lab.recipes.quick import MARK as QUICK
from ncgru.lab.recipes.recipe import ModelSpec, OptimizerSpec, PaperNumber, Recipe

__all__ = ["ModelSpec", "OptimizerSpec", "PaperNumber", "Recipe", "find", "get", "groups", "names"]


def get(name: str) -> Recipe:
    """The recipe called `name`; `@quick` at the end gives its quick form.

    Raises:
        ValueError: there is none; the nearest names are in the message.
    """
    base = name.removesuffix(QUICK)
    known = _registry()
    if base not in known:
        near = difflib.get_close_matches(base, known, n=3)
        advice = f"did you mean {' or '.join(map(repr, near))}?" if near else "see `ncgru list` for all"
        raise ValueError(f"recipe must be a known name, got {name!r}; {advice}")
    return known[base].quick() if name.endswith(QUICK) else known[base]


def names() -> tuple[str, ...]:
    """The names of all recipes, without the quick forms."""
    return tuple(_registry())


def find(pattern: str) -> tuple[Recipe, ...]:
    """The recipes whose names match a shell pattern such as `adding-*/gru`, or begin with `pattern` and a slash.

    With `@quick` at the end of the pattern, their quick forms.

    Raises:
        ValueError: none does.
    """
    base = pattern.removesuffix(QUICK)
    found = [name for name in names() if fnmatch.fnmatchcase(name, base) or name.startswith(f"{base.rstrip('/')}/")]
    if not found:
        tasks = sorted({name.partition("/")[0] for name in names()})
        near = difflib.get_close_matches(base, [*tasks, *names()], n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"the tasks are {', '.join(tasks)}"
        raise ValueError(f"no recipe matches {pattern!r}; {advice}")
    return tuple(get(name + pattern[len(base) :]) for name in found)


def groups() -> dict[str, tuple[str, ...]]:
    """Recipes that are held against each other in the ablations, by the ablation's name."""
    from ncgru.lab.recipes import parenthesis

    return {name: group for length in parenthesis.LENGTHS for name, group in parenthesis.groups(length).items()}


@functools.cache
def _registry() -> dict[str, Recipe]:
    from ncgru.lab.recipes import adding, copying, denoise, parenthesis, penn, text

    known: dict[str, Recipe] = {}
    for family in (parenthesis, denoise, adding, copying, penn, text):
        for recipe in family.recipes():
            assert recipe.name not in known
            known[recipe.name] = recipe
    return known
