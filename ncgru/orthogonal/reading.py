"""Reading U of a packed A through its followed inverse: the fused way where kernels can run, else by two operations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ncgru._eager import simply_computes
from ncgru.orthogonal import cuda
from ncgru.orthogonal.inverse import cayley_read, follow_inverse, following, gradient_of


class Reading(NamedTuple):
    """What is read: U of the packed A's, by a state that is brought up to date first; see `follow_inverse`."""

    packed: Tensor
    state: cuda.State
    method: str
    order: int
    reset_every: int


def read(reading: Reading) -> Tensor:
    """U of the packed A's; see `cayley_read`.

    The fused way is for tensors that simply hold numbers. Whatever else there may be, while a program is traced,
    compiled, exported or transformed, goes to the operations, which torch knows.
    """
    packed, state, method, order, reset_every = reading
    matrix: Tensor
    if simply_computes(packed) and cuda.usable(packed, state):
        if packed.requires_grad and torch.is_grad_enabled():
            matrix, _ = _FusedRead.apply(packed, reading)  # type: ignore[no-untyped-call]
        else:
            matrix, _ = follow(reading)
    else:
        follow_inverse(packed.detach(), *state, method, order, reset_every)
        matrix, _ = cayley_read(packed, state.inverse, state.matrix, state.signs)
    return matrix


def follow(reading: Reading) -> tuple[Tensor, Tensor]:
    """Copies of U and of the inverse, after bringing the state up to date, by kernels."""
    kernels = cuda.kernels(reading.state.matrix.shape[-1], reading.packed.get_device())
    with following:
        copies = kernels.follow(*reading)
    torch.autograd.graph.increment_version(reading.state.written)  # of what autograd may have saved elsewhere
    return copies


def gradient_in_packed(grad_matrix: Tensor, matrix: Tensor, inverse: Tensor, signs: Tensor) -> Tensor:
    """The gradient in the packed A's, of that in the U's, by kernels; `matrix` and `inverse` are from `follow`."""
    kernels = cuda.kernels(matrix.shape[-1], matrix.get_device())
    return kernels.gradient(grad_matrix.contiguous(), matrix, inverse, signs)


class _FusedRead(torch.autograd.Function):
    """`follow_inverse` and `cayley_read` in one, without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, reading: Reading) -> tuple[Tensor, Tensor]:
        # `packed` stands here once more, for autograd: what is in a tuple it does not see.
        matrix, inverse = follow(reading)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(matrix, inverse, reading.state.signs)
        return matrix, inverse

    @staticmethod
    def backward(ctx: Any, grad_matrix: Tensor | None, grad_inverse: Tensor | None) -> tuple[Tensor | None, None]:
        matrix, inverse, signs = ctx.saved_tensors
        if (
            torch.is_grad_enabled()
            or grad_matrix is None
            or grad_inverse is not None
            or not simply_computes(grad_matrix)
        ):
            return gradient_of(grad_matrix, grad_inverse, matrix, inverse, signs), None
        return gradient_in_packed(grad_matrix, matrix, inverse, signs), None
