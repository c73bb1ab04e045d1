"""Nested states, such as an optimiser's, as named tensors and JSON, and back bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ncgru.lab.errors import CheckpointError

DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)
"""What a checkpoint can hold."""


def flatten(state: object, prefix: str) -> tuple[dict[str, Tensor], Any]:
    """Take a state apart into tensors and a structure that JSON can hold.

    Scalars and strings stand in the structure as they are, lists as lists; everything else has a tag of its own:
    `{"tensor": name}`, `{"tuple": [...]}`, `{"dict": [[key, value], ...]}` (keys may be numbers or tuples then).

    Args:
        state: dicts, lists, tuples, tensors, str, int, float, bool and None in any nesting, such as
            `module.state_dict()` or `optimizer.state_dict()`.
        prefix: begins the names of the tensors; different states need different ones to share a checkpoint.

    Returns:
        The tensors by name (the same memory as in `state`), and the structure.

    Raises:
        TypeError: if something else lies in `state`; the text says where.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _take_apart(state, prefix, tensors)


def unflatten(tensors: Mapping[str, Tensor], structure: object) -> Any:
    """Put a state together from what `flatten` returned; dicts come back as plain dicts in the same order.

    Raises:
        CheckpointError: if the structure is not one that `flatten` makes, or a tensor is missing.
    """
    try:
        return _put_together(tensors, structure)
    except RecursionError:
        raise CheckpointError("the structure of a state is nested too deeply; the checkpoint is damaged") from None


def random_state() -> dict[str, Any]:
    """The states of torch's global generators, of the CPU and of each CUDA device, for `flatten`."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return {"cpu": torch.get_rng_state(), "cuda": {index: torch.cuda.get_rng_state(index) for index in devices}}


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set torch's global generators as `random_state` found them; a device that is no longer there is passed over."""
    torch.set_rng_state(state["cpu"])
    for index, value in state["cuda"].items():
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, index)


def _take_apart(value: object, place: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Tensor):
        name = _free_name(place, tensors)
        tensors[name] = _checked(value, place)
        return {"tensor": name}
    if isinstance(value, Mapping):
        pairs = [
            [_take_apart(key, place, tensors), _take_apart(item, f"{place}.{key}", tensors)]
            for key, item in value.items()
        ]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        items = [_take_apart(item, f"{place}.{index}", tensors) for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    raise TypeError(
        f"{place} must be a tensor, number, string, None, dict, list or tuple, got {type(value).__name__}; "
        "a checkpoint can hold nothing else"
    )


def _checked(value: Tensor, place: str) -> Tensor:
    if value.layout != torch.strided or value.dtype not in DTYPES:
        raise TypeError(
            f"{place} must be a dense tensor of a common dtype, got {value.layout}, {value.dtype}; convert it"
        )
    return value


def _free_name(place: str, tensors: Mapping[str, Tensor]) -> str:
    # {"a": {"b": x}, "a.b": y} gives two tensors the same place; the structure knows which is which.
    name, number = place, 2
    while name in tensors:
        name, number = f"{place}~{number}", number + 1
    return name


def _put_together(tensors: Mapping[str, Tensor], structure: object) -> Any:
    match structure:
        case None | bool() | int() | float() | str():
            return structure
        case list():
            return [_put_together(tensors, item) for item in structure]
        case {"tensor": str(name), **rest} if not rest and name in tensors:
            return tensors[name]
        case {"tuple": list(items), **rest} if not rest:
            return tuple(_put_together(tensors, item) for item in items)
        case {"dict": list(pairs), **rest} if not rest and all(isinstance(p, list) and len(p) == 2 for p in pairs):
            return {_key(tensors, key): _put_together(tensors, item) for key, item in pairs}
    raise CheckpointError(f"the structure of a state is not one that can be read, at {str(structure)[:80]!r}")


def _key(tensors: Mapping[str, Tensor], structure: object) -> Any:
    key = _put_together(tensors, structure)
    try:
        hash(key)
    except TypeError:
        raise CheckpointError(f"the structure of a state has a {type(key).__name__} as a key; it is damaged") from None
    return key
