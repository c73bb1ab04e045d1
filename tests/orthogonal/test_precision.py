"""How orthogonal float32 weights stay over long training, with default settings and on hard paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ncgru.orthogonal import ScaledCayley
from tests.orthogonal.measure import moved, spectral_defect, start


@dataclass
class Drift:
    """The largest ‖U'U - I‖₂ along a path, of the module and of the exact inverse fed with the same A's."""

    followed: float
    exact: float
    worst_ratio: float
    updates: int
    refreshes: int


def train(n: int, rate: float, steps: int, *, coherent: float = 0.0, every: int = 10, **options: Any) -> Drift:
    """Adam on a loss whose gradient in U is drawn anew each step, plus `coherent` times one that stays."""
    module = ScaledCayley(n, **options)
    packed = start(module, "cayley", seed=0)
    exact = ScaledCayley(n, inverse="exact")
    exact.signs.copy_(module.signs)
    optimiser = torch.optim.Adam([packed], lr=rate)
    generator = torch.Generator().manual_seed(1)
    steady = torch.randn(n, n, generator=generator)
    drift = Drift(0.0, 0.0, 0.0, 0, 0)
    for step in range(steps + 1):
        u: Tensor = module(packed)
        if step % every == 0:
            followed, reference = spectral_defect(u), spectral_defect(exact(packed.detach()))
            drift.followed = max(drift.followed, followed)
            drift.exact = max(drift.exact, reference)
            drift.worst_ratio = max(drift.worst_ratio, followed / reference)
        optimiser.zero_grad()
        u.backward(torch.randn(n, n, generator=generator) + coherent * steady)
        optimiser.step()
    drift.updates, drift.refreshes = int(module.updates), int(module.refreshes)
    return drift


@pytest.mark.parametrize("coherent", [0.0, 0.3, 10.0])
def test_adam_keeps_the_default_orthogonal(coherent: float) -> None:
    drift = train(118, 1e-3, 500, coherent=coherent)
    assert drift.updates == 500
    assert drift.followed <= 1e-5
    assert drift.worst_ratio <= 3
    assert drift.refreshes < 250  # the series carries most of the way: the guard is not a second exact method


@pytest.mark.slow
@pytest.mark.parametrize("coherent", [0.0, 0.3, 10.0])
def test_ten_thousand_adam_steps_keep_the_default_orthogonal(coherent: float) -> None:
    drift = train(118, 1e-3, 10_000, coherent=coherent, every=1)
    print(drift)
    assert drift.updates == 10_000
    assert drift.followed <= 1e-5
    assert drift.worst_ratio <= 3
    assert drift.refreshes < 5_000


@pytest.mark.parametrize("coherent", [0.0, 10.0])
def test_large_steps_of_a_large_matrix_do_not_blow_up(coherent: float) -> None:
    drift = train(256, 5e-3, 60, coherent=coherent, every=5)
    assert drift.followed <= 1e-5
    assert drift.worst_ratio <= 3


@pytest.mark.slow
@pytest.mark.parametrize("coherent", [0.0, 10.0])
def test_large_steps_of_a_large_matrix_do_not_blow_up_later(coherent: float) -> None:
    drift = train(256, 5e-3, 3_000, coherent=coherent, every=20)
    print(drift)
    assert drift.followed <= 1e-5
    assert drift.worst_ratio <= 3


def test_algorithm_1_drifts_and_its_guard_ends_what_breaks_down() -> None:
    """The literal series keeps its errors. Where they would grow without bound, the guard ends it and says so."""
    drift = train(64, 1e-3, 400, inverse="neumann")
    assert 1e-7 < drift.followed < 1e-4
    assert drift.refreshes == 0
    broken = train(64, 5e-2, 200, inverse="neumann", coherent=10.0, every=1)
    assert broken.refreshes > 0
    assert broken.followed < 0.5


@pytest.mark.parametrize("size", [1.0, 10.0, 100.0, 1000.0])
def test_large_entries_of_the_skew_matrix_cost_no_digits(size: float) -> None:
    """Default U = 2Ã - I keeps float32 accuracy where the product Ã(I-A) would lose it."""
    module = ScaledCayley(118)
    packed = size * torch.randn(module.anchor.shape, generator=torch.Generator().manual_seed(0))
    assert spectral_defect(module(packed)) < 3e-7


@pytest.mark.parametrize("n", [*range(1, 11), 33, 64, 257])
@pytest.mark.parametrize("method", ["exact", "hyperpower"])
def test_float64_follows_to_twelve_digits(method: str, n: int) -> None:
    module = ScaledCayley(n, inverse=method, dtype=torch.float64)
    packed = start(module)
    for step in range(4):
        packed = moved(packed, 1e-5, seed=step)
        assert spectral_defect(module(packed)) <= 1e-12


@pytest.mark.parametrize("method", ["exact", "neumann", "hyperpower"])
def test_autocast_leaves_every_digit(method: str) -> None:
    results = []
    for enabled in (False, True):
        module = ScaledCayley(32, (2,), inverse=method)
        packed = start(module)
        with torch.no_grad():
            packed += 1e-4
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            u = module(packed)
            (gradient,) = torch.autograd.grad((u * torch.ones(32, 32).triu()).sum(), packed, create_graph=True)
            assigned, _ = ScaledCayley(32, (2,), inverse=method).assign(u.detach())
        (second,) = torch.autograd.grad(gradient.square().sum(), packed)
        assert u.dtype == gradient.dtype == torch.float32
        results.append((u, gradient, second, assigned, module.inverse))
    for without, within in zip(*results, strict=True):
        assert torch.equal(without, within)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_vector_is_read_in_float32(dtype: torch.dtype) -> None:
    module = ScaledCayley(16)
    packed = start(module).detach().to(dtype).requires_grad_()
    u = module(packed)
    assert u.dtype == dtype
    assert module.matrix.dtype == torch.float32
    assert spectral_defect(module.matrix) < 1e-6
    u.sum().backward()
    assert packed.grad is not None
    assert packed.grad.dtype == dtype
