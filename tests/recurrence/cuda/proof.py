"""Compares the kernels' forward and backward with the reference, by the measure that the reference itself keeps.

The truth is the reference in float64. A kernel may err at most twice as much as the reference in the kernel's own
precision, or a few roundings where that happens to hit the truth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ncgru.recurrence import reference
from ncgru.recurrence.cuda import passes
from ncgru.recurrence.cuda.kind import Kind
from ncgru.recurrence.cuda.operator import backward_on, forward_on

_ROUNDINGS = 8.0


@dataclass(frozen=True)
class Case:
    """A call of the recurrence.

    Attributes:
        kind: what is computed.
        steps: T.
        batch: B.
        directions: "forward", "reverse" or "both".
        lengths: whether rows end at different steps, some before the first; padding is NaN then.
    """

    kind: Kind
    steps: int
    batch: int
    directions: str = "forward"
    lengths: bool = False


@dataclass(frozen=True)
class Inputs:
    """Tensors as `passes` takes them."""

    projected: Tensor  # [T, B, D*G*H]
    initial: Tensor  # [D, B, H]
    weight: Tensor  # [D, G*H, H]
    threshold: Tensor | None  # [D, H]
    lengths: Tensor | None  # [B]
    grad_hidden: Tensor  # [T, B, D*H]


def inputs(case: Case) -> Inputs:
    kind, size = case.kind, case.kind.hidden
    directions = 2 if case.directions == "both" else 1
    random = torch.Generator().manual_seed(size + 1000 * case.batch + 7 * case.steps)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    projected = normal(case.steps, case.batch, directions * kind.gates * size)
    lengths = None
    if case.lengths:
        lengths = torch.arange(case.batch, dtype=torch.int64) * 5 % (case.steps + 1)
        projected[torch.arange(case.steps)[:, None] >= lengths] = torch.nan
    return Inputs(
        projected.to(getattr(torch, kind.storage)),
        0.5 * normal(directions, case.batch, size),
        normal(directions, kind.gates * size, size) / size**0.5,
        0.2 * normal(directions, size) if kind.nonlinearity == "modrelu" else None,
        lengths,
        normal(case.steps, case.batch, directions * size),
    )


def prove(machine: passes.Machine, case: Case) -> None:
    """Run both passes on `machine`, with NaN in all memory that nobody has written yet, and compare."""
    given = inputs(case)
    reverse = case.directions == "reverse"
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN, too
    try:
        hidden, gates = forward_on(
            machine, case.kind, given.projected, given.initial, given.weight, given.threshold, given.lengths, reverse
        )
        gradients = backward_on(
            machine, case.kind, given.grad_hidden, given.initial, given.weight, given.lengths, hidden, gates, reverse
        )
    finally:
        torch.use_deterministic_algorithms(deterministic)
    for d in range(2 if case.directions == "both" else 1):
        _compare_forward(case, given, hidden, gates, d)
        _compare_backward(case, given, hidden, gates, gradients, d)


def _of_direction(x: Tensor, d: int, count: int) -> Tensor:
    """Direction d's part [T, B, n] of [T, B, D*n]."""
    return x.chunk(count, -1)[d]


def _compare_forward(case: Case, given: Inputs, hidden: Tensor, gates: Tensor, d: int) -> None:
    kind, count = case.kind, len(given.initial)
    backwards = d == 1 or case.directions == "reverse"
    projected = _of_direction(given.projected, d, count)
    threshold = None if given.threshold is None else given.threshold[d]

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        state = torch.float64 if dtype == torch.float64 else torch.float32
        bias = None if threshold is None else threshold.to(state)
        return reference.forward(
            projected.to(dtype),
            given.initial[d].to(state),
            given.weight[d].to(state),
            bias,
            given.lengths,
            kind.reset,
            kind.nonlinearity,
            backwards,
        )

    truth, usual = run(torch.float64), run(projected.dtype)
    assert_close("hidden", _of_direction(hidden, d, count), truth[0], usual[0])
    stored = usual[1].to(gates.dtype).float()
    assert_close("gates", _of_direction(gates, d, count).float(), truth[1], stored)


def _compare_backward(
    case: Case, given: Inputs, hidden: Tensor, gates: Tensor, gradients: tuple[Tensor, ...], d: int
) -> None:
    """From the states and gates that the kernel saved, so that a kink of phi is met on the same side."""
    kind, count = case.kind, len(given.initial)
    backwards = d == 1 or case.directions == "reverse"

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        state = torch.float64 if dtype == torch.float64 else torch.float32
        found = reference.backward(
            _of_direction(given.grad_hidden, d, count).to(state),
            given.initial[d].to(state),
            given.weight[d].to(state),
            given.lengths,
            _of_direction(hidden, d, count).to(state),
            _of_direction(gates, d, count).to(state).contiguous(),
            dtype,
            kind.reset,
            kind.nonlinearity,
            backwards,
        )
        return tuple(x.to(state) for x in found)

    truth, usual = run(torch.float64), run(gates.dtype)
    projected, initial, weight, threshold = gradients
    assert_close("d_projected", _of_direction(projected, d, count).float(), truth[0], usual[0])
    assert_close("d_initial", initial[d], truth[1], usual[1])
    assert_close("d_weight", weight[d], truth[2], usual[2])
    assert_close("d_threshold", threshold[d], truth[3], usual[3])


def assert_close(name: str, found: Tensor, truth: Tensor, usual: Tensor) -> None:
    assert found.shape == truth.shape, name
    if found.numel() == 0:
        return
    assert found.isfinite().all(), f"{name} has {int((~found.isfinite()).sum())} numbers that were not written"
    allowed = _ROUNDINGS * torch.finfo(torch.float32).eps * float(truth.abs().max().clamp(min=1.0))
    bar = max(2 * float((usual - truth).abs().max()), allowed)
    error = float((found - truth).abs().max())
    assert error <= bar, f"{name} errs by {error:.3g}, which may be {bar:.3g}"
