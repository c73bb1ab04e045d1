"""The series, the guard's estimate, and the two operators."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from ncgru.orthogonal import METHODS, ScaledCayley, cayley, packed_size, unpack
from ncgru.orthogonal.inverse import (
    _make_probes,
    cayley_read,
    exact_inverse,
    follow_inverse,
    hyperpower_series,
    neumann_series,
    residual_of,
)
from tests.orthogonal.measure import moved, start

N = 10


def skew_pair(step: float) -> tuple[Tensor, Tensor]:
    """An old A and a step δA of the given size, in float64."""
    generator = torch.Generator().manual_seed(0)
    old, direction = torch.randn(2, packed_size(N), dtype=torch.float64, generator=generator)
    return unpack(old, N), unpack(step * direction, N)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_the_error_is_of_the_stated_order(order: int) -> None:
    """Halving δA divides the error by 2^(order+1), for either series."""
    errors: dict[str, list[float]] = {"neumann": [], "hyperpower": []}
    for step in (4e-3, 2e-3):
        old, delta = skew_pair(step)
        before, after = exact_inverse(old), exact_inverse(old - delta)
        neumann = neumann_series(before, delta, order)
        hyperpower = hyperpower_series(before, residual_of(before, old - delta), order)
        assert torch.allclose(neumann, hyperpower, atol=1e-14, rtol=0)
        errors["neumann"].append(float((neumann - after).norm()))
        errors["hyperpower"].append(float((hyperpower - after).norm()))
    for large, small in errors.values():
        assert large / small == pytest.approx(2 ** (order + 1), rel=0.05)


def test_the_residual_series_repairs_what_the_literal_one_keeps() -> None:
    old, delta = skew_pair(1e-4)
    after = exact_inverse(old - delta)
    spoiled = exact_inverse(old) + 1e-4 * torch.eye(N, dtype=torch.float64)
    literal = float((neumann_series(spoiled, delta, 2) - after).norm())
    repaired = float((hyperpower_series(spoiled, residual_of(spoiled, old - delta), 2) - after).norm())
    assert literal > 1e-4
    assert repaired < 1e-9


@pytest.mark.parametrize("n", [4, 56, 257])
def test_the_probes_estimate_frobenius_norms(n: int) -> None:
    probes = _make_probes(n, torch.float64, torch.device("cpu"))
    assert torch.allclose(probes.abs(), torch.full((n, 8), 8**-0.5, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    for matrix in (torch.eye(n), torch.randn(n, n, generator=generator), torch.ones(n, n).triu()):
        wide = matrix.double()
        ratio = torch.linalg.matrix_norm(wide @ probes) / torch.linalg.matrix_norm(wide)
        assert 0.4 < ratio < 2.0
    overlap = (probes.mT @ probes * 8 / n - torch.eye(8, dtype=torch.float64)).abs().max()
    assert overlap <= 4.5 / n**0.5  # like independent signs


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS)
def test_a_read_is_differentiable_twice(method: str, n: int) -> None:
    module = ScaledCayley(n, (2,), inverse=method, dtype=torch.float64)
    packed = moved(start(module), 1e-2).requires_grad_()
    with torch.no_grad():
        module(packed)
    module.method = "exact"  # finite differences are 1e-6 wide: what Algorithm 1 makes of them is another test's
    assert torch.autograd.gradcheck(module, (packed,))
    assert torch.autograd.gradgradcheck(module, (packed,))


def test_the_gradient_is_that_of_the_map() -> None:
    module = ScaledCayley(7, (3,), dtype=torch.float64)
    packed = moved(start(module), 1e-2).requires_grad_()
    weights = torch.randn(3, 7, 7, dtype=torch.float64)
    (ours,) = torch.autograd.grad((module(packed) * weights).sum(), packed)
    (theirs,) = torch.autograd.grad((cayley(unpack(packed, 7), module.signs) * weights).sum(), packed)
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_the_inverse_has_a_gradient_too() -> None:
    module = ScaledCayley(4, dtype=torch.float64)
    packed = moved(start(module), 0.1).requires_grad_()

    def both(vector: Tensor) -> tuple[Tensor, Tensor]:
        module(vector.detach())
        u, inverse = cayley_read(vector, module.inverse, module.matrix, module.signs)
        return u, inverse

    identity = torch.eye(4, dtype=torch.float64)
    assert torch.allclose(both(packed)[1], torch.linalg.inv(identity + unpack(packed, 4)))
    assert torch.autograd.gradcheck(both, (packed,))
    assert torch.autograd.gradgradcheck(both, (packed,))
    assert torch.autograd.gradcheck(lambda vector: both(vector)[1], (packed,))


def operator_arguments(method: str, batch: tuple[int, ...], step: float) -> tuple[Any, ...]:
    module = ScaledCayley(5, batch)
    packed = moved(start(module), step)
    state = (module.anchor, module.inverse, module.matrix, module.signs, module.updates, module.refreshes, module.seal)
    return (packed, *state, method, 2, 3)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("method", METHODS)
def test_the_operators_pass_opcheck(method: str, batch: tuple[int, ...]) -> None:
    for step in (0.0, 1e-3, 10.0):
        arguments = operator_arguments(method, batch, step)
        torch.library.opcheck(follow_inverse, arguments)
        packed, _, inverse, matrix, signs, *_ = arguments
        torch.library.opcheck(cayley_read, (packed.clone().requires_grad_(), inverse, matrix, signs))


@pytest.mark.parametrize("method", METHODS)
def test_what_the_host_may_leave_out_changes_no_bit(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branchless path of accelerators, run on the CPU, against the one with shortcuts."""

    results = []
    for shortcuts in (True, False):
        arguments = operator_arguments(method, (4,), 1e-3)
        packed, anchor, *_ = arguments
        packed[1] = anchor[1]  # unmoved
        packed[2] += 10.0  # too far
        if not shortcuts:
            monkeypatch.setattr(importlib.import_module("ncgru.orthogonal.inverse"), "_on_host", lambda tensor: False)
        follow_inverse(*arguments)
        results.append(arguments[:8])
    for fast, plain in zip(*results, strict=True):
        assert torch.equal(fast, plain)
    assert results[0][5].tolist() == [1, 0, 1, 1]
    assert results[0][6].tolist() == ([0, 0, 1, 0] if method != "exact" else [0] * 4)
