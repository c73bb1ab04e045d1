"""Promises of a module that follows its inverse: one update a move, repairs are counted, reads change nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ncgru.orthogonal import METHODS, ScaledCayley, cayley, unpack
from ncgru.orthogonal.inverse import seal_of
from tests.orthogonal.measure import moved, spectral_defect, start

SERIES = ("neumann", "hyperpower")


def counts(module: ScaledCayley) -> tuple[list[int], list[int]]:
    return module.updates.reshape(-1).tolist(), module.refreshes.reshape(-1).tolist()


def snapshot(module: ScaledCayley) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_bits(module: ScaledCayley, before: dict[str, Tensor]) -> None:
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def true_u(module: ScaledCayley, packed: Tensor) -> Tensor:
    return cayley(unpack(packed.detach().double(), module.size), module.signs.double())


@pytest.mark.parametrize("method", METHODS)
def test_reading_again_gives_the_same_bits_and_counts_nothing(method: str) -> None:
    module = ScaledCayley(9, (2,), inverse=method)
    packed = moved(start(module), 1e-3)
    first = module(packed)
    assert counts(module)[0] == [1, 1]
    before = snapshot(module)
    for _ in range(3):
        assert torch.equal(module(packed), first)
        assert torch.equal(module(packed.clone()), first)
    assert_same_bits(module, before)


@pytest.mark.parametrize("method", SERIES)
def test_only_the_matrices_that_moved_are_followed(method: str) -> None:
    module = ScaledCayley(6, (3,), inverse=method)
    packed = start(module).detach()
    before = snapshot(module)
    packed[1] = moved(packed[1], 1e-3)
    module(packed)
    assert counts(module) == ([0, 1, 0], [0, 0, 0])
    for name in ("anchor", "inverse", "matrix"):
        now = getattr(module, name)
        assert torch.equal(now[::2], before[name][::2])
        assert not torch.equal(now[1], before[name][1])


def test_a_result_keeps_its_values_when_the_state_moves_on() -> None:
    module = ScaledCayley(5)
    packed = start(module)
    first = module(packed)
    kept = first.clone()
    loss = first.square().sum() + (first * torch.ones(5, 5).triu()).sum()
    (expected,) = torch.autograd.grad(loss, packed, retain_graph=True)
    module(moved(packed, 0.01))
    assert torch.equal(first, kept)
    (after,) = torch.autograd.grad(loss, packed)
    assert torch.equal(after, expected)


def test_one_update_an_optimiser_step_however_often_it_is_read() -> None:
    module = ScaledCayley(8)
    packed = start(module)
    optimiser = torch.optim.Adam([packed], lr=1e-3)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))

    def layer(inputs: Tensor, vector: Tensor) -> Tensor:
        return torch.tanh(inputs @ module(vector).mT)

    for step in range(5):
        optimiser.zero_grad()
        for part in x.chunk(2):  # gradient accumulation
            hidden = layer(part, packed)
            hidden = checkpoint(layer, hidden, packed, use_reentrant=False)
            hidden = checkpoint(layer, hidden, packed, use_reentrant=False)
            hidden.sum().backward()
        module.eval()
        with torch.no_grad():
            layer(x, packed)
        with torch.inference_mode():
            layer(x, packed)
        module.train()
        assert module.updates.item() == step
        optimiser.step()
    module(packed)
    assert counts(module) == ([5], [module.refreshes.item()])


def test_recomputation_gives_the_same_gradient() -> None:
    module = ScaledCayley(8, dtype=torch.float64)
    packed = moved(start(module), 1e-2).requires_grad_()
    x = torch.randn(4, 8, dtype=torch.float64)

    def loss(vector: Tensor) -> Tensor:
        return torch.tanh(x @ module(vector)).square().sum()

    (plain,) = torch.autograd.grad(loss(packed), packed)
    (again,) = torch.autograd.grad(checkpoint(loss, packed, use_reentrant=False), packed)
    assert torch.equal(plain, again)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_update_may_happen_where_no_gradient_is_wanted(context: type) -> None:
    module = ScaledCayley(6)
    packed = start(module)
    with torch.no_grad():
        packed.add_(1e-3)
    with context():
        read = module(packed)
    assert module.updates.item() == 1
    again = module(packed)
    assert torch.equal(again, read.clone())
    again.square().sum().backward()
    assert packed.grad is not None


@pytest.mark.parametrize("method", SERIES)
@pytest.mark.parametrize("n", [2, 9, 64])
def test_a_step_a_thousand_times_too_large_is_repaired_and_counted(method: str, n: int) -> None:
    module = ScaledCayley(n, inverse=method)
    packed = start(module)
    packed = moved(packed, 1e-4)
    module(packed)
    assert counts(module) == ([1], [0])
    packed = moved(packed, 1000 * 1e-3)
    u = module(packed)
    assert counts(module) == ([2], [1])
    assert spectral_defect(u) < 1e-4
    packed = moved(packed, 1e-5)
    module(packed)
    assert counts(module) == ([3], [1])


@pytest.mark.parametrize("method", SERIES)
def test_a_manual_overwrite_is_followed(method: str) -> None:
    module = ScaledCayley(16, inverse=method)
    parameter = torch.nn.Parameter(start(module).detach())
    parameter.data.normal_(generator=torch.Generator().manual_seed(5))
    u = module(parameter)
    assert counts(module) == ([1], [1])
    assert spectral_defect(u) < 1e-5
    assert (u - true_u(module, parameter)).abs().max() < 1e-5
    parameter.data = torch.zeros_like(parameter)
    assert torch.allclose(module(parameter), torch.diag(module.signs), atol=1e-6)
    assert counts(module) == ([2], [2])


@pytest.mark.parametrize("method", SERIES)
def test_a_spoilt_inverse_is_repaired_at_the_next_update(method: str) -> None:
    module = ScaledCayley(12, (2,), inverse=method)
    packed = start(module)
    module.inverse[0, 0, 0] = math.nan
    packed = moved(packed, 1e-4)
    u = module(packed)
    assert counts(module) == ([1, 1], [1, 0])
    assert spectral_defect(u) < 1e-5


def test_hyperpower_repairs_a_small_error_by_itself() -> None:
    module = ScaledCayley(12, dtype=torch.float64)
    packed = start(module)
    module.inverse += 1e-8
    module.seal.copy_(seal_of(module.anchor, module.inverse, module.matrix, module.signs))
    u = module(moved(packed, 1e-8))
    assert counts(module) == ([1], [0])
    assert spectral_defect(u) < 1e-14


@pytest.mark.parametrize("method", METHODS)
def test_a_vector_of_nan_stays_visible_and_ends_with_it(method: str) -> None:
    module = ScaledCayley(5, (2,), inverse=method)
    good = start(module).detach()
    bad = good.clone()
    bad[0, 3] = math.nan
    u = module(bad)
    assert u[0].isnan().any()
    assert torch.equal(u[1], module.matrix[1])
    assert not u[1].isnan().any()
    assert spectral_defect(module(good)) < 1e-6


def test_resets_come_by_the_count_and_are_not_refreshes() -> None:
    """Updates are counted from 1; the k-th is exact where k is a multiple of `reset_every`."""
    module = ScaledCayley(10, inverse="neumann", order=1, reset_every=3, dtype=torch.float64)
    packed = start(module).detach()
    for k in range(1, 10):
        packed = moved(packed, 1e-3, seed=k)
        defect = spectral_defect(module(packed))
        assert (defect < 1e-13) == (k % 3 == 0), k
    assert counts(module) == ([9], [0])


@pytest.mark.parametrize("method", METHODS)
def test_any_path_is_followed_in_every_order(method: str) -> None:
    for order in (1, 2, 3, 5):
        module = ScaledCayley(7, (2,), inverse=method, order=order, reset_every=10, dtype=torch.float64)
        packed = start(module).detach()
        for k in range(40):
            packed = moved(packed, 1e-4, seed=k)
            u = module(packed)
        assert (u - true_u(module, packed)).abs().max() < 1e-13
