"""The scaled Cayley map U = (I+A)^-1 (I-A) D between skew-symmetric A and orthogonal U, and its inverse for every U.

D is a diagonal of ±1. Without it a U with eigenvalue -1 has no A, and one near it has a huge one. With a fitting D
every orthogonal U has an A whose entries are at most 1 in size (Kahan, 2006). `inverse_cayley` finds a D with entries
of at most √2, which is as good in practice and takes at most n corrections:

1. Eliminate U + D without pivoting and choose d_k when its turn comes: the sign of the k-th diagonal element that
   elimination has left of U. So |pivot k| = |u_kk| + 1 >= 1, hence |det(U + D)| >= 1: with C = UD, the matrix
   I + C = (U + D) D is regular.
2. A = (I-C)(I+C)^-1. Note I + A = 2 (I+C)^-1, so a large A means an I + C near to singular.
3. While some |a_ij| > √2, flip d_i and d_j. For any x let p = (I+C) x and q = (I-C) x, so that q = Ap. Flipping
   J = {i, j} replaces C by CF with F = diag(±1), -1 on J. Take Fx in the place of x: p' = Fx + Cx and q' = Fx - Cx,
   which is (p, q) outside J and (p'_J, q'_J) = (-q_J, -p_J) on it. Solving q = Ap for the exchanged parts (K the rest):

       A'_JJ = A_JJ^-1            A'_JK = A_JJ^-1 A_JK
       A'_KJ = -A_KJ A_JJ^-1      A'_KK = A_KK - A_KJ A_JJ^-1 A_JK          (a rank-2 update, O(n²))

   and |det(I+C')| = |det A_JJ| |det(I+C)| = a_ij² |det(I+C)|. A determinant of at least 1 (step 1) that at least
   doubles with each flip and never exceeds 2^n (C is orthogonal) allows at most n flips.
4. Compute A once more from the final D, and keep its skew part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ncgru import _checks
from ncgru.orthogonal.skew import require_square

# Entries of A beyond this are worth another D. √2 bounds the number of flips; the slack keeps rounding from flipping.
LARGEST_ENTRY = math.sqrt(2.0) * (1.0 + 1e-9)


def cayley(skew: Tensor, signs: Tensor | None = None) -> Tensor:
    """The scaled Cayley map U = (I+A)^-1 (I-A) D, differentiable any number of times.

    Args:
        skew: skew-symmetric A [..., n, n] in float32 or float64; that it is skew-symmetric is not checked.
        signs: the diagonal of D, ±1, [n] or [..., n]; None stands for D = I.

    Returns:
        The orthogonal U [..., n, n].

    Raises:
        TypeError: `skew` is not a float32 or float64 tensor.
        ValueError: `skew` is not square, or `signs` does not fit it.
    """
    require_real("skew", skew)
    require_square("skew", skew)
    n = skew.shape[-1]
    identity = torch.eye(n, dtype=skew.dtype, device=skew.device)
    matrix: Tensor = torch.linalg.solve(identity + skew, identity - skew)
    if signs is None:
        return matrix
    _checks.tensor("signs", signs, "pass the diagonal of D, one ±1 a column")
    if signs.ndim < 1 or signs.shape[-1] != n:
        raise ValueError(f"signs must end in n={n} numbers, got shape {tuple(signs.shape)}; pass the diagonal of D")
    matrix = matrix * signs.to(matrix).unsqueeze(-2)
    return matrix


def inverse_cayley(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Skew-symmetric A and signs with cayley(A, signs) = `matrix`, for every orthogonal matrix; |a_ij| <= √2.

    Args:
        matrix: orthogonal U [..., n, n] of either determinant, float32 or float64. Works in float64 inside.

    Returns:
        A [..., n, n] and the diagonal of D [..., n], in the dtype of `matrix`.

    Raises:
        TypeError: `matrix` is not a float32 or float64 tensor.
        ValueError: `matrix` is not square, not finite or not orthogonal.
    """
    require_real("matrix", matrix)
    require_square("matrix", matrix)
    require_finite("matrix", matrix)
    wide = matrix.detach().to(torch.float64)
    defect = orthogonality_defect(wide)
    limit = orthogonality_limit(matrix)
    if not bool((defect <= limit).all()):
        raise ValueError(
            f"matrix must be orthogonal: its Frobenius norm of U'U - I must be at most {limit:.1e}, "
            f"got {defect.max().item():.3e}; pass nearest_orthogonal(matrix)[0]"
        )
    n = matrix.shape[-1]
    solved = [_inverse_of_one(u) for u in wide.reshape(-1, n, n)]
    if not solved:
        return torch.zeros_like(matrix), torch.ones_like(matrix[..., 0])
    skew = torch.stack([a for a, _ in solved]).reshape(matrix.shape)
    signs = torch.stack([d for _, d in solved]).reshape(matrix.shape[:-1])
    return skew.to(matrix), signs.to(matrix)


