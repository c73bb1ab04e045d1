"""What is measured, in groups of at most about a hundred seconds, and what must be reached.

T time steps, B batch, n hidden units and input features.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    T: int
    B: int
    n: int

    def __str__(self) -> str:
        return f"T{self.T} B{self.B} n{self.n}"


FLOAT32, TF32, BF16, FP16 = "float32", "tf32", "bfloat16", "float16"
HALF = (BF16, FP16)

PAPER = (Shape(200, 16, 56), Shape(220, 128, 118), Shape(400, 50, 80), Shape(2020, 50, 96))
SMALL = tuple(Shape(512, batch, n) for n, batch in itertools.product((64, 128), (16, 64, 256)))
LARGE_SIZES = (192, 256, 512, 768, 1024)
CHARACTERS = (Shape(100, 32, 430), Shape(100, 32, 1000))
WORDS = (Shape(70, 20, 400), Shape(70, 20, 1150))
LANGUAGE = (*CHARACTERS, *WORDS)
TF32_SHAPES = tuple(Shape(512, batch, n) for batch, n in itertools.product((16, 64), (256, 512, 1024)))
ORTHOGONAL_SIZES = (56, 80, 96, 118, 128, 256, 512, 1024, 2048)
FIRST_USE = ((Shape(32, 16, 56), FLOAT32), (Shape(32, 16, 512), FLOAT32), (Shape(32, 16, 1024), BF16))


def large(batch: int) -> tuple[Shape, ...]:
    return tuple(Shape(512, batch, n) for n in LARGE_SIZES)


@dataclass(frozen=True)
class Group:
    """Shapes that are measured in one go, each with all its contestants in turn.

    Attributes:
        shapes: what is run.
        dtypes: in which precisions; "tf32" is float32 with tf32 allowed to everybody.
    """

    shapes: Sequence[Shape]
    dtypes: Sequence[str]


GROUPS = {
    "paper": Group(PAPER, (FLOAT32,)),
    "small": Group(SMALL, (FLOAT32,)),
    **{f"large-{batch}": Group(large(batch), (FLOAT32,)) for batch in (16, 64, 256)},
    **{f"half-{batch}": Group(large(batch), HALF) for batch in (16, 64, 256)},
    "language": Group(LANGUAGE, (FLOAT32,)),
    "language-half": Group(LANGUAGE, HALF),
    "tf32": Group(TF32_SHAPES, (TF32,)),
}
"""Groups of layers; the further groups "orthogonal" and "first-use" measure something else."""

OTHER_GROUPS = ("orthogonal", "first-use")

OURS, GRU, LSTM, LOOP, REFERENCE = "NCGRU", "nn.GRU", "nn.LSTM", "plain PyTorch", 'backend="reference"'
"""`LOOP` is NC-GRU's cell as one writes it, step after step, with autograd's backward; `REFERENCE` is NCGRU's own."""


@dataclass(frozen=True)
class Bar:
    """What must be reached: the other's time over ours, for a training step.

    Attributes:
        title: for people.
        groups: the groups that hold its shapes.
        against: who is the other; its fastest precision counts where it has several.
        must: least ratio of each shape.
        aim: the ratio to strive for.
        mean: least geometric mean, if any.
        sizes: the n that count, if not all.
        theirs: precisions of the other, if not those of the group.
    """

    title: str
    groups: Sequence[str]
    against: str
    must: float
    aim: float | None
    mean: float | None = None
    sizes: Sequence[int] | None = None
    theirs: Sequence[str] | None = None


BARS = (
    Bar("The paper's shapes against nn.GRU", ("paper",), GRU, 1.5, 4.0),
    Bar("The paper's shapes against plain PyTorch", ("paper",), LOOP, 150.0, None),
    Bar("n = 64 and 128 against nn.GRU", ("small",), GRU, 1.0, 3.0, mean=1.5),
    Bar("n = 192 to 1024 at B = 16 and 64, float32, against nn.GRU", ("large-16", "large-64"), GRU, 2.0, 4.0),
    Bar("n = 192 to 1024 at B = 16 and 64, 16 bits, against nn.GRU", ("half-16", "half-64"), GRU, 2.0, 4.0),
    Bar("n = 192 to 1024 at B = 256 against nn.GRU", ("large-256", "half-256"), GRU, 1.0, 2.0),
    Bar("Language models' shapes against nn.GRU", ("language", "language-half"), GRU, 2.0, 4.0),
    Bar("tf32 allowed to both, against nn.GRU", ("tf32",), GRU, 1.5, 3.0),
    Bar(
        "16 bits against the fp16 nn.LSTM at B = 16",
        ("half-16",),
        LSTM,
        0.5,
        1.0,
        sizes=(256, 512, 768, 1024),
        theirs=(FP16,),
    ),
)

ORTHOGONAL_BARS = ((1024, 10.0, 30.0), (2048, 4.0, 6.0))
"""Up to which n, how many times as fast as torch's Cayley parametrisation it must be, and the aim."""
SHARE_MUST, SHARE_AIM = 0.10, 0.03
"""Largest share of a training step at the paper's shapes that the orthogonal update may take, and the aim."""
