"""A pass by kernels beside the reference, in float64 and in the dtype of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ncgru.recurrence import reference
from ncgru.recurrence.cuda import passes
from ncgru.recurrence.cuda.kind import Kind
from ncgru.recurrence.cuda.operator import backward_on, forward_on

NAMES = ("hidden", "d_projected", "d_initial", "d_weight", "d_threshold")


@dataclass(frozen=True)
class Problem:
    """Random inputs of a recurrence, D directions at once; padding beyond `lengths` is NaN."""

    kind: Kind
    reverse: bool
    projected: Tensor  # [T, B, D, G*H]
    initial: Tensor  # [D, B, H]
    weight: Tensor  # [D, G*H, H]
    threshold: Tensor | None  # [D, H]
    lengths: Tensor | None  # [B]
    grad_hidden: Tensor  # [T, B, D, H]


def problem(
    kind: Kind,
    steps: int,
    batch: int,
    directions: int = 1,
    *,
    ragged: bool = False,
    reverse: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    rows, size = kind.gates * kind.hidden, kind.hidden
    projected = normal(steps, batch, directions, rows)
    lengths = None
    if ragged:
        lengths = torch.randint(0, steps + 1, (batch,), generator=generator, device=device)
        over = torch.arange(steps, device=device)[:, None] >= lengths
        projected[over] = torch.nan
    return Problem(
        kind,
        reverse,
        projected.to(getattr(torch, kind.storage)),
        normal(directions, batch, size),
        normal(directions, rows, size) / size**0.5,
        0.1 * normal(directions, size) if kind.nonlinearity == "modrelu" else None,
        lengths,
        normal(steps, batch, directions, size),
    )


def by_kernels(machine: passes.Machine, x: Problem) -> dict[str, Tensor]:
    """Results with D in front: hidden [D, T, B, H], ..."""
    arguments = (x.projected.flatten(2), x.initial, x.weight, x.threshold, x.lengths, x.reverse)
    hidden, gates = forward_on(machine, x.kind, *arguments)
    found = backward_on(
        machine, x.kind, x.grad_hidden.flatten(2), x.initial, x.weight, x.lengths, hidden, gates, x.reverse
    )
    hidden, d_projected = (y.unflatten(2, (len(x.initial), -1)).movedim(2, 0) for y in (hidden, found[0]))
    return dict(zip(NAMES, (hidden, d_projected, *found[1:]), strict=True))


def by_reference(x: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same in `dtype`; in float64 with no rounding of operands."""
    exact = dtype == torch.float64
    results = []
    for d in range(len(x.initial)):
        projected = x.projected[:, :, d].to(dtype) if exact else x.projected[:, :, d]
        initial, weight, grad = (y.to(dtype) for y in (x.initial[d], x.weight[d], x.grad_hidden[:, :, d]))
        threshold = None if x.threshold is None else x.threshold[d].to(dtype)
        settings = x.kind.reset, x.kind.nonlinearity, d == 1 if len(x.initial) == 2 else x.reverse
        hidden, gates = reference.forward(projected, initial, weight, threshold, x.lengths, *settings)
        found = reference.backward(grad, initial, weight, x.lengths, hidden, gates, projected.dtype, *settings)
        results.append((hidden, *found))
    return {name: torch.stack(parts) for name, parts in zip(NAMES, zip(*results, strict=True), strict=True)}


def excess(machine: passes.Machine, x: Problem, least: float) -> dict[str, tuple[float, float]]:
    """Where the kernels err by more than twice what the reference does in their dtype: (their error, its error).

    Errors are relative to the norm of the float64 result; one below `least` always passes.
    """
    exact, plain, found = by_reference(x, torch.float64), by_reference(x, torch.float32), by_kernels(machine, x)
    wrong = {}
    for name in NAMES[: 5 if x.kind.nonlinearity == "modrelu" else 4]:
        norm = exact[name].norm().item() + 1e-30
        mine = (found[name].double() - exact[name]).norm().item() / norm
        its = (plain[name].double() - exact[name]).norm().item() / norm
        if not mine <= max(2 * its, least):  # NaN is wrong
            wrong[name] = (mine, its)
    return wrong
