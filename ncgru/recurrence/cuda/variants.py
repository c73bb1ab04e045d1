"""Programs of this package that stand for all, with the local memory that their kernels may take."""

from __future__ import annotations

from ..._cuda import Variant, program
from . import small
from .kind import Kind, Limits
from .large import Design

_H200 = Limits(multiprocessors=132, shared=232448)

_SMALL = (
    Kind(56, "float32", "before", "modrelu"),
    Kind(128, "float32", "before", "modrelu"),
    Kind(128, "bfloat16", "after", "tanh"),
    Kind(100, "float16", "none", "relu"),
)
_LARGE = (
    Kind(256, "float32", "before", "modrelu"),
    Kind(1150, "float32", "before", "modrelu"),
    Kind(1024, "float32", "before", "modrelu", tf32=True),
    Kind(1024, "bfloat16", "before", "modrelu"),
    Kind(512, "float16", "after", "tanh"),
    Kind(512, "float32", "none", "modrelu"),
    Kind(2048, "float32", "before", "modrelu"),
)


def variants() -> list[Variant]:
    """Each kind of recurrence, dtype and regime at least once, at sizes that fill the registers."""
    sources = [("small.cu", small.plan(kind, _H200, 16, 1, backward=False).defines) for kind in _SMALL]
    sources += [("large.cu", Design(kind, _H200, backward=False).defines) for kind in _LARGE]
    return [Variant(program("ncgru.recurrence.cuda", source, defines), local_bytes=16) for source, defines in sources]
