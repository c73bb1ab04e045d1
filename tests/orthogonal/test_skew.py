"""Packing, and the initial values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ncgru.orthogonal import cayley, pack, packed_size, unpack
from ncgru.orthogonal.skew import haar_orthogonal, henaff_rotations, scornn_packed
from tests.orthogonal import numpy_truth as truth


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("batch", [(), (3,), (2, 0), (2, 3)])
def test_pack_and_unpack_are_inverse(n: int, batch: tuple[int, ...]) -> None:
    packed = torch.randn(*batch, packed_size(n), dtype=torch.float64)
    skew = unpack(packed, n)
    assert skew.shape == (*batch, n, n)
    assert torch.equal(skew, -skew.mT)
    assert torch.equal(pack(skew), packed)


def test_the_order_is_row_by_row_above_the_diagonal() -> None:
    packed = torch.arange(1.0, 11.0, dtype=torch.float64)
    assert np.array_equal(unpack(packed, 5).numpy(), truth.skew_from_packed(packed.numpy(), 5))


def test_unpack_and_pack_are_differentiable_twice() -> None:
    packed = torch.randn(2, packed_size(4), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: unpack(p, 4), (packed,))
    assert torch.autograd.gradgradcheck(lambda p: pack(unpack(p, 4) ** 3), (packed,))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_scornn_rotates_pairs_into_the_right_half_circle(n: int) -> None:
    skew = unpack(scornn_packed(n, (50,), generator=torch.Generator().manual_seed(0)), n)
    blocks = torch.block_diag(*[torch.ones(2, 2)] * (n // 2), *[torch.ones(1, 1)] * (n % 2)).bool()
    assert not skew[:, ~blocks].any()
    u = cayley(skew)
    cosines = torch.diagonal(u, dim1=-2, dim2=-1)[:, : n - n % 2]
    assert ((cosines > 0) & (cosines <= 1)).all()
    even = torch.arange(0, n - 1, 2)
    # A[2j,2j+1] = -tan(s/2) is the rotation by s, whose upper right entry is sin(s) > 0.
    assert torch.allclose(torch.atan(-skew[:, even, even + 1]) * 2, torch.asin(u[:, even, even + 1]), atol=1e-12)
    if n > 1:
        angles = torch.atan(-skew[:, even, even + 1]) * 2
        assert angles.min() < 0.1 * math.pi / 2
        assert angles.max() > 0.9 * math.pi / 2


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_henaff_rotates_pairs_by_any_angle(n: int) -> None:
    u = henaff_rotations(n, (200,), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(u @ u.mT, torch.eye(n, dtype=u.dtype).expand_as(u), atol=1e-15)
    assert torch.allclose(torch.linalg.det(u), torch.ones(200, dtype=u.dtype))
    if n > 1:
        angles = torch.atan2(u[:, 0, 1], u[:, 0, 0])
        assert angles.min() < -0.9 * math.pi
        assert angles.max() > 0.9 * math.pi


def test_haar_has_both_determinants_and_the_moments_of_the_uniform_distribution() -> None:
    n = 6
    u = haar_orthogonal(n, (4000,), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(u @ u.mT, torch.eye(n, dtype=u.dtype).expand_as(u), atol=1e-13)
    assert abs(torch.linalg.det(u).mean()) < 0.06
    # Under Haar measure E tr(U) = 0, E tr(U)² = 1 and E u_ij² = 1/n; QR without its sign correction fails the first.
    trace = torch.diagonal(u, dim1=-2, dim2=-1).sum(-1)
    assert abs(trace.mean()) < 0.06
    assert abs(trace.square().mean() - 1) < 0.12
    assert torch.allclose(u.square().mean(0), torch.full((n, n), 1 / n, dtype=u.dtype), atol=0.02)


@pytest.mark.parametrize("draw", [scornn_packed, henaff_rotations, haar_orthogonal])
def test_a_generator_makes_the_draw_repeatable(draw: object) -> None:
    assert callable(draw)
    first, again, other = (draw(7, (2,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"packed must have n\(n-1\)/2=6 .* for n=4, got shape \(5,\)"):
        unpack(torch.zeros(5), 4)
    with pytest.raises(ValueError, match=r"skew must be square.* got shape \(3, 4\)"):
        pack(torch.zeros(3, 4))
    with pytest.raises(TypeError, match=r"skew must be a torch.Tensor, got ndarray"):
        pack(np.zeros((2, 2)))  # type: ignore[arg-type]
