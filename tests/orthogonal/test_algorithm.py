"""The library against the NumPy implementation of Algorithm 1, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from ncgru.orthogonal import ScaledCayley
from tests.orthogonal import numpy_truth as truth

N = 8
STEPS = 500
OPTIMISERS: dict[str, tuple[Callable[[], truth.Optimiser], Callable[[Iterable[Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (lambda: truth.sgd(2e-3), lambda p: torch.optim.SGD(p, lr=2e-3)),
    "adam": (lambda: truth.adam(2e-3), lambda p: torch.optim.Adam(p, lr=2e-3)),
    "rmsprop": (lambda: truth.rmsprop(1e-3), lambda p: torch.optim.RMSprop(p, lr=1e-3)),
}


@pytest.mark.parametrize("reset_every", [None, 50])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_neumann_is_algorithm_1_step_by_step(name: str, order: int, reset_every: int | None) -> None:
    make_truth, make_torch = OPTIMISERS[name]
    module = ScaledCayley(N, negatives=3, inverse="neumann", order=order, reset_every=reset_every, dtype=torch.float64)
    packed = module.sample(generator=torch.Generator().manual_seed(1)).requires_grad_()
    loss = truth.Loss(N, seed=2)
    target, linear = torch.from_numpy(loss.target), torch.from_numpy(loss.linear)
    expected = truth.Algorithm1(
        truth.skew_from_packed(packed.detach().numpy(), N), np.array([1.0] * 5 + [-1.0] * 3), order, reset_every
    )
    rule, optimiser = make_truth(), make_torch([packed])
    farthest = 0.0
    for _ in range(STEPS):
        u = module(packed)
        optimiser.zero_grad()
        (0.5 * (u - target).square().sum() + (linear * u).sum()).backward()
        optimiser.step()
        expected.step(loss, rule)
        farthest = max(farthest, float(np.abs(module(packed).detach().numpy() - expected.u).max()))
        farthest = max(farthest, float(np.abs(module.inverse.numpy() - expected.inverse).max()))
    assert farthest < 1e-10
    assert module.updates.item() == STEPS
    assert module.refreshes.item() == 0
    # A path that stays put would make the comparison empty.
    assert np.abs(expected.skew - truth.skew_from_packed(module.sample().numpy(), N)).max() > 0.05


@pytest.mark.parametrize("order", [1, 2])
def test_without_resets_the_errors_of_algorithm_1_are_kept_too(order: int) -> None:
    """What is compared above is not the exact inverse twice: the literal series drifts, and a reset ends that."""
    drift = {}
    for reset_every in (None, 50):
        expected = truth.Algorithm1(np.zeros((N, N)), np.ones(N), order, reset_every)
        module = ScaledCayley(
            N, negatives=0, inverse="neumann", order=order, reset_every=reset_every, dtype=torch.float64
        )
        rule, loss = truth.adam(2e-3), truth.Loss(N, seed=3)
        packed = torch.zeros(N * (N - 1) // 2, dtype=torch.float64)
        for _ in range(100):
            expected.step(loss, rule)
            packed = torch.from_numpy(expected.skew[np.triu_indices(N, 1)].copy())
            u = module(packed)
        drift[reset_every] = float(torch.linalg.matrix_norm(u.mT @ u - torch.eye(N, dtype=torch.float64), 2))
        assert np.abs(u.numpy() - expected.u).max() < 1e-12
    assert drift[50] < 1e-14 < 1e-9 < drift[None]


@pytest.mark.parametrize("method", ["exact", "hyperpower"])
def test_other_methods_follow_the_exact_path(method: str) -> None:
    module = ScaledCayley(N, inverse=method, negatives=3, dtype=torch.float64)
    packed = module.sample("haar", generator=torch.Generator().manual_seed(4)).requires_grad_()
    signs = module.signs.numpy()
    loss = truth.Loss(N, seed=5)
    rule, optimiser = truth.adam(2e-3), torch.optim.Adam([packed], lr=2e-3)
    skew = truth.skew_from_packed(packed.detach().numpy().copy(), N)
    for _ in range(200):
        optimiser.zero_grad()
        u = module(packed)
        u.backward(torch.from_numpy(loss.gradient(u.detach().numpy())))
        optimiser.step()
        exact = truth.scaled_cayley(skew, signs)
        v = np.linalg.inv(np.eye(N) + skew).T @ loss.gradient(exact) @ (np.diag(signs) + exact.T)
        skew = skew - rule(v.T - v)
    assert np.abs(module(packed).detach().numpy() - truth.scaled_cayley(skew, signs)).max() < 1e-11
