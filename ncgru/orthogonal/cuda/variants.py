"""The programs of this package, with the local memory that their kernels may take."""

from __future__ import annotations

from ncgru._cuda import Variant
from ncgru.orthogonal.cuda import large, small


def variants() -> list[Variant]:
    """Every program."""
    small_ones = [
        Variant(small.program(rows, chunk), local_bytes=256) for rows in small.ROWS for chunk in small.chunks_of(rows)
    ]
    # Local memory is for what large functions, which call each other and are not inlined, keep meanwhile.
    return [*small_ones, *(Variant(large.program(shape), local_bytes=384) for shape in large.SHAPES)]
