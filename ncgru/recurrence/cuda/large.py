"""The launches of `large.cu`: how blocks share the units, rows and directions, and what each holds where.

Arithmetic alone; it needs no GPU. H hidden size, B batch, D directions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .kind import FLOAT32, Kind, Limits

SLICE = 16
"""Units of a slice."""
TILE = 8
"""Rows of a tile."""
MOST_WARPS = 8
"""Product warps of a block, where there are as many pairs."""
SLOTS = 4
REGISTERS, SHARED, GLOBAL = 0, 1, 2
LARGEST_HIDDEN = 2048

_FRAGMENT = 1024
"""Bytes of a pair's fragments for one slice: 2 halves, 32 lanes, 4 words."""
_PARTIAL = 8 * 20 * 4
"""Bytes of a warp's partial sums of one product."""
_PART = 4 * SLICE * TILE * 4
"""Bytes that cell threads remember of a square, a slice of a tile: 4 numbers for each unit and row."""
_COMFORTABLE, _FEWEST = 16, 4
"""Slices times tiles that a block should have room for, so that a large batch needs one launch; and tiles it must."""
_REGISTERS_TO_USE = 148
"""Registers of a product thread for what is counted in `_free_registers`."""
_REGISTERS_OF_TALL = 160
"""The same for stacks of 4 of numbers that are split, of which what is counted lives less long."""
_AHEAD = {True: 2, False: 3}
"""Reads that are asked for ahead: of float32, and of 16 bits."""
_WIDTHS = (4, 2)
_STACKS, _TALL_STACKS = (2, 1), (4, 3)
"""The most tiles at a time. In 16 bits, and in wide blocks, the cells set the pace where there are more than two."""
_WAIT = {True: 3, False: 5}
"""What a stack costs whatever its size, in times of a slice of a tile: of float32, and of 16 bits."""


@dataclass(frozen=True)
class Launch:
    """One launch of a pass.

    Attributes:
        kernel: the end of its kernel's name.
        width: slices a block.
        stack: tiles that its kernel multiplies at a time.
        grid: blocks, groups, directions.
        first_direction: the first of the directions it runs.
        first: its first tile of the batch.
        tiles: tiles a group, at most.
        exchange: where its exchange begins, in words.
    """

    kernel: str
    width: int
    stack: int
    grid: tuple[int, int, int]
    first_direction: int
    first: int
    tiles: int
    exchange: int


@dataclass(frozen=True)
class Choice:
    """Where a block holds matrices, and how its wide kernel works.

    Attributes:
        held: where it holds the matrices of r, u and c.
        kept: pairs of a warp's share of a matrix that is held in registers; the others are in shared memory.
        width: slices a block of the wide kernels.
        stack: the most tiles at a time.
    """

    held: tuple[int, int, int]
    kept: int
    width: int
    stack: int


