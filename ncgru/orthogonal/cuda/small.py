"""Small matrices: the whole update in one launch, the whole gradient in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ncgru import _cuda
from ncgru.orthogonal.cuda.state import METHOD_NUMBERS, State
from ncgru.orthogonal.skew import packed_size

# As in small.cu and matrices.cuh.
GROUP, TILE, THREADS, PROBES = 8, 4, 512, 8
WIDEST_PANEL, MOST_SLICES, MOST_PARTIAL_BYTES = 16, 8, 64 << 10


class Shape(NamedTuple):
    """How a block cuts its work; see small.cu."""

    width: int
    slices: int
    chunk: int
    shared: int


def shape_of(n: int, shared_limit: int) -> Shape:
    """The cut for matrices of n rows in blocks with so much shared memory."""
    rows = -(-n // TILE) * TILE
    pitch = (n + 27) // 32 * 32 + 4
    width = min(WIDEST_PANEL, -(-n // (GROUP * TILE)) * TILE)
    slices = min(MOST_SLICES, THREADS // (rows // TILE * (width // TILE)))
    while True:
        # Parts of sums, a panel and block-wide sums in float64, a probed column; what is left is the stage.
        fixed = 8 * (slices * rows * width + n * width + THREADS // 32) + 4 * n * TILE
        chunk = min(-(-n // 8) * 8, (shared_limit - fixed) // (8 * pitch) // 8 * 8)
        if chunk >= min(n, 16) or slices == 1:
            break
        slices -= 1
    assert chunk >= 8, f"{shared_limit} bytes of shared memory are too few for n={n}"
    return Shape(width, slices, chunk, fixed + 8 * pitch * chunk)


def workspace_doubles(n: int) -> int:
    """How many float64 of room in global memory one matrix takes; see `update_of` in small.cu."""
    return n * n + 2 * n + 3 * GROUP + n * n + n * PROBES // 2


class SmallKernels:
    """The kernels of small.cu for matrices of n rows on one device."""

    def __init__(self, n: int, index: int) -> None:
        self.n = n
        clusters = torch.cuda.get_device_capability(index)[0] >= 9
        program = _cuda.program("ncgru.orthogonal.cuda", "small.cu", {})
        self._follow = program.kernel("follow_small", index)
        self._gradient = program.kernel("gradient_small", index)
        self._shape = shape_of(n, min(self._follow.max_shared, self._gradient.max_shared))
        self._workspace = workspace_doubles(n)
        self._clusters = clusters
        # Without clusters all blocks of a launch must be resident, so that they can wait for each other.
        resident = (kernel.resident_blocks(THREADS, self._shape.shared) for kernel in (self._follow, self._gradient))
        self._most = 65535 if clusters else max(1, min(resident) // GROUP)

    def follow(self, packed: Tensor, state: State, method: str, order: int, reset_every: int) -> tuple[Tensor, Tensor]:
        """Bring the state up to date with `packed`; copies of U and of the inverse."""
        packed = packed.contiguous()
        matrix, inverse = torch.empty_like(state.matrix), torch.empty_like(state.inverse)
        count = state.updates.numel()
        if count <= self._most:
            self._follow_part(packed, state, matrix, inverse, count, METHOD_NUMBERS[method], order, reset_every)
            return matrix, inverse
        flat = packed.view(count, -1), matrix.view(count, self.n, self.n), inverse.view(count, self.n, self.n)
        for first in range(0, count, self._most):
            part = state.part(first, self._most)
            vectors, us, inverses = (tensor[first : first + self._most] for tensor in flat)
            self._follow_part(
                vectors, part, us, inverses, len(part.updates), METHOD_NUMBERS[method], order, reset_every
            )
        return matrix, inverse

    def _follow_part(
        self, packed: Tensor, state: State, matrix: Tensor, inverse: Tensor, count: int, *options: int
    ) -> None:
        device = matrix.device
        shape = self._shape
        self._follow.launch(
            (GROUP, count, 1),
            (THREADS, 1, 1),
            packed,
            *state,
            matrix,
            inverse,
            torch.empty(count * self._workspace, dtype=torch.float64, device=device),
            self._workspace,
            self._counters(count, device),
            self.n,
            shape.width,
            shape.slices,
            shape.chunk,
            *options,
            shared=shape.shared,
            cooperative=not self._clusters,
        )

    def gradient(self, grad_matrix: Tensor, matrix: Tensor, inverse: Tensor, signs: Tensor) -> Tensor:
        """The gradient in the packed A's, of the gradient in the U's; all contiguous."""
        n = self.n
        count = matrix.numel() // (n * n)
        gradient = matrix.new_empty(*matrix.shape[:-2], packed_size(n))
        products = torch.empty_like(matrix)
        operands = grad_matrix, matrix, inverse, signs, gradient, products
        if count <= self._most:
            self._gradient_part(operands, count)
            return gradient
        flat = [tensor.view(count, -1) for tensor in operands]
        for first in range(0, count, self._most):
            part = [tensor[first : first + self._most] for tensor in flat]
            self._gradient_part(part, len(part[0]))
        return gradient

    def _gradient_part(self, operands: Sequence[Tensor], count: int) -> None:
        shape = self._shape
        self._gradient.launch(
            (GROUP, count, 1),
            (THREADS, 1, 1),
            *operands,
            self._counters(count, operands[0].device),
            self.n,
            shape.width,
            shape.slices,
            shape.chunk,
            shared=shape.shared,
            cooperative=not self._clusters,
        )

    def _counters(self, count: int, device: torch.device) -> Tensor | None:
        """Of the barriers; clusters have barriers of their own."""
        return None if self._clusters else torch.zeros(count, dtype=torch.int32, device=device)
