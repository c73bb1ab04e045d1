"""Small matrices: the whole update in one launch, the whole gradient in another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ncgru import _cuda
from ncgru.orthogonal.cuda.state import Kernels

# As in small.cu and matrices.cuh.
GROUP, TILE, THREADS, PROBES = 8, 4, 512, 8
ROWS = (32, 64, 96, 128, 160)
"""Above, eight blocks take longer than all the blocks of a GPU that wait for each other: 231 µs at n = 256."""
LARGEST_ROWS, WIDEST_CHUNK = ROWS[-1], 128
MOST_SHARED = 227 << 10
"""Of any GPU."""


def rows_of(n: int) -> int:
    """The rows that the kernels for matrices of n rows have room for."""
    return next(rows for rows in ROWS if n <= rows)


def chunks_of(rows: int) -> list[int]:
    """How many columns of a left operand may be staged at a time, the best first: all, or at most 64."""
    whole = [rows] if rows <= WIDEST_CHUNK else []
    return whole + [chunk for chunk in (64, 32) if chunk < rows and shared_bytes(rows, chunk) <= MOST_SHARED]


def shared_bytes(rows: int, chunk: int) -> int:
    """The shared memory of a block; see `Room` in small.cu."""
    width = rows // GROUP
    slices = min(THREADS // (rows // TILE * (width // TILE)), chunk // TILE)
    parts = slices * rows * width
    stage = max(8 * rows * (chunk + 2), 8 * parts, 4 * (rows * (chunk + 4) + parts))
    return stage + 8 * chunk * width + mail_bytes(rows) + 8 * (THREADS // 32) + 4 * (2 * rows * width + 2 * rows)


def mail_bytes(rows: int) -> int:
    """What the blocks of a group tell each other; see `Mail` in small.cu."""
    return 8 * (2 * rows + 2 * GROUP) + 4 * rows * (PROBES + 1)


def chunk_of(n: int, shared_limit: int) -> int | None:
    """The chunk for matrices of n rows in blocks with so much shared memory; None where that is too little."""
    rows = rows_of(n)
    return next((chunk for chunk in chunks_of(rows) if shared_bytes(rows, chunk) <= shared_limit), None)


def program(rows: int, chunk: int) -> _cuda.Program:
    """The program for matrices of up to so many rows."""
    return _cuda.program("ncgru.orthogonal.cuda", "small.cu", {"ROWS": rows, "CHUNK": chunk})


class SmallKernels(Kernels):
    """The kernels of small.cu for matrices of n rows on one device."""

    def __init__(self, n: int, index: int, chunk: int) -> None:
        rows = rows_of(n)
        chosen = program(rows, chunk)
        self._follow = chosen.kernel("follow_small", index)
        self._gradient = chosen.kernel("gradient_small", index)
        self._shared = shared_bytes(rows, chunk)
        self._mail, self._products = mail_bytes(rows), 4 * rows * rows
        self._clusters = torch.cuda.get_device_capability(index)[0] >= 9
        # Without clusters all blocks of a launch must be resident, so that they can wait for each other.
        resident = (kernel.resident_blocks(THREADS, self._shared) for kernel in (self._follow, self._gradient))
        super().__init__(n, 65535 if self._clusters else max(1, min(resident) // GROUP))

    def _follow_part(self, tensors: Sequence[Tensor], count: int, options: Sequence[int]) -> None:
        self._follow.launch(
            (GROUP, count, 1),
            (THREADS, 1, 1),
            *tensors,
            *self._workspace(count, self._mail, tensors[0]),
            self.n,
            *options,
            shared=self._shared,
            cooperative=not self._clusters,
        )

    def _gradient_part(self, operands: Sequence[Tensor], count: int) -> None:
        self._gradient.launch(
            (GROUP, count, 1),
            (THREADS, 1, 1),
            *operands,
            *self._workspace(count, self._products, operands[0]),
            self.n,
            shared=self._shared,
            cooperative=not self._clusters,
        )

    def _workspace(self, count: int, size: int, like: Tensor) -> tuple[tuple[Tensor, int] | None, ...]:
        """Counters of the barriers, and `size` bytes for each matrix; clusters need neither."""
        if self._clusters:
            return None, None
        counters = -(-count // 2)  # in words of 8 bytes
        room = torch.empty(counters + count * (size // 8), dtype=torch.float64, device=like.device)
        room[:counters].zero_()
        return (room, 0), (room, 8 * counters)
