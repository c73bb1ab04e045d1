"""Following Ã = (I+A)^-1, and with it U = (I+A)^-1 (I-A) D, while an optimiser moves A.

The step is measured: `anchor` is the A that the stored inverse belongs to, so whatever moved A (any optimiser,
clipping, weight decay, a loaded file, an edit by hand) is followed. With δA = anchor - A:

    neumann     Ã <- (I + M + ... + M^p) Ã,  M = Ã δA                     Algorithm 1, literally; then U = Ã (I-A) D
    hyperpower  Ã <- Ã (I + R + ... + R^p),  R = I - (I+A) Ã              then U = (2Ã - I) D
    exact       Ã <- (I+A)^-1                                             then U = (2Ã - I) D

Where the old Ã is exact, R = δA Ã and the two series are equal term by term. Where it is not, R sees its error too and
takes it away. Either way the error of the new inverse is of order p+1 in the step.

The two formulas for U are equal too, because I - A = 2I - (I+A). In float32 the second is better by up to two orders
of magnitude where A is large, and saves a product. Algorithm 1 keeps the first, as it is written.

Rounding: R is the difference of two nearly equal matrices, so it is formed in float64 (and exact inverses are taken in
float64) and rounded once. This makes float32 followers as accurate as a rounded exact inverse, for one wider product.

The guard: a series that has left the range where it converges is replaced by the exact inverse, and counted. The size
of a matrix M is estimated in O(n²) with a fixed block Z [n, 8] of signs that look random, scaled so that the mean of
‖MZ‖_F² is ‖M‖_F²: N(M) = ‖(MZ)'(MZ)‖_F^(1/2), about ‖M‖₂ where one direction dominates and 0.6 ‖M‖_F where none does.

    hyperpower  R^(p+1) is the residual that the step leaves: N of it must be within two roundings.
    neumann     the residual is measured after the step. Algorithm 1 promises no more than its series gives, errors
                of all steps since the last reset included, so only a breakdown is caught.

Whatever is not within its tolerance, NaN included, counts as outside.

This file is the specification. On GPUs that can run them, the kernels of `ncgru/orthogonal/cuda` do the same for
float32.
"""

import functools
import math
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ncgru.orthogonal import cuda
from ncgru.orthogonal.skew import pack, unpack

METHODS = ("exact", "neumann", "hyperpower")

PROBES = 8
# Of the residual left behind, in roundings of the dtype.
HYPERPOWER_TOLERANCE = 2.0
# Of the residual measured after the step.
NEUMANN_TOLERANCE = 0.1


def neumann_series(inverse: Tensor, step: Tensor, order: int) -> Tensor:
    """Algorithm 1: sum over i <= order of (Ã δA)^i Ã, with δA = `step` = old A - new A. Takes order+1 products."""
    ratio = inverse @ step
    total = inverse
    for _ in range(order):
        total = inverse + ratio @ total
    return total


def hyperpower_series(inverse: Tensor, residual: Tensor, order: int) -> Tensor:
    """Sum over i <= order of Ã R^i, with R = `residual` of the new A. Takes `order` products; R cost another."""
    total = residual
    for _ in range(order - 1):
        total = residual + residual @ total
    return inverse + inverse @ total


def residual_of(inverse: Tensor, skew: Tensor) -> Tensor:
    """R = I - (I+A) Ã, formed in float64 and rounded to the dtype of `inverse`."""
    wide = _wide(inverse)
    right = inverse.to(wide)
    product = right + skew.to(wide) @ right
    return (_identity(right) - product).to(inverse.dtype)


def exact_inverse(skew: Tensor) -> Tensor:
    """(I+A)^-1, solved in float64 and rounded to the dtype of `skew`; NaN in, NaN out, no host synchronisation."""
    system = skew.to(_wide(skew))
    inverse: Tensor = torch.linalg.inv_ex(_identity(system) + system, check_errors=False).inverse
    return inverse.to(skew.dtype)


def orthogonal_from_inverse(inverse: Tensor, skew: Tensor, signs: Tensor, method: str) -> Tensor:
    """U of the method, from Ã, A and the diagonal of D."""
    identity = _identity(inverse)
    cayley = inverse @ (identity - skew) if method == "neumann" else 2 * inverse - identity
    return cayley * signs.unsqueeze(-2)


_FOLLOWED = ("anchor", "inverse", "matrix", "updates", "refreshes", "seal")
following = threading.Lock()
"""Threads that read one module at once must not see each other's half-written state."""


