"""Frozen dataclasses as JSON and back, exactly, led by their annotations."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from typing import Any

from ncgru.lab import tasks
from ncgru.lab.tasks import Task

TASKS: dict[str, type[Task]] = {
    cls.__name__: cls
    for cls in vars(tasks).values()
    if isinstance(cls, type) and issubclass(cls, Task) and cls is not Task
}
"""The tasks by the name that stands for them in JSON, under the key `kind`."""


def encode(value: Any) -> Any:
    """A dataclass, or a value of one of its fields, as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields} if isinstance(value, Task) else fields
    return [encode(item) for item in value] if isinstance(value, tuple) else value


def decode(annotation: Any, value: Any, name: str) -> Any:
    """The value of type `annotation` that `encode` has made `value` of, else raise ValueError with `name` in it."""
    choices = alternatives(annotation)
    if value is None:
        if type(None) in choices:
            return None
        raise ValueError(f"{name} must not be null; give it a value")
    (kind,) = [choice for choice in choices if choice is not type(None)]
    if kind is Task:
        return _decode_task(value, name)
    if dataclasses.is_dataclass(kind):
        return _decode_fields(typing.cast(type, kind), value, name)
    if typing.get_origin(kind) is tuple:
        return _decode_tuple(kind, value, name)
    # JSON writes 1.0 as it is but people write 1; bool is an int to Python and no number to us.
    wanted = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}; correct the description")
    return kind(value)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type."""
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if union else (annotation,)


def item_annotations(kind: Any, count: int, name: str) -> tuple[Any, ...]:
    """The annotations of the items of a tuple type that shall have `count` items, else raise ValueError."""
    items = typing.get_args(kind)
    if len(items) == 2 and items[1] is Ellipsis:
        return (items[0],) * count
    if len(items) != count:
        raise ValueError(f"{name} must have {len(items)} items, got {count}; give all of them")
    return items


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """The fields of a dataclass with their types."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def flatten(description: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in description.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _decode_task(value: Any, name: str) -> Any:
    kind = value.get("kind") if isinstance(value, dict) else None
    if kind not in TASKS:
        raise ValueError(f"{name}.kind must be one of {', '.join(TASKS)}, got {kind!r}; correct the description")
    return _decode_fields(TASKS[kind], {key: item for key, item in value.items() if key != "kind"}, name)


def _decode_fields(cls: type, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object with the fields of {cls.__name__}, got {value!r}")
    known = field_types(cls)
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise ValueError(f"{name} has no field {key!r}; {advice}")
    missing = [key for key in known if key not in value]
    if missing:
        raise ValueError(f"{name} must have all fields of {cls.__name__}, {', '.join(missing)} not found; add them")
    return cls(**{key: decode(kind, value[key], f"{name}.{key}") for key, kind in known.items()})


def _decode_tuple(kind: Any, value: Any, name: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list, got {value!r}; correct the description")
    items = item_annotations(kind, len(value), name)
    return tuple(decode(item, entry, f"{name}[{k}]") for k, (item, entry) in enumerate(zip(items, value, strict=True)))
