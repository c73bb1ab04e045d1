"""Skew-symmetric matrices as vectors of their n(n-1)/2 free numbers, and the initial values they may take.

Shapes: n matrix size, m = n(n-1)/2, `...` any number of batch dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ncgru import _checks

INITS = ("cayley", "henaff", "haar")


def packed_size(n: int) -> int:
    """How many free numbers a skew-symmetric n×n matrix has: n(n-1)/2."""
    return n * (n - 1) // 2


def _upper(n: int, device: torch.device) -> Tensor:
    """Positions of the strict upper triangle in a flattened n×n matrix, row by row."""
    rows, columns = torch.triu_indices(n, n, 1, device=device).unbind(0)
    return rows * n + columns  # [m]


def pack(skew: Tensor) -> Tensor:
    """The strict upper triangle of `skew` [..., n, n] as a vector [..., m], row by row.

    Only the upper triangle is read; that the lower one is its negative is not checked.
    """
    _checks.tensor("skew", skew, "pass a batch of square matrices")
    require_square("skew", skew)
    return skew.flatten(-2).index_select(-1, _upper(skew.shape[-1], skew.device))


def unpack(packed: Tensor, n: int) -> Tensor:
    """The skew-symmetric matrix A [..., n, n] with A[i,j] = a and A[j,i] = -a for i < j, from `packed` [..., m]."""
    _checks.tensor("packed", packed, "pass a vector of n(n-1)/2 numbers")
    if packed.ndim < 1 or packed.shape[-1] != packed_size(n):
        raise ValueError(
            f"packed must have n(n-1)/2={packed_size(n)} numbers in its last dimension for n={n}, "
            f"got shape {tuple(packed.shape)}; pack a {n}×{n} matrix"
        )
    batch = packed.shape[:-1]
    upper = packed.new_zeros(*batch, n * n).index_copy(-1, _upper(n, packed.device), packed)
    upper = upper.view(*batch, n, n)
    return upper - upper.mT


def require_square(name: str, matrix: Tensor) -> None:
    """Raise unless `matrix` is [..., n, n] with n at least 1."""
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2] or matrix.shape[-1] < 1:
        raise ValueError(
            f"{name} must be square, [..., n, n] with n at least 1, got shape {tuple(matrix.shape)}; "
            "only a square matrix can be orthogonal"
        )


def scornn_packed(n: int, batch: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
    """scoRNN's initial A, packed [..., m] in float64: n//2 skew 2×2 blocks on the diagonal, all else zero.

    A block with A[2j,2j+1] = -tan(s/2) is mapped to the rotation by s; s is uniform in (0, π/2).
    """
    angles = _uniform(0.0, math.pi / 2, (*batch, n // 2), generator)
    skew = torch.zeros(*batch, n, n, dtype=torch.float64, device=angles.device)
    even = torch.arange(0, n - 1, 2, device=angles.device)
    skew[..., even, even + 1] = -torch.tan(angles / 2)
    return pack(skew)


def henaff_rotations(n: int, batch: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
    """Henaff's initial U [..., n, n] in float64: n//2 rotations by angles uniform in (-π, π); 1 last if n is odd."""
    angles = _uniform(-math.pi, math.pi, (*batch, n // 2), generator)
    rotations = torch.eye(n, dtype=torch.float64, device=angles.device).repeat(*batch, 1, 1)
    even = torch.arange(0, n - 1, 2, device=angles.device)
    rotations[..., even, even] = rotations[..., even + 1, even + 1] = torch.cos(angles)
    rotations[..., even, even + 1] = torch.sin(angles)
    rotations[..., even + 1, even] = -torch.sin(angles)
    return rotations


def haar_orthogonal(n: int, batch: tuple[int, ...] = (), *, generator: torch.Generator | None = None) -> Tensor:
    """Random orthogonal matrices [..., n, n] in float64, uniform (Haar) over both determinants."""
    device = "cpu" if generator is None else generator.device
    gaussian = torch.randn(*batch, n, n, dtype=torch.float64, device=device, generator=generator)
    q: Tensor
    q, r = torch.linalg.qr(gaussian)
    # QR alone is not uniform: its signs are the algorithm's. With R's diagonal made positive, Q is unique and Haar.
    positive = torch.where(torch.diagonal(r, dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype)
    return q * positive.unsqueeze(-2)


def _uniform(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Uniform float64 numbers, drawn where the generator lives (else on the CPU, so that every device starts alike)."""
    device = "cpu" if generator is None else generator.device
    return low + (high - low) * torch.rand(*shape, dtype=torch.float64, device=device, generator=generator)
