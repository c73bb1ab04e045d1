"""`--set name=value`: a field is found by its path, its own name or an alias, and its value read by its annotation."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple, get_origin

from ncgru.lab.recipes import encoding
from ncgru.lab.recipes.recipe import Recipe

ALIASES = {
    "hidden_size": "model.hidden_sizes",
    "learning_rate": "optimizer.lr",
    "length": "task.length",
    "text": "task.train",
}
"""Names that people try first."""

_PARTS = ("task", "model", "optimizer")
_FIXED = ("paper",)
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class Field(NamedTuple):
    """A field that can be set: its dotted path and its type."""

    path: str
    annotation: Any


def fields(recipe: Recipe) -> dict[str, Field]:
    """All fields of the recipe that can be set, by their dotted path."""
    found = []
    for name, annotation in encoding.field_types(Recipe).items():
        if name in _PARTS:
            cls: type = type(getattr(recipe, name))
            part = encoding.field_types(cls)
            found += [Field(f"{name}.{leaf}", kind) for leaf, kind in part.items()]
        elif name not in _FIXED:
            found.append(Field(name, annotation))
    return {field.path: field for field in found}


def short_names(recipe: Recipe) -> list[str]:
    """For each field the shortest name that it can be set by, and the aliases."""
    known = fields(recipe)
    leaves = [path.rpartition(".")[2] for path in known]
    own = [leaf if leaves.count(leaf) == 1 else path for leaf, path in zip(leaves, known, strict=True)]
    return sorted({*own, *(alias for alias, path in ALIASES.items() if path in known)})


def apply(recipe: Recipe, settings: Mapping[str, str]) -> Recipe:
    """See `Recipe.with_settings`."""
    known = fields(recipe)
    values: dict[str, Any] = {}
    for name, text in settings.items():
        field = find(name, known, recipe)
        if field.path in values:
            raise ValueError(f"{field.path} is set twice, the second time as {name!r}; set it once")
        value = _layers(text, recipe) if name == "hidden_size" else parse(field.annotation, text, name)
        values[field.path] = value
    sizes = values.get("model.hidden_sizes")
    if "hidden_size" in settings and sizes and values.get("model.tied", recipe.model.tied):
        # The decoder is the embedding turned round, so its width is that of the last layer.
        values.setdefault("model.embedding", sizes[-1])
    changed = {path: value for path, value in values.items() if value != _value(recipe, path)}
    if not changed:
        return recipe
    words = ", ".join(f"{path}={value}" for path, value in changed.items() if path != "note")
    note = changed.pop("note", recipe.note)
    changes: dict[str, Any] = {path: value for path, value in changed.items() if "." not in path}
    for part in _PARTS:
        leaves = {path.removeprefix(f"{part}."): v for path, v in changed.items() if path.startswith(f"{part}.")}
        if leaves:
            changes[part] = dataclasses.replace(getattr(recipe, part), **leaves)
    return dataclasses.replace(recipe, **changes, note=f"{note} Changed: {words}.".strip() if words else note)


def parse(annotation: Any, text: str, name: str) -> Any:
    """The value of type `annotation` that `text` stands for, else raise ValueError with `name` in it."""
    choices = encoding.alternatives(annotation)
    if type(None) in choices and text.strip().lower() in ("none", "null", ""):
        return None
    (kind,) = [choice for choice in choices if choice is not type(None)]
    if get_origin(kind) is tuple:
        items = [item for item in text.strip().strip("()[]").replace(" ", "").split(",") if item]
        kinds = encoding.item_annotations(kind, len(items), name)
        return tuple(parse(item, entry, name) for item, entry in zip(kinds, items, strict=True))
    if kind is bool:
        if text.strip().lower() not in _BOOLS:
            raise ValueError(f"{name} must be true or false, got {text!r}; pass one of these")
        return _BOOLS[text.strip().lower()]
    try:
        return kind(text)
    except ValueError as error:
        example = {int: "a whole number such as 64", float: "a number such as 3e-4"}[kind]
        none = " (or none)" if type(None) in choices else ""
        raise ValueError(f"{name} must be {example}{none}, got {text!r}; correct the value") from error


def find(name: str, known: Mapping[str, Field], recipe: Recipe) -> Field:
    """The field called `name`, by path, alias or its own name, else raise ValueError."""
    path = ALIASES.get(name, name)
    if path in known:
        return known[path]
    candidates = [field for field in known.values() if field.path.rpartition(".")[2] == path]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        paths = " or ".join(field.path for field in candidates)
        raise ValueError(f"the field {name!r} is ambiguous in {recipe.name}; write {paths}")
    leaves = {field.path.rpartition(".")[2] for field in known.values()}
    near = difflib.get_close_matches(name, [*known, *sorted(leaves), *ALIASES], n=1, cutoff=0.5)
    if name in ALIASES:
        raise ValueError(f"{recipe.name} has no field {path!r}, which {name!r} stands for; leave it out")
    advice = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(known)}"
    raise ValueError(f"{recipe.name} has no field {name!r}; {advice}")


def _layers(text: str, recipe: Recipe) -> tuple[int, ...]:
    """One size for all layers, or one for each."""
    sizes: tuple[int, ...] = parse(tuple[int, ...], text, "hidden_size")
    return sizes * len(recipe.model.hidden_sizes) if len(sizes) == 1 else sizes


def _value(recipe: Recipe, path: str) -> Any:
    part, _, leaf = path.rpartition(".")
    return getattr(getattr(recipe, part) if part else recipe, leaf)