@torch.library.custom_op("ncgru::follow_inverse", mutates_args=_FOLLOWED)
def follow_inverse(
    packed: Tensor,
    anchor: Tensor,
    inverse: Tensor,
    matrix: Tensor,
    signs: Tensor,
    updates: Tensor,
    refreshes: Tensor,
    seal: Tensor,
    method: str,
    order: int,
    reset_every: int,
) -> None:
    """Bring the stored inverse and orthogonal matrix of every A that has moved up to date, in place.

    An A equal to its anchor keeps its state bit for bit, and nothing is counted. On an accelerator nothing waits for
    the host, so the call can be captured in a CUDA graph; on the CPU work that no matrix needs is left out.

    The seal shows whether somebody else wrote to the state: averaging the buffers of two models, or rounding them,
    treats A and its anchor alike and spoils the rest. A broken seal counts like a broken series.

    Args:
        packed: the present A's, [..., m].
        anchor: the A's that the stored inverses belong to, [..., m].
        inverse: the stored inverses, [..., n, n].
        matrix: the stored orthogonal matrices, [..., n, n].
        signs: the diagonals of the D's, [..., n].
        updates: how often each A has moved, int64 [...].
        refreshes: how often the guard has replaced each inverse by the exact one, int64 [...].
        seal: `seal_of` the state as it was last left here, int64 [...].
        method: one of METHODS.
        order: p of the series, at least 1.
        reset_every: the k-th update is exact where k is a multiple of this; 0 for never. Not counted in `refreshes`.
    """
    state = cuda.State(anchor, inverse, matrix, signs, updates, refreshes, seal)
    if cuda.usable(packed, state):
        with following:
            cuda.kernels(inverse.shape[-1], packed.get_device()).follow(packed, state, method, order, reset_every)
        return
    on_host = _on_host(packed)
    with following, no_autocast(packed.device):
        tampered = seal != seal_of(anchor, inverse, matrix, signs)
        moved = (packed != anchor).any(-1)  # NaN differs from itself: an A of NaN never passes for followed
        changed = moved | tampered
        if on_host and not bool(changed.any()):
            return
        updates += moved
        skew = unpack(packed, inverse.shape[-1])
        if method == "exact":
            exact_now, followed = changed, inverse
            refreshes += tampered
        else:
            followed, sound = _series(packed, anchor, inverse, skew, method, order)
            due = moved & (updates % reset_every == 0) if reset_every else torch.zeros_like(moved)
            broken = (moved & ~due & ~sound) | tampered
            refreshes += broken
            exact_now = due | broken
        if not on_host or bool(exact_now.any()):
            followed = torch.where(exact_now[..., None, None], exact_inverse(skew), followed)
        orthogonal = orthogonal_from_inverse(followed, skew, units(signs), method)
        anchor.copy_(torch.where(changed[..., None], packed, anchor))
        inverse.copy_(torch.where(changed[..., None, None], followed, inverse))
        matrix.copy_(torch.where(changed[..., None, None], orthogonal, matrix))
        seal.copy_(seal_of(anchor, inverse, matrix, signs))


@follow_inverse.register_fake
def _follow_inverse_fake(
    packed: Tensor,
    anchor: Tensor,
    inverse: Tensor,
    matrix: Tensor,
    signs: Tensor,
    updates: Tensor,
    refreshes: Tensor,
    seal: Tensor,
    method: str,
    order: int,
    reset_every: int,
) -> None:
    """Everything happens in place: there is no output whose shape would be wanted."""


def seal_of(anchor: Tensor, inverse: Tensor, matrix: Tensor, signs: Tensor) -> Tensor:
    """A sum over the bits of a state, one int64 for each matrix: other bits, another sum, in all likelihood."""
    word = torch.int64 if anchor.dtype == torch.float64 else torch.int32
    parts = (anchor, signs, inverse.flatten(-2), matrix.flatten(-2))
    sums = [part.contiguous().view(word).sum(-1, dtype=torch.int64) for part in parts]
    return sums[0] * 3 + sums[1] * 5 + sums[2] * 7 + sums[3] * 11


