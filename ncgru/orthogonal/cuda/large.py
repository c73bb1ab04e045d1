"""Large matrices: all blocks of one launch share the products of the update, those of another the gradient's."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ncgru import _cuda
from ncgru.orthogonal.cuda.state import Kernels

# As in large.cu, products.cuh and matrices.cuh.
THREADS, WARPS, PROBES, MOST_MATRICES, PROBED, SUMS_PITCH, STAGES = 512, 16, 8, 16, 8, 36, 3
SHAPES = ((128, 64), (64, 64), (32, 64), (32, 32))
"""Tiles of a product: rows and columns."""

MOST_WORKSPACE = 1 << 25
"""Of a batch as many matrices are followed at a time as keep each room within this many numbers (128 MiB)."""

# Counted for the H100: products that a multiprocessor sums and numbers that it reads from the L2 cache in a clock, and
# the clocks that a tile takes besides.
PRODUCTS, WORDS, CLOCKS = 115, 6.5, 3000


def shared_bytes(shape: tuple[int, int]) -> int:
    """The shared memory that a block needs for tiles of this shape; see products.cuh."""
    high, wide = shape
    slices = WARPS // (high * wide // 1024)
    depth = max(32, 8 * slices)
    stage = sum(lines * depth + max(8 * lines, 4 * depth) for lines in shape)
    return max(4 * STAGES * stage, 8 * WARPS // 2 * 32 * SUMS_PITCH)


def clocks(shape: tuple[int, int], n: int, count: int, blocks: int) -> float:
    """About how long so many products of matrices with n rows take."""
    high, wide = shape
    tiles = count * -(-n // high) * -(-n // wide)
    return -(-tiles // blocks) * (n * max(high * wide / PRODUCTS, (high + wide) / WORDS) + CLOCKS)


def shape_of(n: int, count: int, blocks: int, shared_limit: int) -> tuple[int, int]:
    """The best tiles where blocks have so much shared memory."""
    fitting = [shape for shape in SHAPES if shared_bytes(shape) <= shared_limit]
    return min(fitting, key=lambda shape: clocks(shape, n, count, blocks))


def program(shape: tuple[int, int]) -> _cuda.Program:
    """The program whose products are in tiles of this shape."""
    return _cuda.program("ncgru.orthogonal.cuda", "large.cu", {"HIGH": shape[0], "WIDE": shape[1]})


class LargeKernels(Kernels):
    """The kernels of large.cu for matrices of n rows on one device."""

    def __init__(self, n: int, index: int, shared_limit: int) -> None:
        super().__init__(n, min(MOST_MATRICES, max(1, MOST_WORKSPACE // (n * n))))
        self._index = index
        # Each block gets all the shared memory of its multiprocessor: see `arrivals` in large.cu.
        self._shared = shared_limit
        self._blocks = torch.cuda.get_device_properties(index).multi_processor_count
        self._kernels = functools.cache(self._load)

    def _load(self, count: int) -> tuple[_cuda.Kernel, _cuda.Kernel]:
        """The kernels for so many matrices at a time."""
        chosen = program(shape_of(self.n, count, self._blocks, self._shared))
        return chosen.kernel("follow_large", self._index), chosen.kernel("gradient_large", self._index)

    def scratch_words(self, count: int) -> int:
        """Words of 4 bytes that an update of so many matrices needs; see `Work` in large.cu."""
        n = self.n
        grams, notes = count * -(-n // PROBED) * PROBES**2, 2 * count * max(1, self._blocks // count)
        return 2 * (grams + 2 * n + notes) + (1 + count) * n * PROBES + 3 * count * n * n

    def _follow_part(self, tensors: Sequence[Tensor], count: int, options: Sequence[int]) -> None:
        scratch = tensors[0].new_empty(self.scratch_words(count))
        # An address, not a tensor of float32: what lies there is float64 at first.
        self._launch(self._kernels(count)[0], *tensors, (scratch, 0), self.n, count, *options)

    def _gradient_part(self, operands: Sequence[Tensor], count: int) -> None:
        rooms = operands[0].new_empty(2 * count * self.n**2)
        self._launch(self._kernels(count)[1], *operands, rooms, self.n, count)

    def _launch(self, kernel: _cuda.Kernel, *arguments: Tensor | tuple[Tensor, int] | int) -> None:
        kernel.launch((self._blocks, 1, 1), (THREADS, 1, 1), *arguments, shared=self._shared, cooperative=True)
