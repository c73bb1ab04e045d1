"""Matrix products in float32 on the tensor cores, as exact as float32: the launches of `split.cu` and `product.cu`.

Shapes: C [M, N] = A [M, K] B [K, N]. A line is a row of A or a column of B. Launching costs the host as much as a small
product takes, so what depends on shapes alone is found once, and no views are made.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .kind import Limits
from .machine import Argument, Machine

DEPTH = 32
"""Numbers along K that a block takes at a time, and that share a scale where lines are columns in memory."""
PROBLEMS = PIECES = 6
"""Products of a launch, and operands."""
ROOM = 256 * 2**20
"""Bytes that split operands may take; larger products are made part by part.

A layer of T*B*H = 32 million numbers, with which that many are met, keeps 1.2 GB for its backward anyway. With half of
it the weight gradients of 1024 units took a third longer on an H200, with no bound 3 percent less.
"""
LEAST_WORK, LEAST_SIDE = 6e9, 128
"""Floating-point operations, and M, N and K, from which on these products were measured to be faster than torch's."""
_THREADS, _THREADS_OF_PRODUCT, _TILE_ROWS = 256, 128, 128
_SPLIT_COLUMNS, _HELD = 128, 512
_NOWHERE = 2**40
_PIECE, _PROBLEM, _REST = struct.Struct("<11q"), struct.Struct("<12q"), struct.Struct("<3q")


class Tiling(NamedTuple):
    """How the blocks of a launch share C.

    Attributes:
        columns: of a tile; it has 128 rows.
        stages: tiles of A and B that a block has room for.
        times: what a multiprocessor takes for one block, two and so on, relative to two blocks of 128 columns.
    """

    columns: int
    stages: int
    times: tuple[float, ...]

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor."""
        return len(self.times)

    def shared_bytes(self, a_along_k: bool, b_along_k: bool) -> int:
        """What a block takes of shared memory."""
        scales = 4 * ((not a_along_k) * _TILE_ROWS + (not b_along_k) * self.columns)
        return self.stages * (4 * DEPTH * (_TILE_ROWS + self.columns) + scales)

    def defines(self, a_along_k: bool, b_along_k: bool) -> Mapping[str, int]:
        return {
            "A_ALONG_K": int(a_along_k),
            "B_ALONG_K": int(b_along_k),
            "TILE_N": self.columns,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
        }


TILINGS = (Tiling(128, 2, (0.6, 1.0)), Tiling(64, 2, (0.36, 0.58, 0.8)))
"""Large tiles read less; small ones leave fewer multiprocessors idle where there are few."""


class Operand(NamedTuple):
    """A matrix in memory, rows of numbers that lie together.

    Attributes:
        tensor: where it lies.
        at: its first number, counted from the tensor's first.
        lines: how many.
        length: how many numbers along K there are.
        pitch: the distance of its rows in memory.
        along_k: whether these rows are its lines.
        before: zeros along K in front of it, if they are not; behind it there are zeros, too.
    """

    tensor: Tensor
    at: int
    lines: int
    length: int
    pitch: int
    along_k: bool
    before: int = 0


class Result(NamedTuple):
    """C: a matrix in memory whose rows lie `pitch` apart, from number `at` of a tensor on."""

    tensor: Tensor
    at: int
    pitch: int


def operand(x: Tensor, k: int) -> Operand:
    """A tensor whose dimension `k` is K."""
    strides, shape = x.stride(), x.shape
    along_k = strides[k] == 1
    if not along_k and strides[1 - k] != 1 and shape[1 - k] > 1:
        raise ValueError(f"rows or columns of an operand must lie together, got strides {strides}")
    return Operand(x, 0, shape[1 - k], shape[k], strides[1 - k] if along_k else strides[k], along_k)


def worth(limits: Limits, *shapes: tuple[int, int, int]) -> bool:
    """Whether these products (M, N, K) of one launch are faster than torch's."""
    if not limits.fast_halves or min(map(min, shapes)) < LEAST_SIDE:
        return False
    return 2 * sum([m * n * k for m, n, k in shapes]) >= LEAST_WORK


