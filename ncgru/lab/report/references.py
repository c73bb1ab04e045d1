"""What a run is compared with: its task's trivial and irreducible loss, and the recipe whose name it bears."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ncgru.lab import recipes
from ncgru.lab.recipes import Recipe

NOT_SETTINGS = frozenset({"format", "name", "seeds", "note", "paper", "checkpoint_every", "measure_every"})
"""Fields of a recipe that change nothing in the losses of a seed."""


QUICK = "@quick"
"""Ends the name of a recipe that was made smaller."""


class References(NamedTuple):
    """Values that the files of a run need not hold, as the recipes of this installation give them.

    Attributes:
        trivial_loss: loss of the best network that ignores its inputs; None if not known here.
        irreducible_loss: smallest expected loss of any network; None if nobody knows.
        differences: (field, value here, value there) against the named recipe; None if there is no such recipe.
    """

    trivial_loss: float | None
    irreducible_loss: float | None
    differences: tuple[tuple[str, Any, Any], ...] | None


def references(recipe: Mapping[str, Any]) -> References:
    """What this installation knows of a recipe that a run was made with; never raises for a recipe it cannot read."""
    trivial, irreducible = _losses(json.dumps(recipe, sort_keys=True))
    return References(trivial, irreducible, differences(recipe))


def differences(recipe: Mapping[str, Any]) -> tuple[tuple[str, Any, Any], ...] | None:
    """Settings (field, value here, value there) in which it differs from the recipe of its name, None if unknown."""
    named = _named(str(recipe.get("name", "")))
    if named is None:
        return None
    mine, theirs = flat(recipe), flat(named.to_dict())
    names = [name for name in [*mine, *(name for name in theirs if name not in mine)] if setting(name)]
    return tuple(
        (name, mine.get(name), theirs.get(name))
        for name in names
        if mine.get(name) != theirs.get(name) or (name in mine) != (name in theirs)
    )


def setting(name: str) -> bool:
    """Whether the field with this dotted path has a part in what a seed computes."""
    return name.partition(".")[0] not in NOT_SETTINGS


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted paths for keys; tuples as lists, as JSON has them."""
    fields: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            fields.update(flat(inner, f"{prefix}{key}."))
        else:
            fields[f"{prefix}{key}"] = list(inner) if isinstance(inner, tuple) else inner
    return fields


def _named(name: str) -> Recipe | None:
    try:
        return recipes.get(name.removesuffix(QUICK)).quick() if name.endswith(QUICK) else recipes.get(name)
    except (ValueError, KeyError):
        return None


# A language task counts the words of its text for this, which need not be done again for every seed.
@functools.cache
def _losses(recipe: str) -> tuple[float | None, float | None]:
    try:
        task = Recipe.from_dict(json.loads(recipe)).task
        return float(task.trivial_loss), task.irreducible_loss
    # A recipe of another version, or a text that is not on this machine.
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        return None, None