@torch.library.custom_op("ncgru::cayley_read", mutates_args=())
def cayley_read(packed: Tensor, inverse: Tensor, matrix: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """U and Ã as functions of the packed A: copies of what `follow_inverse` has stored for it, with their gradient.

    With G and H the gradients of the loss in U and Ã, dU = -Ã dA (U + D) and dÃ = -Ã dA Ã give

        V = Ã' (G (D + U') + H Ã'),    gradient in A = V' - V

    (the paper's formula where H = 0), read off above the diagonal. As it is written in U and Ã themselves, which are
    outputs of this operation, it can be differentiated again.
    """
    return matrix.clone(), inverse.clone()


@cayley_read.register_fake
def _cayley_read_fake(packed: Tensor, inverse: Tensor, matrix: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(matrix), torch.empty_like(inverse)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, inputs[3])


def _cayley_read_backward(
    ctx: Any, grad_matrix: Tensor | None, grad_inverse: Tensor | None
) -> tuple[Tensor | None, None, None, None]:
    matrix, inverse, signs = ctx.saved_tensors
    if (
        matrix.device.type == "cuda"
        and grad_matrix is not None
        and grad_inverse is None
        and not torch.is_grad_enabled()
    ):
        return cayley_gradient(grad_matrix, matrix, inverse, signs), None, None, None
    return gradient_of(grad_matrix, grad_inverse, matrix, inverse, signs), None, None, None


def gradient_of(
    grad_matrix: Tensor | None, grad_inverse: Tensor | None, matrix: Tensor, inverse: Tensor, signs: Tensor
) -> Tensor | None:
    """The gradient in the packed A, from those in U and Ã; see `cayley_read`. It can be differentiated."""
    with no_autocast(matrix.device):
        right = None
        if grad_matrix is not None:
            right = grad_matrix @ (matrix + torch.diag_embed(units(signs))).mT
        if grad_inverse is not None:
            through_inverse = grad_inverse @ inverse.mT
            right = through_inverse if right is None else right + through_inverse
        if right is None:
            return None
        v = inverse.mT @ right
        return pack(v.mT - v)


@torch.library.custom_op("ncgru::cayley_gradient", mutates_args=())
def cayley_gradient(grad_matrix: Tensor, matrix: Tensor, inverse: Tensor, signs: Tensor) -> Tensor:
    """`gradient_of` where nothing is to be differentiated again: by the kernels where they can run."""
    if cuda.usable(grad_matrix, (matrix, inverse, signs)):
        chosen = cuda.kernels(matrix.shape[-1], matrix.get_device())
        return chosen.gradient(grad_matrix.contiguous(), matrix, inverse, signs)
    gradient = gradient_of(grad_matrix, None, matrix, inverse, signs)
    assert gradient is not None
    return gradient


@cayley_gradient.register_fake
def _cayley_gradient_fake(grad_matrix: Tensor, matrix: Tensor, inverse: Tensor, signs: Tensor) -> Tensor:
    n = matrix.shape[-1]
    return matrix.new_empty(*matrix.shape[:-2], n * (n - 1) // 2)


cayley_read.register_autograd(_cayley_read_backward, setup_context=_save_for_backward)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast leaves the products of `device` alone: orthogonality needs all digits."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _series(
    packed: Tensor, anchor: Tensor, inverse: Tensor, skew: Tensor, method: str, order: int
) -> tuple[Tensor, Tensor]:
    """The inverses after the series, and which of them the guard finds sound."""
    n = inverse.shape[-1]
    probes = _probes(n, inverse.dtype, inverse.device)
    if method == "neumann":
        followed = neumann_series(inverse, unpack(anchor - packed, n), order)
        probed = followed @ probes
        remainder = probes - probed - skew @ probed
        sound = _probed_norm(remainder) <= NEUMANN_TOLERANCE
        return followed, sound
    residual = residual_of(inverse, skew)
    remainder = probes
    for _ in range(order + 1):
        remainder = residual @ remainder
    sound = _probed_norm(remainder) <= HYPERPOWER_TOLERANCE * torch.finfo(inverse.dtype).eps
    if _on_host(inverse) and not bool(sound.any()):
        return inverse, sound  # all are about to be inverted exactly
    return hyperpower_series(inverse, residual, order), sound


def _probed_norm(probed: Tensor) -> Tensor:
    """The size of M from MZ [..., n, 8]: ‖(MZ)'(MZ)‖_F^(1/2)."""
    gram = probed.mT @ probed
    norm: Tensor = torch.linalg.matrix_norm(gram).sqrt()
    return norm


def _probes(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Z [n, 8]: signs that look random, scaled so that ‖MZ‖_F² estimates ‖M‖_F². On the CPU made once a size."""
    return _host_probes(n, dtype) if device.type == "cpu" else _make_probes(n, dtype, device)


@functools.lru_cache(maxsize=64)
def _host_probes(n: int, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return _make_probes(n, dtype, torch.device("cpu"))


def _make_probes(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """From a bit of k² times an odd constant: no generator state, no copy from the host, the same on every device."""
    k = torch.arange(1, n * PROBES + 1, device=device)
    bits = (k * k * 2654435761) >> 24 & 1
    signs = bits.to(dtype) * 2 - 1
    return signs.view(n, PROBES).div(math.sqrt(PROBES))


def _on_host(tensor: Tensor) -> bool:
    """Whether a look at a value costs nothing, so that work nobody needs can be left out."""
    return tensor.device.type == "cpu"


def units(signs: Tensor) -> Tensor:
    """±1, also where averaging the states of several models has left something between."""
    return torch.where(signs < 0, -1.0, 1.0).to(signs.dtype)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _wide(like: Tensor) -> torch.dtype:
    """float64 where the device has it."""
    return like.dtype if like.device.type == "mps" else torch.float64
