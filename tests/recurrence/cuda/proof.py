"""Compares the kernels' forward and backward with the reference, by the measure that the reference itself keeps.

The truth is the reference in float64. A kernel may err at most twice as much as the reference in the kernel's own
precision, or a few roundings where that happens to hit the truth. The emulator and a GPU are judged alike.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from ncgru.recurrence import reference
from ncgru.recurrence.cuda.kind import Kind
from ncgru.recurrence.cuda.machine import Machine
from ncgru.recurrence.cuda.operator import backward_on, forward_on

NAMES = ("hidden", "gates", "d_projected", "d_initial", "d_weight", "d_threshold")

_ROUNDINGS = 8.0
_FEW = 2**16
"""Numbers of which none is expected to lie so near to a jump of modReLU that a rounding carries it over."""


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


def inputs(case: Case, device: torch.device | str = "cpu") -> Inputs:
    kind, size = case.kind, case.kind.hidden
    directions = 2 if case.directions == "both" else 1
    random = torch.Generator(device).manual_seed(size + 1000 * case.batch + 7 * case.steps)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=device)

    projected = normal(case.steps, case.batch, directions * kind.gates * size)
    gain = 0.7 if kind.reset == "none" else 1.0  # without gates a larger one lets every rounding grow from step to step
    lengths = None
    if case.lengths:
        lengths = torch.arange(case.batch, device=device) * 5 % (case.steps + 1)
        projected[torch.arange(case.steps, device=device)[:, None] >= lengths] = torch.nan
    return Inputs(
        projected.to(getattr(torch, kind.storage)),
        0.5 * normal(directions, case.batch, size),
        gain * normal(directions, kind.gates * size, size) / size**0.5,
        _threshold(case, 0.2 * normal(directions, size)) if kind.nonlinearity == "modrelu" else None,
        lengths,
        normal(case.steps, case.batch, directions * size),
    )


def scattered(x: Tensor) -> Tensor:
    """The same numbers with others between them, and the dimensions laid out the other way round."""
    room = torch.full((*reversed(x.shape), 2), -1, dtype=x.dtype, device=x.device)
    found = room[..., 0].permute(*reversed(range(x.dim())))
    return found.copy_(x)


def _threshold(case: Case, drawn: Tensor) -> Tensor:
    """Of both signs, but negative where there are so many numbers that one would meet modReLU's jump at 0."""
    few = case.steps * case.batch * drawn.numel() <= _FEW
    return drawn if few else -drawn.abs()


def run(machine: Machine, case: Case, given: Inputs) -> dict[str, Tensor]:
    """Both passes on `machine`; the results are named as in `NAMES`, where they mean anything."""
    x, reverse = given, case.directions == "reverse"
    hidden, gates = forward_on(machine, case.kind, x.projected, x.initial, x.weight, x.threshold, x.lengths, reverse)
    gradients = backward_on(machine, case.kind, x.grad_hidden, x.initial, x.weight, x.lengths, hidden, gates, reverse)
    found = dict(zip(NAMES, (hidden, gates, *gradients), strict=True))
    if case.kind.nonlinearity != "modrelu":
        del found["d_threshold"]
    return found


def prove(machine: Machine, case: Case, device: torch.device | str = "cpu") -> None:
    """Run both passes on `machine`, with NaN in all memory that nobody has written yet, and compare."""
    given = inputs(case, device)
    with _products_of(case.kind):
        with unwritten_is_nan():
            found = run(machine, case, given)
        for d in range(len(given.initial)):
            _compare_forward(case, given, found, d)
            _compare_backward(case, given, found, d)


def prove_as_a_whole(machine: Machine, case: Case, device: torch.device | str = "cpu") -> None:
    """Compare norms of errors from end to end, with no state lent to the reference; for a phi without kinks."""
    assert case.kind.nonlinearity == "tanh"
    given = inputs(case, device)
    with _products_of(case.kind):
        found = run(machine, case, given)
        for d in range(len(given.initial)):
            truth, usual = (_whole(case, given, d, dtype) for dtype in (torch.float64, given.projected.dtype))
            for name in ("hidden", *NAMES[2:5]):
                ours = found[name][d] if name in NAMES[3:] else _of_direction(found[name], d, len(given.initial))
                assert_norms_close(name, ours, truth[name], usual[name])


def _whole(case: Case, given: Inputs, d: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Both passes of one direction by the reference in this precision."""
    kind, count = case.kind, len(given.initial)
    state = torch.float64 if dtype == torch.float64 else torch.float32
    settings = kind.reset, kind.nonlinearity, d == 1 or case.directions == "reverse"
    initial, weight = given.initial[d].to(state), given.weight[d].to(state)
    projected = _of_direction(given.projected, d, count).to(dtype)
    hidden, gates = reference.forward(projected, initial, weight, None, given.lengths, *settings)
    grad = _of_direction(given.grad_hidden, d, count).to(state)
    gradients = reference.backward(grad, initial, weight, given.lengths, hidden, gates, dtype, *settings)
    return dict(zip(NAMES, (hidden, gates, *gradients), strict=True))


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """New memory holds NaN."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    # torch fills memory in this mode alone, in which it wants cuBLAS to be told, too.
    with mock.patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)


