"""Which backend runs the recurrence, and why not the others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ParamSpec

import torch

from .. import _checks
from .cuda import gpu
from .reference import NONLINEARITIES, RESETS

BACKENDS = ("reference", "cuda")

_P = ParamSpec("_P")


class BackendUnavailableError(RuntimeError):
    """The backend that was asked for by name cannot run this."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend, and the account of choosing it.

    Attributes:
        name: the backend that runs.
        reason: why this one, in a sentence.
        refused: what speaks against each of the others.
    """

    name: str
    reason: str
    refused: Mapping[str, str] = field(default_factory=dict)


def available_backends() -> tuple[str, ...]:
    """Names of the backends that this installation can run, the preferred one first."""
    if torch.cuda.is_available() and _why_not_gpu(torch.cuda.current_device()) is None:
        return ("cuda", "reference")
    return ("reference",)


def resolve_backend(
    request: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    hidden_size: int,
    reset: str = "before",
    nonlinearity: str = "modrelu",
) -> BackendChoice:
    """Choose the backend for a recurrence of this kind; what is asked for by name runs or raises.

    Args:
        request: "auto", or a backend's name.
        device: where the tensors are.
        dtype: the dtype of the projected input.
        hidden_size: H.
        reset: "before", "after" or "none".
        nonlinearity: "modrelu", "tanh" or "relu".

    Raises:
        ValueError: `request`, `reset` or `nonlinearity` is not a known name, or there is no such device or size.
        TypeError: an argument is of the wrong type, or `dtype` is not a floating-point one.
        BackendUnavailableError: the backend exists but cannot run this; the message says what is missing.
    """
    _checks.one_of("backend", request, ("auto", *BACKENDS))
    _checks.one_of("reset", reset, RESETS)
    _checks.one_of("nonlinearity", nonlinearity, NONLINEARITIES)
    _checks.weight_dtype(dtype)
    if not isinstance(hidden_size, torch.SymInt):  # torch.export's; torch.compile's passes for an int until it is used
        hidden_size = operator.index(
            _checks.positive_int("hidden_size", hidden_size, "pass the number of hidden units")
        )
    place = _place(device)
    missing = _why_not_cuda(place.type, place.index, dtype, hidden_size, reset)
    if request == "reference" or (request == "auto" and missing is not None):
        reason = "asked for by name" if request == "reference" else "the only backend that can run here"
        refused = {"cuda": missing or "another backend was asked for"}
        return BackendChoice("reference", f"{reason}; plain torch, runs on every device", refused)
    if missing is not None:
        raise BackendUnavailableError(
            f"backend {request!r} cannot run a recurrence on {place} (hidden_size={hidden_size}, "
            f"{dtype}, reset={reset!r}, nonlinearity={nonlinearity!r}): {missing}; "
            f"pass backend='auto' or one of {', '.join(map(repr, available_backends()))}"
        )
    reason = "asked for by name" if request == "cuda" else "the fastest here"
    how = _how_cuda(place.index, dtype, hidden_size, reset)
    return BackendChoice("cuda", f"{reason}; {how}", {"reference": "plain torch is slower on a GPU"})


def _place(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device must be a torch.device or its name, got {device!r}; pass for example 'cpu'"
        ) from error


def _constant(function: Callable[_P, str | None]) -> Callable[_P, str | None]:
    """Let torch.compile take a result as it is: it depends on the machine alone.

    `torch.compiler.assume_constant_result` does no more, but it imports all of torch's compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def _why_not_cuda(device_type: str, index: int | None, dtype: torch.dtype, hidden_size: int, reset: str) -> str | None:
    if device_type != "cuda":
        return f"it runs on CUDA devices, and the tensors are on {device_type!r}; move them with .to('cuda')"
    missing = gpu.why_not_this(dtype, hidden_size) or _why_not_gpu(index)
    return missing or gpu.why_not_there(_number(index), dtype, hidden_size, reset)


@_constant
def _how_cuda(index: int | None, dtype: torch.dtype, hidden_size: int, reset: str) -> str | None:
    return gpu.how(_number(index), dtype, hidden_size, reset)


def _why_not_gpu(index: int | None) -> str | None:
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no CUDA device"
    return gpu.why_not(_number(index))


def _number(index: int | None) -> int:
    return torch.cuda.current_device() if index is None else index
