"""Checks of arguments at the public boundary: each error names the argument, the rule, the value and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def positive_int(name: str, value: object, advice: str) -> int:
    """Return `value` if it is an integer of at least 1, else raise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}; {advice}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}; {advice}")
    return value


def flag(name: str, value: object) -> bool:
    """Return `value` if it is a bool, else raise: a truthy slip such as `bias=16` is an argument in the wrong place."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__} {value!r}; check the argument order")
    return value


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """Return `value` if it is one of `choices`, else raise with the nearest of them."""
    known = tuple(choices)
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, one of {', '.join(map(repr, known))}, got {value!r}; pass one of these")
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        advice = f"did you mean {near[0]!r}?" if near else "pass one of these"
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}; {advice}")
    return value


def probability(name: str, value: object) -> float:
    """Return `value` if it is a number in [0, 1], else raise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number from 0 to 1, got {value!r}; pass the share of units to drop")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {value}; pass the share of units to drop")
    return float(value)


def tensor(name: str, value: object, advice: str) -> Tensor:
    """Return `value` if it is a tensor, else raise."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}; {advice}")
    return value


def shape(name: str, value: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """Raise unless `value` has exactly the shape `expected`; `meaning` spells the shape in words."""
    if tuple(value.shape) != expected:
        raise ValueError(f"{name} must have shape {meaning} = {expected}, got {tuple(value.shape)}; reshape it")


def reverse_mode(*values: Tensor | None) -> None:
    """Raise under forward-mode differentiation, in which PyTorch would take the derivative of our operations for 0."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(value is not None and forward_ad.unpack_dual(value).tangent is not None for value in values):
        raise NotImplementedError(
            "forward-mode derivatives (torch.func.jvp, torch.func.jacfwd, forward_ad) do not go through ncgru's "
            "operations; use torch.autograd.functional.jvp, which takes them by the backward"
        )


def device(value: torch.device | str | int | None) -> torch.device:
    """The device that parameters are made on, which must be there; None is PyTorch's default."""
    if value is None:
        return torch.empty(0).device
    try:
        chosen = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch.device or its name, got {value!r}; pass for example 'cpu'") from error
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:  # what PyTorch raises depends on how it was built
        raise ValueError(
            f"device must be one that this machine has, got {value!r}, which PyTorch cannot use here; use 'cpu'"
        ) from error
    return chosen


def weight_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """The floating dtype that parameters are made in; None is PyTorch's default."""
    chosen = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise TypeError(
            f"dtype must be a floating-point torch.dtype, got {dtype!r}; use torch.float32 or torch.float64"
        )
    return chosen
