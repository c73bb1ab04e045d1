"""Reading U of a packed A through its followed inverse: the fused way where kernels can run, else by two operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ncgru._eager import simply_computes
from ncgru.orthogonal import cuda
from ncgru.orthogonal.inverse import cayley_read, follow_inverse, following, gradient_of


def read(packed: Tensor, state: cuda.State, method: str, order: int, reset_every: int) -> Tensor:
    """U of the packed A's, after bringing the state up to date with them; see `follow_inverse` and `cayley_read`.

    The fused way is for tensors that simply hold numbers. Whatever else there may be, while a program is traced,
    compiled, exported or transformed, goes to the operations, which torch knows.
    """
    matrix: Tensor
    if simply_computes(packed) and cuda.usable(packed, state):
        if packed.requires_grad and torch.is_grad_enabled():
            matrix, _ = _FusedRead.apply(packed, state, method, order, reset_every)  # type: ignore[no-untyped-call]
        else:
            matrix, _ = _follow(packed, state, method, order, reset_every)
    else:
        follow_inverse(packed.detach(), *state, method, order, reset_every)
        matrix, _ = cayley_read(packed, state.inverse, state.matrix, state.signs)
    return matrix


def _follow(packed: Tensor, state: cuda.State, method: str, order: int, reset_every: int) -> tuple[Tensor, Tensor]:
    kernels = cuda.kernels(state.matrix.shape[-1], packed.get_device())
    with following:
        copies = kernels.follow(packed, state, method, order, reset_every)
    torch.autograd.graph.increment_version(state.written)  # of what autograd may have saved elsewhere
    return copies


class _FusedRead(torch.autograd.Function):
    """`follow_inverse` and `cayley_read` in one, without torch's dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, packed: Tensor, state: cuda.State, method: str, order: int, reset_every: int
    ) -> tuple[Tensor, Tensor]:
        matrix, inverse = _follow(packed, state, method, order, reset_every)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(matrix, inverse, state.signs)
        return matrix, inverse

    @staticmethod
    def backward(ctx: Any, grad_matrix: Tensor | None, grad_inverse: Tensor | None) -> tuple[Tensor | None, ...]:
        matrix, inverse, signs = ctx.saved_tensors
        if (
            torch.is_grad_enabled()
            or grad_matrix is None
            or grad_inverse is not None
            or not simply_computes(grad_matrix)
        ):
            gradient = gradient_of(grad_matrix, grad_inverse, matrix, inverse, signs)
        else:
            kernels = cuda.kernels(matrix.shape[-1], matrix.get_device())
            gradient = kernels.gradient(grad_matrix.contiguous(), matrix, inverse, signs)
        return gradient, None, None, None, None
