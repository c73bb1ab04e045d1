"""The launches of `large.cu`: how blocks share the units, rows and directions, and what each holds where.

Arithmetic alone; it needs no GPU. H hidden size, B batch, D directions.
"""

from __future__ import annotations

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
"""Bytes that cell threads remember of a slice and a tile: 4 numbers for each unit and row."""
_COMFORTABLE, _FEWEST = 16, 4
"""Slices times tiles that a block should have room for, so that a large batch needs one launch; and tiles it must."""
_REGISTER_PAIRS = 10
"""Pairs a warp (times slices) that a gate may keep in registers without spilling."""
_WIDTHS = (4, 2)


@dataclass(frozen=True)
class Launch:
    """One launch of a pass.

    Attributes:
        width: slices a block.
        grid: blocks, groups, directions.
        first_direction: the first of the directions it runs.
        first: its first tile of the batch.
        tiles: tiles a group, at most.
        exchange: where its exchange begins, in words.
    """

    width: int
    grid: tuple[int, int, int]
    first_direction: int
    first: int
    tiles: int
    exchange: int


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
        return self._choice[1]

    @property
    def held(self) -> tuple[int, int, int]:
        """Where a block holds the matrices of r, u and c."""
        return self._choice[0]

    @property
    def pack(self) -> int:
        return 1 if self.kind.storage == FLOAT32 else 2

    @property
    def pairs(self) -> int:
        return -(-self.slices // self.pack)

    @property
    def warps(self) -> int:
        return min(MOST_WARPS, self.pairs)

    def threads(self, width: int) -> int:
        return 32 * self.warps + min(128, width * SLICE * TILE // self.pack)

    @property
    def vectors(self) -> int:
        """Vectors of a slot of the exchange."""
        return {"before": 2, "after": 3, "none": 1}[self.kind.reset] if self.backward else 1

    @cached_property
    def _choice(self) -> tuple[tuple[int, int, int], int]:
        """The widest blocks that hold all matrices on the chip; else the fewest matrices outside."""
        narrow = self.narrow
        on_chip = ((SHARED, SHARED, SHARED), (SHARED, SHARED, REGISTERS))
        for width in (*(width for width in _WIDTHS if narrow == 1 < width <= self.slices), narrow):
            for tiles in (max(_FEWEST, _COMFORTABLE // width), _FEWEST):
                for held in on_chip:
                    if self._fits(held, width, tiles):
                        return held, width
        for held in ((GLOBAL, SHARED, SHARED), (GLOBAL, GLOBAL, SHARED)):
            if self._fits(held, narrow, _FEWEST):
                return held, narrow
        return (GLOBAL, GLOBAL, GLOBAL), narrow

    @property
    def possible(self) -> bool:
        """Whether a block has room for what it needs at all; not so for large sizes on the smallest GPUs."""
        return self._most_tiles(self.held, self.narrow) > 0

    @property
    def streams(self) -> bool:
        """Whether some matrices are too large for the chip and are read from its second-level cache at each step."""
        return GLOBAL in self.held[-self.kind.gates :]

    def blocks(self, width: int) -> int:
        """Blocks of a group."""
        return -(-self.slices // width)

    def shared_bytes(self, width: int, tiles: int) -> int:
        """Dynamic shared memory of a block."""
        return self._fixed_bytes(self.held, width) + tiles * width * _PART

    def fragment_words(self, width: int) -> int:
        """Words of one direction's fragments."""
        return self.kind.gates * self.blocks(width) * width * self.pairs * _FRAGMENT // 4

    @property
    def defines(self) -> Mapping[str, int]:
        """Macros of the program; none depends on T, B or D."""
        held = dict(zip(("HELD_R", "HELD_U", "HELD_C"), self.held, strict=True))
        return {**self.kind.defines, "TF32": int(self.kind.tf32), "NARROW": self.narrow, "WIDE": self.wide, **held}

    def launches(self, batch: int, directions: int) -> list[Launch]:
        """The launches that run a batch; more than one only if it is too large for the GPU at a time."""
        narrow = self._launches(self.narrow, batch, directions)
        if self.wide == self.narrow or max(launch.tiles for launch in narrow) == 1:
            return narrow
        return self._launches(self.wide, batch, directions)

    def exchange_words(self, launches: list[Launch]) -> int:
        last = launches[-1]
        return last.exchange + last.grid[1] * last.grid[2] * self._group_words(last.tiles)

    def _launches(self, width: int, batch: int, directions: int) -> list[Launch]:
        blocks = self.blocks(width)
        side_by_side = min(directions, max(1, self.limits.multiprocessors // blocks))
        tiles = -(-batch // TILE)
        most_groups = max(1, self.limits.multiprocessors // (blocks * side_by_side))
        most_tiles = self._most_tiles(self.held, width)
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
                launches.append(Launch(width, grid, first_direction, first, a_group, exchange))
                exchange += grid[1] * grid[2] * self._group_words(a_group)
        return launches

    @property
    def _products(self) -> int:
        """Products at a time: those of the forward, so that both passes are built alike and are one program."""
        return {"before": 2, "after": 3, "none": 1}[self.kind.reset]

    def _group_words(self, tiles: int) -> int:
        return SLOTS * self.vectors * tiles * self.pairs * 128

    def _fits(self, held: tuple[int, int, int], width: int, tiles: int) -> bool:
        in_registers = width * -(-self.pairs // self.warps) if REGISTERS in held else 0
        return in_registers <= _REGISTER_PAIRS and self._most_tiles(held, width) >= tiles

    def _most_tiles(self, held: tuple[int, int, int], width: int) -> int:
        """Tiles that a block has room for."""
        return max(0, self.limits.shared - self._fixed_bytes(held, width)) // (width * _PART)

    def _fixed_bytes(self, held: tuple[int, int, int], width: int) -> int:
        matrices = held[-self.kind.gates :].count(SHARED) * width * self.pairs * _FRAGMENT
        return matrices + 2 * self._products * width * self.warps * _PARTIAL
