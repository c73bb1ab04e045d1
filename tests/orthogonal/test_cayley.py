"""The scaled Cayley map and its inverse for every orthogonal matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ncgru.orthogonal import cayley, inverse_cayley, nearest_orthogonal, packed_size, unpack
from ncgru.orthogonal.cayley import LARGEST_ENTRY, _flip
from ncgru.orthogonal.skew import haar_orthogonal
from tests.orthogonal import numpy_truth as truth
from tests.orthogonal.measure import spectral_defect

SIZES = [*range(1, 11), 33, 64, 257]


def random_skew(n: int, *batch: int, seed: int = 0) -> Tensor:
    """A with normal entries."""
    generator = torch.Generator().manual_seed(seed)
    return unpack(torch.randn(*batch, packed_size(n), dtype=torch.float64, generator=generator), n)


@pytest.mark.parametrize("n", SIZES)
def test_the_map_is_orthogonal(n: int) -> None:
    signs = torch.ones(n, dtype=torch.float64)
    signs[n // 2 :] = -1
    assert spectral_defect(cayley(random_skew(n), signs)) <= 1e-12


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_the_map_equals_the_formula(n: int) -> None:
    skew = random_skew(n, 3, seed=n)
    signs = torch.where(torch.rand(3, n, dtype=torch.float64) < 0.5, -1.0, 1.0)
    expected = np.stack([truth.scaled_cayley(a, d) for a, d in zip(skew.numpy(), signs.numpy(), strict=True)])
    assert np.abs(cayley(skew, signs).numpy() - expected).max() < 1e-12
    assert torch.equal(cayley(skew), cayley(skew, torch.ones(n)))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_map_is_differentiable_twice(n: int) -> None:
    packed = torch.randn(2, packed_size(n), dtype=torch.float64, requires_grad=True)
    signs = torch.tensor([1.0, -1.0] * n)[:n]
    assert torch.autograd.gradcheck(lambda p: cayley(unpack(p, n), signs), (packed,))
    assert torch.autograd.gradgradcheck(lambda p: cayley(unpack(p, n), signs), (packed,))


def special(n: int) -> dict[str, Tensor]:
    """Orthogonal matrices with many eigenvalues -1, where the plain Cayley map has no A."""
    identity = torch.eye(n, dtype=torch.float64)
    random = np.random.default_rng(n)
    vector = torch.from_numpy(random.standard_normal((n, 1)))
    reflection = identity - 2 * vector @ vector.mT / vector.square().sum()
    noise = torch.from_numpy(random.standard_normal((n, n)))
    basis = haar_orthogonal(n, generator=torch.Generator().manual_seed(n))
    half = torch.ones(n, dtype=torch.float64)
    half[: n // 2] = -1
    return {
        "identity": identity,
        "minus identity": -identity,
        "permutation": identity[torch.from_numpy(random.permutation(n))],
        "minus a cycle": -identity.roll(1, 0),
        "reflection": reflection,
        "minus a reflection": -reflection,
        "block rotations by pi": torch.diag(half),
        "hidden rotations by pi": basis @ torch.diag(half) @ basis.mT,
        "almost minus identity": nearest_orthogonal(1e-9 * noise - identity)[0],
        "Haar": basis,
        "Haar, other determinant": basis * torch.tensor([-1.0] + [1.0] * (n - 1), dtype=torch.float64),
        "symmetric": basis @ torch.diag(half.flip(0)) @ basis.mT,
    }


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", special(2))
def test_every_orthogonal_matrix_has_a_small_skew_matrix(n: int, kind: str) -> None:
    u = special(n)[kind]
    skew, signs = inverse_cayley(u)
    assert torch.equal(skew, -skew.mT)
    assert (signs.abs() == 1).all()
    assert skew.abs().max() <= LARGEST_ENTRY + 1e-9
    assert (cayley(skew, signs) - u).abs().max() < 1e-12
    # det(cayley(A)) = 1, so D alone carries the determinant.
    assert torch.linalg.det(u).round() == signs.prod()


@given(st.integers(1, 12), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_round_trip_of_random_orthogonal_matrices(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    u = haar_orthogonal(n, (3,), generator=generator)
    skew, signs = inverse_cayley(u)
    assert skew.abs().max() <= LARGEST_ENTRY + 1e-9
    assert torch.allclose(cayley(skew, signs), u, atol=1e-12, rtol=0)


def test_round_trip_in_float32() -> None:
    u = haar_orthogonal(64, generator=torch.Generator().manual_seed(0)).float()
    skew, signs = inverse_cayley(u)
    assert skew.dtype == signs.dtype == torch.float32
    assert (cayley(skew, signs) - u).abs().max() < 2e-6


@pytest.mark.parametrize("n", [2, 3, 7])
def test_flipping_two_signs_is_the_exchange_step(n: int) -> None:
    """The O(n²) update against the definition, and the growth of the determinant that bounds the number of flips."""
    skew = random_skew(n, seed=n)
    signs = torch.ones(n, dtype=torch.float64)
    u = cayley(skew, signs)
    pair = torch.tensor([0, n - 1])
    flipped = signs.clone()
    flipped[pair] = -1
    identity = torch.eye(n, dtype=torch.float64)
    scaled = u * flipped
    expected = (identity - scaled) @ torch.linalg.inv(identity + scaled)
    assert torch.allclose(_flip(skew, pair), expected, atol=1e-10)
    growth = torch.linalg.det(identity + scaled) / torch.linalg.det(identity + u)
    assert torch.allclose(growth.abs(), skew[0, n - 1].square())


def test_nearest_orthogonal_is_the_polar_factor() -> None:
    generator = torch.Generator().manual_seed(0)
    u = haar_orthogonal(9, (4,), generator=generator)
    noise = torch.randn(4, 9, 9, dtype=torch.float64, generator=generator)
    stretch = torch.eye(9, dtype=torch.float64) + 0.01 * (noise @ noise.mT)
    nearest, distance = nearest_orthogonal(u @ stretch)
    assert torch.allclose(nearest, u, atol=1e-12)
    assert torch.allclose(distance, torch.linalg.matrix_norm(u @ stretch - u), atol=1e-12)
    other = haar_orthogonal(9, (4,), generator=generator)
    assert (torch.linalg.matrix_norm(u @ stretch - other) > distance).all()
    assert spectral_defect(nearest_orthogonal(torch.zeros(3, 3))[0]) < 1e-6


def test_an_empty_batch_passes() -> None:
    skew, signs = inverse_cayley(torch.zeros(0, 3, 3))
    assert skew.shape == (0, 3, 3)
    assert signs.shape == (0, 3)
    assert cayley(skew, signs).shape == (0, 3, 3)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"skew must be float32 or float64, got torch.float16"):
        cayley(torch.zeros(2, 2, dtype=torch.float16))
    with pytest.raises(TypeError, match=r"matrix must be float32 or float64, got torch.int64"):
        inverse_cayley(torch.eye(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"matrix must be a torch.Tensor, got list"):
        inverse_cayley([[1.0]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"matrix must be square.* got shape \(2, 3\)"):
        inverse_cayley(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"signs must end in n=2 numbers, got shape \(3,\)"):
        cayley(torch.zeros(2, 2), torch.ones(3))
    with pytest.raises(ValueError, match=r"matrix must be orthogonal.*got 4\.2\d*e\+00; pass nearest_orthogonal"):
        inverse_cayley(2 * torch.eye(2))
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"matrix must be finite, got 1 NaN or infinite"):
            inverse_cayley(torch.tensor([[value, 0.0], [0.0, 1.0]]))
        with pytest.raises(ValueError, match=r"matrix must be finite"):
            nearest_orthogonal(torch.tensor([[value]]))
