"""The programs of this package, with the local memory that their kernels may take."""

from __future__ import annotations

from ncgru._cuda import Variant, program


def variants() -> list[Variant]:
    """Both programs; they know no macros."""
    # Local memory is for the structures that large functions, which are called and not inlined, take by reference.
    return [
        Variant(program("ncgru.orthogonal.cuda", "small.cu", {}), local_bytes=320),
        Variant(program("ncgru.orthogonal.cuda", "large.cu", {}), local_bytes=160),
    ]
