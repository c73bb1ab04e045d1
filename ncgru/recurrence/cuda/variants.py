"""Programs of this package that stand for all, with the local memory that their kernels may take."""

from __future__ import annotations

from ..._cuda import Program, Variant, program
from . import product, small
from .kind import Kind, Limits
from .large import Design

_H200 = Limits(multiprocessors=132, shared=232448)
_CONSUMER = Limits(multiprocessors=84, shared=101376)

# Any two of reset, nonlinearity and precision meet in each table, and each way to hold the matrices is among them.
_SMALL = (
    Kind(56, "float32", "before", "modrelu"),
    Kind(128, "float32", "before", "modrelu"),
    Kind(128, "float16", "before", "tanh"),
    Kind(64, "bfloat16", "before", "relu"),
    Kind(100, "float16", "after", "modrelu"),
    Kind(128, "bfloat16", "after", "tanh"),
    Kind(128, "float32", "after", "relu"),
    Kind(64, "bfloat16", "none", "modrelu"),
    Kind(64, "float32", "none", "tanh"),
    Kind(100, "float16", "none", "relu"),
)
_LARGE = (
    Kind(256, "float32", "before", "modrelu"),
    Kind(512, "float32", "before", "modrelu"),
    Kind(1150, "float32", "before", "modrelu"),
    Kind(2048, "float32", "before", "modrelu"),
    Kind(512, "float32", "after", "tanh"),
    Kind(512, "float32", "none", "relu"),
    Kind(1024, "float32", "before", "tanh", tf32=True),
    Kind(512, "float32", "after", "relu", tf32=True),
    Kind(256, "float32", "none", "modrelu", tf32=True),
    Kind(1024, "bfloat16", "before", "relu"),
    Kind(512, "bfloat16", "none", "tanh"),
    Kind(430, "float16", "before", "modrelu"),
    Kind(512, "float16", "after", "tanh"),
    Kind(256, "float16", "none", "relu"),
)
_LARGE_ON_A_SMALLER_GPU = (
    Kind(1024, "float32", "before", "modrelu"),
    Kind(2048, "bfloat16", "after", "modrelu"),
)
_PACKAGE = "ncgru.recurrence.cuda"
_LOCAL_BYTES = 16
_LOCAL_BYTES_OF_PRODUCTS = 24
# Wide blocks with stacks, and a matrix in registers in part. They were measured to be faster than what spills less.
_MORE_LOCAL_BYTES = {
    Kind(512, "float32", "before", "modrelu"): 56,
    Kind(1024, "bfloat16", "before", "relu"): 40,
    Kind(1150, "float32", "before", "modrelu"): 64,
    Kind(2048, "float32", "before", "modrelu"): 40,
}


def program_of(kind: Kind, limits: Limits) -> Program:
    """The program that runs this kind, in both passes, on a GPU of these limits."""
    if kind.hidden > small.LARGEST_HIDDEN:
        source, defines = "large.cu", Design(kind, limits, backward=False).defines
    else:
        source, defines = "small.cu", small.plan(kind, limits, 1, 1, backward=False).defines
    return program(_PACKAGE, source, defines)


def kinds() -> list[tuple[Kind, Limits]]:
    """The kinds whose programs stand for all, at sizes that fill the registers, and the GPUs they are designed for."""
    return [(kind, _H200) for kind in _SMALL + _LARGE] + [(kind, _CONSUMER) for kind in _LARGE_ON_A_SMALLER_GPU]


def variants() -> list[Variant]:
    """The programs of all `kinds`, and those of products over all steps."""
    found = [
        Variant(program_of(kind, limits), local_bytes=_MORE_LOCAL_BYTES.get(kind, _LOCAL_BYTES))
        for kind, limits in kinds()
    ]
    return [*found, Variant(program(_PACKAGE, "split.cu", {})), *_products()]


def _products() -> list[Variant]:
    return [
        Variant(program(_PACKAGE, "product.cu", tiling.defines(*layout)), local_bytes=_LOCAL_BYTES_OF_PRODUCTS)
        for tiling in product.TILINGS
        for layout in ((True, True), (True, False), (False, False))
    ]
