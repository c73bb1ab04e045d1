"""The launches of `small.cu`: how a block's lanes share the matrices, and how many rows of the batch it runs.

Arithmetic alone; it needs no GPU. H hidden size, B batch, D directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .kind import Kind, Limits

LARGEST_HIDDEN = 128
MOST_ROWS = 2

_WARP = 32
_REGISTERS = 65536
"""Registers of a multiprocessor, which its blocks share."""
_OTHER_REGISTERS = 72
"""Registers a thread is given beside the matrices (mostly; where that is too many, it makes do with 60)."""


@dataclass(frozen=True)
class Layout:
    """How lanes share the matrices: a group of `lanes` owns `units` hidden units, each lane some of their columns.

    All layouts with the same ratio of lanes to units have the same threads and registers. More units a lane mean fewer
    numbers read from shared memory, more shuffles, and a longer chain of them.
    """

    lanes: int
    units: int

    def threads(self, hidden: int) -> int:
        """Threads of a block, in whole warps."""
        return -(-hidden // self.units * self.lanes // _WARP) * _WARP

    def columns(self, hidden: int) -> int:
        """Columns of each matrix row that a lane holds."""
        return -(-hidden // self.lanes)

    def registers(self, hidden: int, gates: int) -> int:
        """What a thread takes, about; they are given in eights."""
        return min(256, -(-(gates * self.units * self.columns(hidden) + _OTHER_REGISTERS) // 8) * 8)

    def blocks_a_multiprocessor(self, hidden: int, gates: int) -> int:
        return max(1, _REGISTERS // (self.threads(hidden) * self.registers(hidden, gates)))


@dataclass(frozen=True)
class Plan:
    """A launch.

    Attributes:
        defines: macros of the program; none depends on T, B or D.
        name: the kernel.
        grid: blocks of rows, and directions.
        threads: threads of a block.
    """

    defines: Mapping[str, int]
    name: str
    grid: tuple[int, int, int]
    threads: int


def layouts(hidden: int) -> tuple[Layout, ...]:
    """Layouts worth timing, the one in use first.

    Each has 2 threads a unit, so that at H = 128 a block of 256 threads fills the registers to the last; more threads
    mean more reads and shuffles for the same products.
    """
    few_shuffles, middle, few_reads = Layout(4, 2), Layout(8, 4), Layout(16, 8)
    return (few_shuffles, middle, few_reads) if hidden <= 64 else (middle, few_shuffles, few_reads)


def plan(kind: Kind, limits: Limits, batch: int, directions: int, backward: bool) -> Plan:
    """The launch of a pass. A block runs 2 rows where the GPU could not take all rows at a time otherwise."""
    layout = layouts(kind.hidden)[0]
    at_a_time = limits.multiprocessors * layout.blocks_a_multiprocessor(kind.hidden, kind.gates)
    rows = 1 if batch * directions <= at_a_time else MOST_ROWS
    return Plan(
        {**kind.defines, "LANES": layout.lanes, "UNITS": layout.units},
        f"small_{'backward' if backward else 'forward'}_{rows}",
        (-(-batch // rows), directions, 1),
        layout.threads(kind.hidden),
    )
