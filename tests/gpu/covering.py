"""Which recurrences the GPU is proved on: few enough for minutes, and every two things that may differ meet."""

from __future__ import annotations

import itertools

from ncgru.recurrence.cuda.kind import Kind
from tests.recurrence.cuda.proof import Case

SMALL_SIZES = (1, 2, 7, 16, 31, 56, 80, 96, 118, 127, 128)
LARGE_SIZES = (129, 192, 200, 255, 256, 430, 512, 1000, 1024, 1150, 2048)
SIZES = SMALL_SIZES + LARGE_SIZES
BATCHES = (0, 1, 2, 15, 16, 17, 33, 128, 257)
STEPS = (1, 2, 3, 100)
DIRECTIONS = ("forward", "reverse", "both")
RESETS = ("before", "after", "none")
NONLINEARITIES = ("modrelu", "tanh", "relu")
PRECISIONS = ("float32", "bfloat16", "float16", "tf32")


def kind(hidden: int, precision: str, reset: str, nonlinearity: str) -> Kind:
    tf32 = precision == "tf32"
    return Kind(hidden, "float32" if tf32 else precision, reset, nonlinearity, tf32)


def kinds() -> list[Kind]:
    """NC-GRU in float32 at every size; and in each regime every reset, nonlinearity and precision, at sizes in turn."""
    found = [kind(size, "float32", "before", "modrelu") for size in SIZES]
    for sizes in (SMALL_SIZES, LARGE_SIZES):
        choices = itertools.product(PRECISIONS, RESETS, NONLINEARITIES)
        found += [kind(sizes[i % len(sizes)], *choice) for i, choice in enumerate(choices)]
    return list(dict.fromkeys(found))


def cases(number: int, one: Kind) -> list[Case]:
    """Shapes for the kind of this number: each kind meets every T, and kinds one after the other every B."""
    return [
        Case(
            one,
            steps,
            BATCHES[(4 * number + place) % len(BATCHES)],
            DIRECTIONS[(number + number // 9 + place) % 3],
            lengths=(number + number // 4 + place) % 2 == 0,
        )
        for place, steps in enumerate(STEPS)
    ]


REGIMES = (
    kind(56, "float32", "before", "modrelu"),
    kind(128, "bfloat16", "after", "tanh"),
    kind(192, "float32", "after", "relu"),
    kind(256, "float16", "none", "modrelu"),
    kind(1024, "tf32", "before", "tanh"),
    kind(1150, "float32", "before", "modrelu"),
    kind(2048, "float32", "before", "modrelu"),
)
"""In one block and in many, with matrices in registers, in shared memory, and streamed."""

# What the paper trains, at its own lengths or longer, and every way to hold the matrices.
LONG = (
    Case(kind(56, "float32", "before", "modrelu"), 2020, 17, "both", lengths=True),
    Case(kind(96, "float32", "before", "modrelu"), 2020, 50),
    Case(kind(128, "bfloat16", "after", "tanh"), 2020, 257, "reverse", lengths=True),
    Case(kind(192, "float32", "before", "modrelu"), 2020, 33, "both"),
    Case(kind(512, "float16", "none", "tanh"), 2020, 16, "reverse", lengths=True),
    Case(kind(1024, "bfloat16", "before", "modrelu"), 2020, 16),
    Case(kind(1150, "tf32", "after", "relu"), 2020, 2, lengths=True),
    Case(kind(2048, "float32", "before", "tanh"), 2020, 1),
)
