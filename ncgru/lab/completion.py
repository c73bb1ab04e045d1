"""What the tab key offers: each function gives the words that may stand where `incomplete` is being typed."""

from __future__ import annotations

import typer


def recipe(incomplete: str) -> list[str]:
    from ncgru.lab import recipes

    return [name for name in recipes.names() if name.startswith(incomplete)]


def task(incomplete: str) -> list[str]:
    return sorted({name.partition("/")[0] for name in recipe(incomplete)})


def models(ctx: typer.Context, incomplete: str) -> list[str]:
    """The models of the task, behind those that are named already."""
    named, comma, last = incomplete.rpartition(",")
    found = [name.partition("/")[2] for name in recipe(f"{_first_argument(ctx)}/{last}")]
    return [f"{named}{comma}{model}" for model in found if model not in named.split(",")]


def setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """The fields of the recipe, or of the first of the task."""
    from ncgru.lab import recipes
    from ncgru.lab.recipes.settings import short_names

    known = recipe(_first_argument(ctx))
    found = short_names(recipes.get(known[0])) if known else []
    return [f"{name}=" for name in found if name.startswith(incomplete)]


def engine(incomplete: str) -> list[str]:
    from ncgru.lab.engines import ENGINES

    return [name for name in ENGINES if name.startswith(incomplete)]


def device(incomplete: str) -> list[str]:
    return [name for name in ("cpu", "cuda") if name.startswith(incomplete)]


def _first_argument(ctx: typer.Context) -> str:
    """The recipe or task of a command that is being typed; behind an option without its value it is still unparsed."""
    return next(iter(ctx.args), "") or ctx.params.get("recipe") or ctx.params.get("task") or ""
