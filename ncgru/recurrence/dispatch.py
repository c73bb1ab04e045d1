"""Which backend runs the recurrence, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .. import _checks

BACKENDS = ("reference", "cuda")


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
        ValueError: `request` is not a known name.
        BackendUnavailableError: the backend exists but cannot run this; the message says what is missing.
    """
    _checks.one_of("backend", request, ("auto", *BACKENDS))
    place = _place(device)
    refused = {"cuda": _why_not_cuda(place)}
    if request in refused:
        raise BackendUnavailableError(
            f"backend {request!r} cannot run a recurrence on {place} (hidden_size={hidden_size}, "
            f"{dtype}, reset={reset!r}, nonlinearity={nonlinearity!r}): {refused[request]}; "
            f"pass backend='auto' or one of {', '.join(map(repr, available_backends()))}"
        )
    reason = "asked for by name" if request == "reference" else "the only backend that can run here"
    return BackendChoice("reference", f"{reason}; plain torch, runs on every device", refused)


def _place(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device must be a torch.device or its name, got {device!r}; pass for example 'cpu'"
        ) from error


def _why_not_cuda(device: torch.device) -> str:
    missing = "this version of ncgru contains no CUDA kernels"
    return missing if device.type == "cuda" else f"{missing}, and the tensors are on {device.type!r}, not on a GPU"