def nearest_orthogonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The orthogonal matrix nearest to `matrix` in the Frobenius norm, and how far it is.

    The orthogonal factor of the polar decomposition, from a singular value decomposition in float64. A singular matrix
    has more than one nearest orthogonal matrix; one of them is returned.

    Args:
        matrix: [..., n, n] in float32 or float64.

    Returns:
        Q [..., n, n] and the distance ‖matrix - Q‖_F [...], in the dtype of `matrix`.

    Raises:
        TypeError: `matrix` is not a float32 or float64 tensor.
        ValueError: `matrix` is not square or not finite.
    """
    require_real("matrix", matrix)
    require_square("matrix", matrix)
    require_finite("matrix", matrix)
    left, stretch, right = torch.linalg.svd(matrix.detach().to(torch.float64))
    distance = torch.linalg.vector_norm(stretch - 1, dim=-1)
    return (left @ right).to(matrix), distance.to(matrix)


def inverse_for_signs(matrix: Tensor, signs: Tensor) -> Tensor:
    """(I-C)(I+C)^-1 = 2(I+C)^-1 - I with C = UD for given signs, NaN where I + C is singular; no checks.

    It is skew-symmetric but for rounding, unless I + C is so near to singular that rounding is all there is. Its
    largest entry shows that; the skew part alone would hide it, as a singular I + C blows up the symmetric part.
    """
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    inverse, info = torch.linalg.inv_ex(identity + matrix * signs.unsqueeze(-2))
    return torch.where((info == 0)[..., None, None], 2 * inverse - identity, math.nan)


def skew_part(matrix: Tensor) -> Tensor:
    """(M - M')/2: A without rounding, and without what a slightly non-orthogonal U has put in its symmetric part."""
    difference = matrix - matrix.mT
    return difference / 2


def orthogonality_defect(matrix: Tensor) -> Tensor:
    """‖U'U - I‖_F of each matrix [...]."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    defect: Tensor = torch.linalg.matrix_norm(matrix.mT @ matrix - identity)
    return defect


def orthogonality_limit(matrix: Tensor) -> float:
    """The largest defect that still passes as rounding in the dtype of `matrix`: half of its digits must be right."""
    return math.sqrt(torch.finfo(matrix.dtype).eps) * math.sqrt(matrix.shape[-1])


def require_real(name: str, matrix: Tensor) -> None:
    """Raise unless `matrix` is a float32 or float64 tensor."""
    _checks.tensor(name, matrix, "pass a float32 or float64 tensor")
    if matrix.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must be float32 or float64, got {matrix.dtype}; convert it with .float() or .double()")


def require_finite(name: str, matrix: Tensor) -> None:
    """Raise if `matrix` holds NaN or infinity."""
    bad = int((~torch.isfinite(matrix)).sum())
    if bad:
        raise ValueError(
            f"{name} must be finite, got {bad} NaN or infinite of {matrix.numel()} entries; repair it first"
        )


def _inverse_of_one(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A and the diagonal of D for one orthogonal U [n, n] in float64: the four steps above."""
    signs = _greedy_signs(matrix)
    skew = skew_part(inverse_for_signs(matrix, signs))
    n = len(signs)
    for _ in range(n):
        largest, place = skew.abs().flatten().max(0)
        if largest <= LARGEST_ENTRY:
            break
        pair = torch.stack((place // n, place % n))
        skew = _flip(skew, pair)
        signs[pair] = -signs[pair]
    return skew_part(inverse_for_signs(matrix, signs)), signs


def _greedy_signs(matrix: Tensor) -> Tensor:
    """Step 1: the signs that make every pivot of U + D at least 1 in size."""
    rest = matrix.clone()
    signs = torch.ones_like(matrix[0])
    for k in range(len(signs)):
        signs[k] = torch.where(rest[k, k] < 0, -1.0, 1.0)
        pivot = rest[k, k] + signs[k]
        rest[k + 1 :, k + 1 :] -= torch.outer(rest[k + 1 :, k], rest[k, k + 1 :] / pivot)
    return signs


def _flip(skew: Tensor, pair: Tensor) -> Tensor:
    """Step 3: the exchange step of A for two flipped signs."""
    i, j = pair
    block = skew.new_zeros(2, 2)
    block[0, 1] = -1 / skew[i, j]
    block[1, 0] = 1 / skew[i, j]  # A_JJ^-1
    rows = block @ skew[pair]  # A_JJ^-1 A_J: identity in its columns J
    flipped = skew - skew[:, pair] @ rows
    flipped[pair] = rows
    flipped[:, pair] = -rows.mT
    flipped[pair.unsqueeze(1), pair.unsqueeze(0)] = block
    return flipped
