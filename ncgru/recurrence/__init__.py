"""The time loop of all recurrent modules: one operation, with backends of one signature."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from . import operator as operator  # registers the operators, as the next one does
from .cuda import operator as cuda_operator  # noqa: F401
from .dispatch import BackendChoice, BackendUnavailableError, available_backends, resolve_backend
from .reference import NONLINEARITIES, RESETS, unrolled

__all__ = [
    "NONLINEARITIES",
    "RESETS",
    "BackendChoice",
    "BackendUnavailableError",
    "available_backends",
    "recurrence",
    "recurrence_with_gates",
    "resolve_backend",
    "unrolled",
]

_HALF = (torch.float16, torch.bfloat16)
_DTYPES = (torch.float32, torch.float64, *_HALF)


def recurrence(
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    reset: str = "before",
    nonlinearity: str = "modrelu",
    reverse: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Run a gated or plain recurrence over a whole sequence.

    With s the logistic function, phi the nonlinearity and p = `projected`:

        before:  r = s(p_r + W_r h),  u = s(p_u + W_u h),  c = phi(p_c + W_c (r*h)),  h' = (1-u)*h + u*c
        after:   the same with c = phi(p_c + r*(W_c h))
        none:    h' = phi(p_c + W_c h)

    Args:
        projected: [T, B, G*H], the projected input with all additive biases; G = 3 (rows r, u, c), or 1 for "none".
            float16 and bfloat16 round the operands of the products, while sums and state stay float32.
        initial: [B, H], the state before the first step.
        weight: [G*H, H], rows in the order r, u, c.
        threshold: [H], b of modReLU sign(z) * max(|z| + b, 0); None is 0. Must be None for other nonlinearities.
        lengths: [B] int64. Row b runs at steps t < lengths[b] and holds its state at the others; None runs all steps.
        reset: where r acts: "before" or "after" the product with W_c, or "none" for no gates at all.
        nonlinearity: "modrelu", "tanh" or "relu".
        reverse: run from t = T-1 down to 0, in the same layout.
        backend: "auto", or a name of `available_backends()`.

    Returns:
        hidden [T, B, H]: the state after each step (float32, or float64 if `projected` is).

    Raises:
        ValueError: a shape or a name is wrong, or T = 0.
        TypeError: an argument is no tensor, or dtypes or devices do not go together.
        BackendUnavailableError: the backend asked for by name cannot run this.
    """
    return recurrence_with_gates(
        projected,
        initial,
        weight,
        threshold,
        lengths,
        reset=reset,
        nonlinearity=nonlinearity,
        reverse=reverse,
        backend=backend,
    )[0]


def recurrence_with_gates(
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    reset: str = "before",
    nonlinearity: str = "modrelu",
    reverse: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """As `recurrence`, and the activated gates too.

    Returns:
        hidden [T, B, H], and gates [T, B, G*H]: r, u, c after their nonlinearities, for looking at: no gradient flows
        through them. Where a sequence is over, u is 0 and the others mean nothing. The "cuda" backend gives the gates
        in the dtype of `projected`.
    """
    _checks.one_of("reset", reset, RESETS)
    _checks.one_of("nonlinearity", nonlinearity, NONLINEARITIES)
    _checks.flag("reverse", reverse)
    _check_tensors(projected, initial, weight, threshold, lengths)
    _check_shapes(projected, initial, weight, threshold, lengths, reset)
    _checks.reverse_mode(projected, initial, weight, threshold)
    if threshold is not None and nonlinearity != "modrelu":
        raise ValueError(f"threshold must be None with nonlinearity={nonlinearity!r}; add a bias to projected instead")
    choice = resolve_backend(
        backend,
        device=projected.device,
        dtype=projected.dtype,
        hidden_size=initial.shape[1],
        reset=reset,
        nonlinearity=nonlinearity,
    )
    if choice.name == "cuda":
        one = None if threshold is None else threshold.unsqueeze(0)
        hidden, gates = torch.ops.ncgru.recurrence_cuda(
            projected, initial.unsqueeze(0), weight.unsqueeze(0), one, lengths, reset, nonlinearity, reverse
        )
    else:
        hidden, gates = torch.ops.ncgru.recurrence(
            projected, initial, weight, threshold, lengths, reset, nonlinearity, reverse
        )
    return hidden, gates


def _check_tensors(
    projected: Tensor, initial: Tensor, weight: Tensor, threshold: Tensor | None, lengths: Tensor | None
) -> None:
    """Types, dtypes and devices."""
    _checks.tensor("projected", projected, "pass the projected input [T, B, G*H]")
    if projected.dtype not in _DTYPES:
        raise TypeError(f"projected must be float32, float64, float16 or bfloat16, got {projected.dtype}; convert it")
    allowed = (torch.float32, projected.dtype) if projected.dtype in _HALF else (projected.dtype,)
    given = {"initial": initial, "weight": weight}
    if threshold is not None:
        given["threshold"] = threshold
    for name, value in given.items():
        _checks.tensor(name, value, "pass a tensor")
        if value.dtype not in allowed:
            names = " or ".join(map(str, allowed))
            raise TypeError(
                f"{name} must be {names} where projected is {projected.dtype}, got {value.dtype}; convert one of them"
            )
        _check_device(name, value, projected)
    if lengths is not None:
        _checks.tensor("lengths", lengths, "pass torch.tensor(lengths), or None")
        if lengths.dtype != torch.int64:
            raise TypeError(f"lengths must be torch.int64, got {lengths.dtype}; convert it with .long()")
        _check_device("lengths", lengths, projected)


def _check_device(name: str, value: Tensor, projected: Tensor) -> None:
    if value.device != projected.device:
        raise TypeError(f"{name} must be on projected's device {projected.device}, got {value.device}; move it there")


def _check_shapes(
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    reset: str,
) -> None:
    if projected.dim() != 3:
        raise ValueError(f"projected must have shape [T, B, G*H], got {tuple(projected.shape)}; reshape it")
    if initial.dim() != 2:
        raise ValueError(f"initial must have shape [B, H], got {tuple(initial.shape)}; reshape it")
    steps, batch, _ = projected.shape
    size = initial.shape[1]
    rows = size if reset == "none" else 3 * size
    if steps == 0:
        raise ValueError(f"projected must have at least one time step, got shape {tuple(projected.shape)}; pass T >= 1")
    if size == 0:
        raise ValueError(f"initial must have at least one column, got shape {tuple(initial.shape)}; pass H >= 1")
    letters = "H" if reset == "none" else "3*H"
    _checks.shape("initial", initial, (batch, size), "[B, H]")
    _checks.shape("projected", projected, (steps, batch, rows), f"[T, B, {letters}]")
    _checks.shape("weight", weight, (rows, size), f"[{letters}, H]")
    if threshold is not None:
        _checks.shape("threshold", threshold, (size,), "[H]")
    if lengths is not None:
        _checks.shape("lengths", lengths, (batch,), "[B]")