@contextlib.contextmanager
def _products_of(kind: Kind) -> Iterator[None]:
    """Products of float32 are float32's own; or with tf32, those of torch and of the reference take tf32, too."""
    before, plain = torch.get_float32_matmul_precision(), reference.rounding

    def rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return _to_tf32 if kind.tf32 and dtype == torch.float32 else plain(dtype)

    torch.set_float32_matmul_precision("high" if kind.tf32 else "highest")
    try:
        # cuBLAS takes tf32 for some shapes only; so the operands are rounded here, and it does not matter.
        with mock.patch.object(reference, "rounding", rounding):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _to_tf32(x: Tensor) -> Tensor:
    """The nearest number of 11 significant bits."""
    return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


def _of_direction(x: Tensor, d: int, count: int) -> Tensor:
    """Direction d's part [T, B, n] of [T, B, D*n]."""
    return x.chunk(count, -1)[d]


def _compare_forward(case: Case, given: Inputs, found: dict[str, Tensor], d: int) -> None:
    kind, count = case.kind, len(given.initial)
    backwards = d == 1 or case.directions == "reverse"
    projected = _of_direction(given.projected, d, count)
    threshold = None if given.threshold is None else given.threshold[d]
    hidden, gates = (_of_direction(found[name], d, count) for name in ("hidden", "gates"))

    def by_reference(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        state = torch.float64 if dtype == torch.float64 else torch.float32
        bias = None if threshold is None else threshold.to(state)
        tensors = projected.to(dtype), given.initial[d].to(state), given.weight[d].to(state), bias, given.lengths
        return reference.forward(*tensors, kind.reset, kind.nonlinearity, backwards)

    truth, usual = by_reference(torch.float64), by_reference(projected.dtype)
    assert_close("hidden", hidden, truth[0], usual[0])
    assert_close("gates", gates.float(), truth[1], usual[1].to(gates.dtype).float())


def _compare_backward(case: Case, given: Inputs, found: dict[str, Tensor], d: int) -> None:
    """From the states and gates that the kernel saved, so that a kink of phi is met on the same side."""
    kind, count = case.kind, len(given.initial)
    backwards = d == 1 or case.directions == "reverse"
    grad, hidden, gates, d_projected = (
        _of_direction(x, d, count) for x in (given.grad_hidden, found["hidden"], found["gates"], found["d_projected"])
    )

    def by_reference(dtype: torch.dtype) -> tuple[Tensor, ...]:
        state = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = grad.to(state), given.initial[d].to(state), given.weight[d].to(state), given.lengths
        saved = hidden.to(state), gates.to(state).contiguous()
        gradients = reference.backward(*tensors, *saved, dtype, kind.reset, kind.nonlinearity, backwards)
        return tuple(x.to(state) for x in gradients)

    truth, usual = by_reference(torch.float64), by_reference(gates.dtype)
    assert_close("d_projected", d_projected.float(), truth[0], usual[0])
    for name, exact, plain in zip(NAMES[3:], truth[1:], usual[1:], strict=True):
        if name in found:
            # One product over all steps and rows, by torch; the reference's are added up from parts, which errs less.
            terms = case.steps * case.batch if name == "d_weight" else 1
            assert_close(name, found[name][d], exact, plain, slack=max(1.0, math.sqrt(terms) / 16))


def assert_close(name: str, found: Tensor, truth: Tensor, usual: Tensor, slack: float = 1.0) -> None:
    """`found` errs at most twice as much as `usual`, or a few roundings (times `slack`)."""
    assert found.shape == truth.shape, name
    if found.numel() == 0:
        return
    assert found.isfinite().all(), f"{name} has {int((~found.isfinite()).sum())} numbers that were not written"
    allowed = slack * _ROUNDINGS * torch.finfo(torch.float32).eps * float(truth.abs().max().clamp(min=1.0))
    bar = max(2 * float((usual - truth).abs().max()), allowed)
    error = float((found - truth).abs().max())
    assert error <= bar, f"{name} errs by {error:.3g}, which may be {bar:.3g}"


def assert_norms_close(name: str, found: Tensor, truth: Tensor, usual: Tensor, slack: float = 1.0) -> None:
    """As `assert_close`, by the norm of all errors: for what no single number can be held to."""
    assert found.shape == truth.shape, name
    allowed = _ROUNDINGS * torch.finfo(torch.float32).eps * float(truth.norm())
    bar = slack * max(2 * float((usual.double() - truth).norm()), allowed)
    error = float((found.double() - truth).norm())
    assert error <= bar, f"{name} errs by {error:.3g} in all, which may be {bar:.3g}"
