"""The launches of `large.cu`: how blocks share the units, rows and directions, and what each holds where.

Arithmetic alone; it needs no GPU. H hidden size, B batch, D directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from .kind import FLOAT32, GATES, Kind, Limits

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
_FIELDS = 4
"""Numbers that cell threads remember for each unit and row."""
_PART = _FIELDS * SLICE * TILE * 4
_COMFORTABLE, _FEWEST = 16, 4
"""Parts that a block should have room for, so that a large batch needs one launch; and those it must have room for."""
_REGISTER_PAIRS = 9
"""Pairs a warp that a gate may keep in registers without spilling."""


@dataclass(frozen=True)
class Launch:
    """One launch of a pass.

    Attributes:
        grid: blocks, groups, directions.
        first_direction: the first of the directions it runs.
        first: its first tile of the batch.
        tiles: tiles a group, at most.
        exchange: where its exchange begins, in words.
    """

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
    def slices_a_block(self) -> int:
        return -(-self.slices // self.limits.multiprocessors)

    @property
    def blocks(self) -> int:
        return -(-self.slices // self.slices_a_block)

    @property
    def pack(self) -> int:
        return 1 if self.kind.storage == FLOAT32 else 2

    @property
    def pairs(self) -> int:
        return -(-self.slices // self.pack)

    @property
    def warps(self) -> int:
        return min(MOST_WARPS, self.pairs)

    @property
    def threads(self) -> int:
        return 32 * self.warps + SLICE * TILE // self.pack

    @property
    def vectors(self) -> int:
        """Vectors of a slot of the exchange."""
        return {"before": 2, "after": 3, "none": 1}[self.kind.reset] if self.backward else 1

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Where a block holds the matrices of r, u and c: the best that leaves room for enough parts."""
        candidates = [(SHARED, SHARED, SHARED), (SHARED, SHARED, REGISTERS)]
        choices = [(held, _COMFORTABLE) for held in candidates]
        candidates += [(GLOBAL, SHARED, SHARED), (GLOBAL, GLOBAL, SHARED)]
        choices += [(held, _FEWEST) for held in candidates]
        for held, parts in choices:
            if self._registers_allow(held) and self._parts_beside(held) >= parts:
                return held
        return (GLOBAL, GLOBAL, GLOBAL)

    @property
    def streams(self) -> bool:
        """Whether some matrices are too large for the chip and are read from its second-level cache at each step."""
        return GLOBAL in self.held[-GATES[self.kind.reset] :]

    @property
    def most_parts(self) -> int:
        """Parts (a slice of units and a tile of rows each) that a block has room for."""
        return self._parts_beside(self.held)

    def shared_bytes(self, parts: int) -> int:
        return self._fixed_bytes(self.held) + parts * _PART

    @property
    def fragment_words(self) -> int:
        """Words of one direction's fragments."""
        return GATES[self.kind.reset] * self.slices * self.pairs * _FRAGMENT // 4

    @property
    def defines(self) -> Mapping[str, int]:
        """Macros of the program; none depends on T, B or D."""
        held = dict(zip(("HELD_R", "HELD_U", "HELD_C"), self.held, strict=True))
        return {**self.kind.defines, "TF32": int(self.kind.tf32), "SLICES_A_BLOCK": self.slices_a_block, **held}

    def launches(self, batch: int, directions: int) -> list[Launch]:
        """The launches that run a batch; more than one only if it is too large for the GPU at a time."""
        side_by_side = min(directions, max(1, self.limits.multiprocessors // self.blocks))
        tiles = -(-batch // TILE)
        most_groups = max(1, self.limits.multiprocessors // (self.blocks * side_by_side))
        most_tiles = self.most_parts // self.slices_a_block
        launches: list[Launch] = []
        exchange = 0
        for first_direction in range(0, directions, side_by_side):
            for first in range(0, tiles, most_groups * most_tiles):
                now = min(tiles - first, most_groups * most_tiles)
                a_group = -(-now // most_groups)
                grid = (self.blocks, -(-now // a_group), side_by_side)
                launches.append(Launch(grid, first_direction, first, a_group, exchange))
                exchange += grid[1] * grid[2] * self._group_words(a_group)
        return launches

    def exchange_words(self, launches: list[Launch]) -> int:
        last = launches[-1]
        return last.exchange + last.grid[1] * last.grid[2] * self._group_words(last.tiles)

    def _group_words(self, tiles: int) -> int:
        return SLOTS * self.vectors * tiles * self.pairs * 128

    def _registers_allow(self, held: tuple[int, ...]) -> bool:
        share = -(-self.pairs // self.warps)
        return REGISTERS not in held or (self.slices_a_block == 1 and share <= _REGISTER_PAIRS)

    def _parts_beside(self, held: tuple[int, ...]) -> int:
        return max(0, self.limits.shared - self._fixed_bytes(held)) // _PART

    def _fixed_bytes(self, held: tuple[int, ...]) -> int:
        gates = GATES[self.kind.reset]
        matrices = held[-gates:].count(SHARED) * self.slices_a_block * self.pairs * _FRAGMENT
        products = 1 if self.backward else {"before": 2, "after": 3, "none": 1}[self.kind.reset]
        return matrices + 2 * products * self.warps * _PARTIAL
