"""The programs of this package, with the local memory that their kernels may take."""

from __future__ import annotations

from ncgru._cuda import Variant, program
from ncgru.orthogonal.cuda import small


def variants() -> list[Variant]:
    """Every program."""
    small_ones = [
        Variant(small.program(rows, chunk), local_bytes=256) for rows in small.ROWS for chunk in small.chunks_of(rows)
    ]
    # Local memory is for the structures that large functions, which are called and not inlined, take by reference.
    return [*small_ones, Variant(program("ncgru.orthogonal.cuda", "large.cu", {}), local_bytes=160)]
