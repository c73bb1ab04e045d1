"""The state that the kernels bring up to date, its layout in the memory of a GPU, and the way through a batch of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ncgru.orthogonal.skew import packed_size

METHOD_NUMBERS = {"exact": 0, "neumann": 1, "hyperpower": 2}
"""As in matrices.cuh."""


class State(NamedTuple):
    """The buffers of a `ScaledCayley`, in the order of `follow_inverse`'s arguments."""

    anchor: Tensor
    inverse: Tensor
    matrix: Tensor
    signs: Tensor
    updates: Tensor
    refreshes: Tensor
    seal: Tensor

    @property
    def written(self) -> tuple[Tensor, ...]:
        """What following writes to: all but D, which backward passes have saved."""
        return (self.anchor, self.inverse, self.matrix, self.updates, self.refreshes, self.seal)

    def part(self, first: int, count: int) -> State:
        """Some matrices of the flattened batch, as views."""
        n = self.matrix.shape[-1]
        flat = (
            self.anchor.view(self.updates.numel(), -1),
            self.inverse.view(-1, n, n),
            self.matrix.view(-1, n, n),
            self.signs.view(-1, n),
            self.updates.view(-1),
            self.refreshes.view(-1),
            self.seal.view(-1),
        )
        return State(*(tensor[first : first + count] for tensor in flat))


class Kernels(ABC):
    """What brings a batch of states up to date and takes their gradients, at most so many matrices at a time.

    Args:
        n: rows of a matrix.
        most: matrices at a time.
    """

    def __init__(self, n: int, most: int) -> None:
        self.n = n
        self._most = most

    def follow(self, packed: Tensor, state: State, method: str, order: int, reset_every: int) -> tuple[Tensor, Tensor]:
        """Bring the state up to date with `packed`; copies of U and of the inverse."""
        packed = packed.contiguous()
        matrix, inverse = torch.empty_like(state.matrix), torch.empty_like(state.inverse)
        options = METHOD_NUMBERS[method], order, reset_every
        count, n = state.updates.numel(), self.n
        if count <= self._most:
            self._follow_part((packed, *state, matrix, inverse), count, options)
            return matrix, inverse
        flat = packed.view(count, -1), matrix.view(count, n, n), inverse.view(count, n, n)
        for first in range(0, count, self._most):
            part = state.part(first, self._most)
            vectors, us, inverses = (tensor[first : first + self._most] for tensor in flat)
            self._follow_part((vectors, *part, us, inverses), vectors.shape[0], options)
        return matrix, inverse

    def gradient(self, grad_matrix: Tensor, matrix: Tensor, inverse: Tensor, signs: Tensor) -> Tensor:
        """The gradient in the packed A's, of the gradient in the U's; all contiguous."""
        n = self.n
        count = matrix.numel() // (n * n)
        gradient = matrix.new_empty(*matrix.shape[:-2], packed_size(n))
        operands = grad_matrix, matrix, inverse, signs, gradient
        if count <= self._most:
            self._gradient_part(operands, count)
            return gradient
        flat = [tensor.view(count, -1) for tensor in operands]
        for first in range(0, count, self._most):
            part = [tensor[first : first + self._most] for tensor in flat]
            self._gradient_part(part, part[0].shape[0])
        return gradient

    @abstractmethod
    def _follow_part(self, tensors: Sequence[Tensor], count: int, options: Sequence[int]) -> None:
        """`follow` for so many matrices: packed A's, the state, and where copies of U and of the inverse go."""

    @abstractmethod
    def _gradient_part(self, operands: Sequence[Tensor], count: int) -> None:
        """`gradient` for so many matrices: its arguments, and where the gradient goes."""