def _width(address: int, pitch: int) -> int:
    """How many numbers lie together, at addresses that are multiples of as many, in rows of this distance."""
    either = address | 4 * pitch
    return 4 if either % 16 == 0 else 2 if either % 8 == 0 else 1


# What a wave of blocks takes beside its products, in the time of DEPTH numbers along K.
_OVERHEAD = 3.0
# Numbers that are written to and read from memory in the time that a multiprocessor takes for DEPTH numbers along K.
_TRAFFIC = 1.6e6
_LAUNCH = 2.0


class _Cut(NamedTuple):
    """C in tiles and K in slices.

    Attributes:
        time: what it takes, as far as this can be counted, in the time that a wave of blocks takes for DEPTH along K.
        tiling: of C.
        slices: of K.
        share: stages of a slice.
    """

    time: float
    tiling: Tiling
    slices: int
    share: int


def _cut(shapes: Sequence[tuple[int, int]], steps: int, limits: Limits, tilings: Sequence[Tiling]) -> _Cut:
    """What takes the least time: full waves of blocks, and few parts of C [M, N] to be added up."""
    numbers, found = sum(rows * _up(columns, 4) for rows, columns in shapes), []
    for tiling in tilings:
        tiles = sum(_tiles(tiling, rows, columns) for rows, columns in shapes)
        for wanted in range(1, min(steps, 128) + 1):
            share = -(-steps // wanted)
            slices = -(-steps // share)
            full, rest = divmod(tiles * slices, limits.multiprocessors * tiling.blocks)
            last = tiling.times[-(-rest // limits.multiprocessors) - 1] if rest else 0.0
            time = (full * tiling.times[-1] + last) * (share + _OVERHEAD)
            if slices > 1:
                time += _LAUNCH + 2 * slices * numbers / _TRAFFIC
            found.append(_Cut(time, tiling, slices, share))
    return min(found, key=lambda cut: cut.time)


def _tiles(tiling: Tiling, rows: int, columns: int) -> int:
    return -(-rows // _TILE_ROWS) * -(-columns // tiling.columns)


def _up(x: int, to: int) -> int:
    return -(-x // to) * to


Span = tuple[int, int]
"""The first of some, and the one behind the last."""


class _Shape(NamedTuple):
    """An `Operand` but for its place, with how many numbers can be read at once."""

    lines: int
    length: int
    pitch: int
    along_k: bool
    before: int
    width: int

    def part(self, lines: Span | None, stretch: Span) -> tuple[_Shape, int]:
        """These lines of it, where lines are rows, or a stretch of K; and the row of memory where that begins."""
        if self.along_k:
            first, end = lines or (0, self.lines)
            return self._replace(lines=end - first), first
        first, end = (min(max(k - self.before, 0), self.length) for k in stretch)
        return self._replace(length=end - first, before=max(self.before - stretch[0], 0)), first


_Problem = tuple[int, int, int, int]
"""A product: the numbers of its operands, the pitch of C, and how many of its numbers are written at once."""


class _Part(NamedTuple):
    """The launches for a part of some products.

    Attributes:
        defines: of the program that multiplies.
        shared, grid: of the launch that multiplies.
        slices: of K.
        splitting: the grid of the launch that splits.
        pieces: what it splits.
        sources: where each operand's part begins, in bytes.
        outs: where each C's part begins, in bytes.
        problems: the products.
        adding: the grid of the launch that adds up.
    """

    defines: Mapping[str, int]
    shared: int
    grid: tuple[int, int, int]
    slices: int
    splitting: tuple[int, int, int]
    pieces: bytes
    sources: tuple[int, ...]
    outs: tuple[int, ...]
    problems: bytes
    adding: tuple[int, int, int]


class Plan(NamedTuple):
    """Parts that products are made in, one after the other, and the bytes they need beside the operands."""

    room: int
    parts: Sequence[_Part]


@functools.lru_cache(maxsize=1024)
def plan(
    limits: Limits,
    depth: int,
    shapes: tuple[tuple[int, int, int, bool, int, int], ...],
    problems: tuple[_Problem, ...],
    room: int = ROOM,
    tilings: tuple[Tiling, ...] = TILINGS,
) -> Plan:
    """For operands that lie in memory in this way (`_Shape`), whose split numbers may take `room` bytes at a time."""
    operands = [_Shape(*shape) for shape in shapes]
    a, b = (operands[i] for i in problems[0][:2])
    if any((operands[i].along_k, operands[j].along_k) != (a.along_k, b.along_k) for i, j, _, _ in problems):
        raise ValueError("products of a launch must be alike")
    if b.along_k and not a.along_k:
        raise ValueError("where columns of A lie together, rows of B must")
    bytes_of = [4 * x.lines * _up(depth, DEPTH) for x in operands]
    # A part is some rows of C where rows of A are rows in memory, of which there are many; else a stretch of K.
    of_rows = a.along_k and len(problems) == 1
    fixed = bytes_of[problems[0][1]] if of_rows else 0
    fewest = -(-(sum(bytes_of) - fixed) // max(room - fixed, room // 2))
    ways: list[tuple[float, list[tuple[Span | None, Span, _Cut]]]] = []
    for count in range(fewest, fewest + 4) if fewest > 1 else [1]:
        spans: list[tuple[Span | None, Span]] = [(None, stretch) for stretch in _shares(depth, count, DEPTH)]
        if of_rows:
            spans = [(rows, (0, depth)) for rows in _shares(a.lines, count, _TILE_ROWS)]
        way: list[tuple[Span | None, Span, _Cut]] = []
        for rows, stretch in spans:
            sizes = tuple(
                (rows[1] - rows[0] if rows else operands[i].lines, operands[j].lines) for i, j, _, _ in problems
            )
            way.append((rows, stretch, _cut(sizes, -(-(stretch[1] - stretch[0]) // DEPTH), limits, tilings)))
        ways.append((sum(cut.time + 2 * _LAUNCH for _, _, cut in way), way))
    _, best = min(ways, key=lambda way: way[0])
    made = [_part(operands, problems, *part, more=not of_rows and n > 0) for n, part in enumerate(best)]
    return Plan(max(size for size, _ in made), [part for _, part in made])


def _shares(whole: int, count: int, step: int) -> list[Span]:
    """Of so many in all, each a multiple of `step` but for the last."""
    size = _up(-(-whole // count), step)
    return [(first, min(first + size, whole)) for first in range(0, whole, size)]


def _part(
    operands: Sequence[_Shape], problems: Sequence[_Problem], rows: Span | None, stretch: Span, cut: _Cut, *, more: bool
) -> tuple[int, _Part]:
    """A part, and the bytes it needs."""
    depth = stretch[1] - stretch[0]
    padded, tiling = _up(depth, DEPTH), cut.tiling
    firsts = {problems[0][0]} if rows else set()
    taken = [x.part(rows if i in firsts else None, stretch) for i, x in enumerate(operands)]
    shapes = [shape for shape, _ in taken]
    at, blocks, places, pieces = 0, 0, [], b""
    for x in shapes:
        # Tiles reach beyond the last line.
        lines, pitch = _up(x.lines, _TILE_ROWS), 2 * padded if x.along_k else _up(x.lines, 8)
        scales = at
        at += _up(4 * (lines if x.along_k else padded // DEPTH * pitch + _TILE_ROWS), 256)
        places.append((at, scales, pitch))
        warps = next(w for w in (1, 2, 4, 8) if w == 8 or depth <= _HELD * w) if x.along_k else 0
        source = (x.lines, depth) if x.along_k else (x.length, x.lines)
        pieces += _PIECE.pack(x.pitch, *source, x.width, scales, at, pitch, padded, warps, x.before, blocks)
        at += _up(2 * (lines * pitch if x.along_k else 2 * padded * pitch + _TILE_ROWS), 256)
        blocks += -(-x.lines // (8 // warps)) if warps else -(-x.lines // _SPLIT_COLUMNS) * (padded // DEPTH)
    tiles, numbers, table = 0, 0, b""
    for i, j, pitch, width in problems:
        m, n = shapes[i].lines, shapes[j].lines
        table += _PROBLEM.pack(*places[i], *places[j], m, n, pitch, width, at + 4 * cut.slices * numbers, tiles)
        tiles += _tiles(tiling, m, n)
        numbers += m * _up(n, 4)
    first = shapes[problems[0][0]], shapes[problems[0][1]]
    along = first[0].along_k, first[1].along_k
    return at + (4 * cut.slices * numbers if cut.slices > 1 else 0), _Part(
        tiling.defines(*along),
        tiling.shared_bytes(*along),
        (tiles, cut.slices, 1),
        cut.slices,
        (blocks, 1, 1),
        pieces + _PIECE.pack(*[0] * 10, _NOWHERE) * (PIECES - len(operands)),
        tuple(4 * row * x.pitch for x, row in taken),
        tuple(4 * rows[0] * pitch if rows else 0 for _, _, pitch, _ in problems),
        table
        + _PROBLEM.pack(*[0] * 11, _NOWHERE) * (PROBLEMS - len(problems))
        + _REST.pack(padded // DEPTH, cut.share, int(more)),
        (-(-numbers // 4 // _THREADS) + 1, 1, 1),
    )


def products(
    machine: Machine,
    depth: int,
    problems: Sequence[tuple[Operand, Operand, Result]],
    room: int = ROOM,
    tilings: tuple[Tiling, ...] = TILINGS,
) -> None:
    """Write A B to C for each (A, B, C), all of which share K (`depth`) and how A and B lie.

    An operand is split once where it is the same object.
    """
    operands: list[Operand] = []
    numbers: dict[int, int] = {}
    shapes, key = [], []
    for a, b, (tensor, at, c_pitch) in problems:
        for x in (a, b):
            if id(x) not in numbers:
                numbers[id(x)] = len(operands)
                operands.append(x)
                source, begin, lines, length, pitch, along_k, before = x
                width = _width(source.data_ptr() + 4 * begin, pitch)
                shapes.append((lines, length, pitch, along_k, before, width))
        key.append((numbers[id(a)], numbers[id(b)], c_pitch, _width(tensor.data_ptr() + 4 * at, c_pitch)))
    found = plan(machine.limits, depth, tuple(shapes), tuple(key), room, tilings)
    memory = torch.empty(found.room, dtype=torch.uint8, device=operands[0].tensor.device)
    no_sources: list[Argument] = [None] * (PIECES - len(operands))
    no_outs: list[Argument] = [None] * (PROBLEMS - len(problems))
    for part in found.parts:
        sources = [(x.tensor, 4 * x.at + first) for x, first in zip(operands, part.sources, strict=True)]
        given = [*sources, *no_sources, memory, part.pieces]
        machine.launch("split.cu", _NO_DEFINES, "split_all", part.splitting, _THREADS, given)
        outs = [(c.tensor, 4 * c.at + first) for (_, _, c), first in zip(problems, part.outs, strict=True)]
        arguments: list[Argument] = [memory, *outs, *no_outs, part.problems]
        machine.launch(
            "product.cu", part.defines, "product", part.grid, _THREADS_OF_PRODUCT, arguments, shared=part.shared
        )
        if part.slices > 1:
            arguments.append(part.slices)
            machine.launch("product.cu", part.defines, "product_sum", part.adding, _THREADS, arguments)


_NO_DEFINES: Mapping[str, int] = {}


def product(machine: Machine, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write A B to C, of each of which rows lie together, or of A and B columns."""
    products(machine, a.shape[1], [(operand(a, 1), operand(b, 0), Result(out, 0, out.stride(0)))])
