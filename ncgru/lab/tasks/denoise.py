r"""Denoise: ten symbols among noise, to be recalled in order.

Two variants of the generator. The `published` one draws the ten positions with replacement; where two coincide the
later symbol overwrites the earlier, which is then lost though the target still asks for it. The `corrected` one draws
them without replacement. The published one also encodes the marker as the zero vector (one-hot vectors one too narrow),
the corrected one gives it a unit of its own.

How much is lost for good. Of N = T + 9 places m stay occupied with probability C(N, m) Sur(10, m) / N^10, where
Sur(a, b) counts the maps from a things onto b. Given the m symbols that are left, the ten of the target fall into m
runs of which only the last symbol is seen. Step t (1 to 10) ends run i with probability

    a_i = C(10, t) Sur(t, i) Sur(10 - t, m - i) / Sur(10, m);

otherwise, with probability b = 1 - sum_i a_i, its symbol is lost and uniform. The best answer to the inputs therefore
gives symbol s the probability b / 9 plus the a_i of all runs with s_i = s. Its entropy, averaged over the symbols s_i
and over m and summed over t, is the irreducible loss: 1.543 nats a sequence for T = 200 and 0.809 for T = 400. The
average depends only on which s_i are equal, so it is a sum over set partitions of at most five things.

A network that were shown the previous target symbols could tell where the loss happened and would reach 0.891 and
0.461 nats, the entropy of the ten symbols taken together. Here nothing shows them, so that bound cannot be reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ncgru._checks import one_of
from ncgru.lab.tasks.base import Batch
from ncgru.lab.tasks.counter import integers
from ncgru.lab.tasks.recall import RECALLED, RecallTask
from ncgru.lab.tasks.synthetic import one_hot

_SYMBOLS = 9
_MARKER = 10
VARIANTS = ("published", "corrected")


@dataclass(frozen=True)
class Denoise(RecallTask):
    """Ten symbols from 1, ..., 9 at random increasing positions among 0, ..., T + 8, with zeros (noise) elsewhere; the
    marker 10 at step T + 9; then ten zeros. The target is 0 for the first T + 10 steps and then the ten symbols.

    Attributes:
        length: T.
        variant: `published` (positions with replacement, one-hot of width 10 with the marker as the zero vector) or
            `corrected` (without replacement, width 11).
        train_size: number of training sequences; None makes every batch fresh.
        test_size: number of test sequences.
    """

    length: int = 200
    variant: str = "published"
    train_size: int | None = None
    test_size: int = 1280

    output_size = _SYMBOLS + 1
    symbols = _SYMBOLS

    def __post_init__(self) -> None:
        self._check_sizes()
        one_of("variant", self.variant, VARIANTS)

    @property
    def name(self) -> str:
        return f"denoise-{self.length}" if self.variant == "published" else f"denoise-corrected-{self.length}"

    @property
    def input_size(self) -> int:
        return _MARKER if self.variant == "published" else _MARKER + 1

    @property
    def places(self) -> int:
        """Number of steps that can hold a symbol, T + 9."""
        return self.length + RECALLED - 1

    @property
    def irreducible_loss(self) -> float:
        """What lost symbols cost the best network (derived above), the mean over all steps; 0 if none is lost."""
        return lost_nats(self.places) / self.steps if self.variant == "published" else 0.0

    def generate(self, keys: Tensor, *, dtype: torch.dtype = torch.float32) -> Batch:
        """The sequences with these keys: inputs [T + 20, B, 10 or 11], targets [T + 20, B]."""
        symbols = integers(keys, RECALLED, _SYMBOLS) + 1
        draw = _places_with_replacement if self.variant == "published" else _places_without_replacement
        positions = draw(keys, self.places).sort(0).values
        # Of equal positions the last keeps its place; the others go to the marker's row, which is written afterwards.
        overwritten = positions[:-1] == positions[1:]
        positions[:-1].masked_fill_(overwritten, self.places)
        tokens = symbols.new_zeros(self.steps, keys.shape[0]).scatter_(0, positions, symbols)
        tokens[self.places] = _MARKER
        return Batch(one_hot(tokens, _MARKER + 1, self.input_size, dtype), self._targets(symbols))


def _places_with_replacement(keys: Tensor, places: int) -> Tensor:
    """Ten independent places a sequence, [10, B]."""
    return integers(keys, RECALLED, places, first=RECALLED)


def _places_without_replacement(keys: Tensor, places: int) -> Tensor:
    """A uniformly random set of ten places a sequence, [10, B], by Floyd's method.

    The k-th pick is uniform over 0, ..., top with top = places - 10 + k; if it is there already, top itself, which
    cannot be, takes its place.
    """
    tops = torch.arange(places - RECALLED, places, device=keys.device).unsqueeze(1)
    picks = integers(keys, RECALLED, tops + 1, first=RECALLED)
    for k in range(1, RECALLED):
        taken = (picks[:k] == picks[k]).any(0)
        picks[k] = torch.where(taken, tops[k], picks[k])
    return picks


@cache
def lost_nats(places: int) -> float:
    """Irreducible loss in nats a sequence when ten symbols fall on `places` places with replacement."""
    total = 0.0
    for left in range(1, min(RECALLED, places) + 1):
        maps = _onto(RECALLED, left)
        probability = math.comb(places, left) * maps / places**RECALLED
        for step in range(1, RECALLED + 1):
            ends = [
                math.comb(RECALLED, step) * _onto(step, i) * _onto(RECALLED - step, left - i) / maps
                for i in range(1, left + 1)
            ]
            total += probability * _mean_entropy([p for p in ends if p > 0])
    return total


@cache
def _onto(things: int, boxes: int) -> int:
    """Number of maps from `things` things onto `boxes` boxes."""
    if things == 0 or boxes == 0:
        return int(things == boxes)
    return boxes * (_onto(things - 1, boxes) + _onto(things - 1, boxes - 1))


def _mean_entropy(masses: list[float]) -> float:
    """Mean entropy in nats of a symbol that is s_i with probability masses[i], else uniform, over independent s_i."""
    rest = max(0.0, 1.0 - sum(masses)) / _SYMBOLS
    mean = 0.0
    for blocks in _partitions(masses):
        probability = math.perm(_SYMBOLS, len(blocks)) / _SYMBOLS ** len(masses)
        chances = [rest + block for block in blocks] + [rest] * (_SYMBOLS - len(blocks))
        mean -= probability * sum(p * math.log(p) for p in chances if p > 0)
    return mean


def _partitions(masses: list[float]) -> Iterator[list[float]]:
    """The sums over the blocks, for every partition of the masses into blocks."""
    if not masses:
        yield []
        return
    for blocks in _partitions(masses[1:]):
        yield [masses[0], *blocks]
        for k, block in enumerate(blocks):
            yield [*blocks[:k], masses[0] + block, *blocks[k + 1 :]]