@dataclass(frozen=True)
class Design:
    """How a block is built for a kind of recurrence on a kind of GPU, whatever the batch.

    Attributes:
        kind: what is computed.
        limits: what the GPU offers.
        backward: which pass.
    """

    kind: Kind
    limits: Limits
    backward: bool

    @property
    def slices(self) -> int:
        return -(-self.kind.hidden // SLICE)

    @property
    def narrow(self) -> int:
        """The fewest slices a block."""
        return -(-self.slices // self.limits.multiprocessors)

    @property
    def wide(self) -> int:
        """Slices a block where a group would have several tiles otherwise."""
        return self.choice.width

    @property
    def stack(self) -> int:
        """The most tiles that a wide kernel multiplies at a time; the narrow one takes each alone."""
        return self.choice.stack

    @property
    def kernels(self) -> dict[tuple[int, int], str]:
        """The ends of the kernels' names, by their width and stack."""
        stacks = {stack for stack in (1, 2, self.stack) if stack <= self.stack}
        wide = {(self.wide, stack): f"wide_{stack}" for stack in sorted(stacks)}
        return {**wide, (self.narrow, 1): "narrow"}

    @property
    def held(self) -> tuple[int, int, int]:
        """Where a block holds the matrices of r, u and c."""
        return self.choice.held

    @property
    def pack(self) -> int:
        return 1 if self._is_float32 else 2

    @property
    def pairs(self) -> int:
        return -(-self.slices // self.pack)

    @property
    def warps(self) -> int:
        return min(MOST_WARPS, self.pairs)

    def threads(self, width: int, stack: int) -> int:
        return 32 * self.warps + self._cell_threads(width * stack)

    @property
    def vectors(self) -> int:
        """Vectors of a slot of the exchange."""
        return {"before": 2, "after": 3, "none": 1}[self.kind.reset] if self.backward else 1

    @cached_property
    def choice(self) -> Choice:
        """The widest blocks that hold all matrices on the chip; else the fewest matrices outside."""
        narrow = self.narrow
        for width in (*(width for width in _WIDTHS if narrow == 1 < width <= self.slices), narrow):
            for stack, tiles in itertools.product(self._stacks(width), (max(_FEWEST, _COMFORTABLE // width), _FEWEST)):
                kept = min(self._share, self._free_registers(width, stack) // (8 * width))
                for choice in (
                    Choice((SHARED, SHARED, SHARED), 0, width, stack),
                    Choice((SHARED, SHARED, REGISTERS), kept, width, stack),
                ):
                    if kept >= 0 and self._most_tiles(choice, width, stack) >= tiles:
                        return choice
        for held in ((GLOBAL, SHARED, SHARED), (GLOBAL, GLOBAL, SHARED)):
            for stack in self._stacks(narrow):
                choice = Choice(held, 0, narrow, stack)
                if self._most_tiles(choice, narrow, stack) >= _FEWEST:
                    return choice
        return Choice((GLOBAL, GLOBAL, GLOBAL), 0, narrow, 1)

    @property
    def possible(self) -> bool:
        """Whether a block has room for what it needs at all; not so for large sizes on the smallest GPUs."""
        return self._most_tiles(self.choice, self.narrow, 1) > 0

    @property
    def streams(self) -> bool:
        """Whether some matrices are too large for the chip and are read from its second-level cache at each step."""
        return GLOBAL in self.held[-self.kind.gates :]

    def blocks(self, width: int) -> int:
        """Blocks of a group."""
        return -(-self.slices // width)

    def shared_bytes(self, width: int, stack: int, tiles: int) -> int:
        """Dynamic shared memory of a block."""
        return self._fixed_bytes(self.choice, width, stack) + -(-tiles // stack) * self._stack_bytes(width, stack)

    def fragment_words(self, width: int) -> int:
        """Words of one direction's fragments."""
        return self.kind.gates * self.blocks(width) * width * self.pairs * _FRAGMENT // 4

    @cached_property
    def defines(self) -> Mapping[str, int]:
        """Macros of the program; none depends on T, B or D."""
        held = dict(zip(("HELD_R", "HELD_U", "HELD_C"), self.held, strict=True))
        widths = {"NARROW": self.narrow, "WIDE": self.wide, "STACK": self.stack, "KEPT": self.choice.kept}
        return {**self.kind.defines, "TF32": int(self.kind.tf32), **widths, **held}

    def launches(self, batch: int, directions: int) -> list[Launch]:
        """The launches that run a batch; more than one only if it is too large for the GPU at a time."""
        ways = [self._launches(width, stack, batch, directions) for width, stack in sorted(self.kernels, reverse=True)]
        return min(ways, key=lambda launches: sum(map(self._cost, launches)))

    def _cost(self, launch: Launch) -> int:
        """An estimate of the time of a step, for comparison."""
        stacks = -(-launch.tiles // launch.stack)
        return stacks * (_WAIT[self._is_float32] + launch.width * launch.stack)

    def exchange_words(self, launches: list[Launch]) -> int:
        last = launches[-1]
        return last.exchange + last.grid[1] * last.grid[2] * self._group_words(last.tiles)

    def _launches(self, width: int, stack: int, batch: int, directions: int) -> list[Launch]:
        blocks = self.blocks(width)
        side_by_side = min(directions, max(1, self.limits.multiprocessors // blocks))
        tiles = -(-batch // TILE)
        most_groups = max(1, self.limits.multiprocessors // (blocks * side_by_side))
        most_tiles = self._most_tiles(self.choice, width, stack)
        turns = -(-tiles // (most_groups * most_tiles))
        # A launch ends where its groups' tiles do, so that no tile is run twice.
        at_a_time = most_groups * -(-tiles // (turns * most_groups))
        launches: list[Launch] = []
        exchange = 0
        for first_direction in range(0, directions, side_by_side):
            for first in range(0, tiles, at_a_time):
                now = min(tiles - first, at_a_time)
                a_group = -(-now // most_groups)
                grid = (blocks, -(-now // a_group), side_by_side)
                kernel = self.kernels[width, stack]
                launches.append(Launch(kernel, width, stack, grid, first_direction, first, a_group, exchange))
                exchange += grid[1] * grid[2] * self._group_words(a_group)
        return launches

    @property
    def _is_float32(self) -> bool:
        return self.kind.storage == FLOAT32

    def _stacks(self, width: int) -> tuple[int, ...]:
        """How many tiles may be taken at a time in blocks of so many slices, the best first."""
        return _TALL_STACKS + _STACKS if self._is_float32 and width == 1 else _STACKS

    @property
    def _products(self) -> int:
        """Products at a time: those of the forward, so that both passes are built alike and are one program."""
        return {"before": 2, "after": 3, "none": 1}[self.kind.reset]

    def _group_words(self, tiles: int) -> int:
        return SLOTS * self.vectors * tiles * self.pairs * 128

    @property
    def _share(self) -> int:
        """Pairs of a warp, at most."""
        return -(-self.pairs // self.warps)

    def _free_registers(self, width: int, stack: int) -> int:
        """Registers of a product thread that can hold a matrix: sums, words and numbers that are split take others."""
        splits = self._is_float32 and not self.kind.tf32
        sums, words = 4 * self._products * width * stack, 4 * (1 + _AHEAD[self._is_float32]) * max(2, stack)
        registers = _REGISTERS_OF_TALL if stack == 4 and splits else _REGISTERS_TO_USE
        return registers - sums - words - (8 * self._products * width + 12 * stack if splits else 8)

    def _most_tiles(self, choice: Choice, width: int, stack: int) -> int:
        """Tiles that a block has room for."""
        room = max(0, self.limits.shared - self._fixed_bytes(choice, width, stack))
        return room // self._stack_bytes(width, stack) * stack

    def _fixed_bytes(self, choice: Choice, width: int, stack: int) -> int:
        held = choice.held[-self.kind.gates :]
        pairs = held.count(SHARED) * self.pairs
        pairs += held.count(REGISTERS) * max(0, self.pairs - choice.kept * self.warps)
        rooms = 2 if stack == 1 else 1
        added = (self.kind.gates + 1) * width * SLICE * 4
        return pairs * width * _FRAGMENT + added + rooms * self._products * width * stack * self.warps * _PARTIAL

    def _stack_bytes(self, width: int, stack: int) -> int:
        """What cell threads remember of a stack; each has the same place in several squares."""
        at_a_time = self._cell_threads(width * stack) * self.pack // (SLICE * TILE)
        return -(-width * stack // at_a_time) * at_a_time * _PART

    def _cell_threads(self, squares: int) -> int:
        return min(128, squares * SLICE * TILE // self.pack)
