"""Large matrices: products by torch in float64, between kernels that prepare and conclude."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ncgru import _cuda
from ncgru.orthogonal.cuda.state import METHOD_NUMBERS, State
from ncgru.orthogonal.skew import packed_size

# As in large.cu and matrices.cuh.
THREADS, PROBES, MOST_MATRICES, STAGED, REFINING_ORDER, NARROW_TILE = 512, 8, 16, 1024, 2, 32
SHARED = STAGED * PROBES * 4
ROOMS = 5
"""Matrices of float64 that the update of one matrix needs at a time."""

MOST_WORKSPACE = 1 << 25
"""Of a batch as many matrices are followed at a time as keep each room within this many float64 (256 MiB)."""


class LargeKernels:
    """The kernels of large.cu for matrices of n rows on one device."""

    def __init__(self, n: int, index: int) -> None:
        self.n = n
        program = _cuda.program("ncgru.orthogonal.cuda", "large.cu", {})
        self._survey = program.kernel("survey_large", index)
        self._conclude = program.kernel("conclude_large", index)
        self._widen = program.kernel("widen_large", index)
        self._narrow = program.kernel("narrow_large", index)
        multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self._blocks = min(self._conclude.resident_blocks(THREADS, SHARED), multiprocessors)
        self._survey_blocks = min(2 * multiprocessors, -(-n * n // THREADS))
        self._most = min(MOST_MATRICES, max(1, MOST_WORKSPACE // (n * n)))

    def follow(self, packed: Tensor, state: State, method: str, order: int, reset_every: int) -> tuple[Tensor, Tensor]:
        """Bring the state up to date with `packed`; copies of U and of the inverse."""
        packed = packed.contiguous()
        matrix, inverse = torch.empty_like(state.matrix), torch.empty_like(state.inverse)
        count, n = state.updates.numel(), self.n
        if count <= self._most:
            self._follow_part(packed, state, matrix, inverse, count, method, order, reset_every)
            return matrix, inverse
        flat = packed.view(count, -1), matrix.view(count, n, n), inverse.view(count, n, n)
        for first in range(0, count, self._most):
            part = state.part(first, self._most)
            vectors, us, inverses = (tensor[first : first + self._most] for tensor in flat)
            self._follow_part(vectors, part, us, inverses, len(vectors), method, order, reset_every)
        return matrix, inverse

    def _follow_part(
        self,
        packed: Tensor,
        state: State,
        matrix: Tensor,
        inverse: Tensor,
        count: int,
        method: str,
        order: int,
        reset_every: int,
    ) -> None:
        n = self.n
        rooms = torch.empty(ROOMS, count, n, n, dtype=torch.float64, device=packed.device)
        # One allocation, of words of 8 bytes: what is probed, sizes, notes, and the counter of barriers.
        lengths = count * n * PROBES, count + 2 * n, count * 2 * self._survey_blocks, count * self._blocks, 1
        scratch = torch.empty(sum(lengths), dtype=torch.float64, device=packed.device)
        probed, sizes, notes, more_notes, counter = [
            (scratch, 8 * before) for before in itertools.accumulate(lengths[:-1], initial=0)
        ]
        system, wide, residual, candidate, spare = rooms.unbind()
        literal = method == "neumann"
        other = spare if literal else residual
        self._survey.launch(
            (self._survey_blocks, count, 1),
            (THREADS, 1, 1),
            *(packed, state.anchor, state.inverse, state.matrix, state.signs),
            *(system, wide, other, probed, notes, counter, n, int(literal)),
        )
        if literal:
            candidate, spare = _neumann(system, wide, residual, candidate, spare, order)
        else:
            order_taken = REFINING_ORDER if method == "exact" else order
            candidate, spare = _hyperpower(system, wide, residual, candidate, spare, order_taken)
        self._conclude.launch(
            (self._blocks, 1, 1),
            (THREADS, 1, 1),
            *(packed, *state, matrix, inverse, system, wide, residual, candidate, spare, probed, sizes, notes),
            *(more_notes, counter, n, count, self._survey_blocks),
            *(METHOD_NUMBERS[method], order, reset_every),
            shared=SHARED,
            cooperative=True,
        )

    def gradient(self, grad_matrix: Tensor, matrix: Tensor, inverse: Tensor, signs: Tensor) -> Tensor:
        """The gradient in the packed A's, of the gradient in the U's; all contiguous."""
        n = self.n
        count = matrix.numel() // (n * n)
        gradient = matrix.new_empty(*matrix.shape[:-2], packed_size(n))
        if count <= self._most:
            self._gradient_part(count, grad_matrix, matrix, inverse, signs, gradient)
            return gradient
        operands = [tensor.view(count, -1) for tensor in (grad_matrix, matrix, inverse, signs, gradient)]
        for first in range(0, count, self._most):
            part = [tensor[first : first + self._most] for tensor in operands]
            self._gradient_part(len(part[0]), *part)
        return gradient

    def _gradient_part(
        self, count: int, grad_matrix: Tensor, matrix: Tensor, inverse: Tensor, signs: Tensor, gradient: Tensor
    ) -> None:
        n = self.n
        rooms = torch.empty(4, count, n, n, dtype=torch.float64, device=gradient.device)
        self._widen.launch(
            (self._survey_blocks, 1, 1), (THREADS, 1, 1), grad_matrix, matrix, inverse, signs, rooms, n, count
        )
        grad, sum_of_both, inverses, right = rooms.unbind()
        torch.bmm(grad, sum_of_both.mT, out=right)
        v = torch.bmm(inverses.mT, right, out=grad)
        tiles = -(-n // NARROW_TILE)
        self._narrow.launch((tiles, tiles, count), (THREADS, 1, 1), v, gradient, n)


def _hyperpower(
    system: Tensor, wide: Tensor, residual: Tensor, target: Tensor, spare: Tensor, order: int
) -> tuple[Tensor, Tensor]:
    """Ã (I + R + ... + R^p) and a free room; `residual` becomes R. `system` is -(I+A), `wide` Ã, `residual` I."""
    residual.baddbmm_(system, wide)
    total = residual
    for _ in range(order - 1):
        total = torch.baddbmm(residual, residual, total, out=target)
        target, spare = spare, target
    return torch.baddbmm(wide, wide, total, out=target), spare


def _neumann(
    system: Tensor, wide: Tensor, ratio: Tensor, target: Tensor, step: Tensor, order: int
) -> tuple[Tensor, Tensor]:
    """Algorithm 1's inverse and a free room; `ratio` becomes U before its signs. `step` is old A - new A."""
    torch.bmm(wide, step, out=ratio)
    total, spare = wide, step
    for _ in range(order):
        total = torch.baddbmm(wide, ratio, total, out=target)
        target, spare = spare, target
    torch.baddbmm(total, total, system, beta=2, out=ratio)  # Ã (I-A) = 2Ã - Ã (I+A)
    return total, target
