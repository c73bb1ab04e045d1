"""A text as batches: contiguous columns, cut into segments through which the hidden state is carried.

The N tokens are laid into B columns of floor(N / B) steps, each a contiguous piece of the text (what does not fill the
columns is dropped). Segment k covers some steps of all columns; its targets are its inputs one step later. Segments
follow each other without gap and reach the end of the columns.

Random lengths are drawn as usual for AWD-LSTM: the mean is bptt (95 %) or bptt / 2, the length is normal around it with
standard deviation 5, cut to an integer, at least 5. They depend on seed and epoch alone, so any position can be found
again.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

from ncgru.lab.tasks.base import Batch, Source, check_position
from ncgru.lab.tasks.counter import random_bits, sequence_keys, stream_key

_SHORTEST = 5
_SPREAD = 5.0
_FULL_SHARE = 0.95


class Segment(NamedTuple):
    """A stretch of the columns: its inputs are steps start, ..., start + length - 1."""

    epoch: int
    number: int
    start: int
    length: int


class CorpusSource(Source):
    """The segments of one part of a corpus, epoch after epoch.

    Args:
        tokens: int64 [N].
        batch_size: number of columns, those of all ranks.
        rows: the columns that belong to this rank.
        bptt: length of a segment, or its usual mean.
        length_seed: seed of the random lengths; None makes all segments `bptt` long (the last may be shorter).
        copies: how often the columns are repeated side by side.
        device: where the columns are kept.
    """

    def __init__(
        self,
        tokens: Tensor,
        batch_size: int,
        rows: range,
        bptt: int,
        *,
        length_seed: int | None = None,
        copies: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        steps = len(tokens) // batch_size
        if steps < 2:
            raise ValueError(
                f"batch_size must leave at least two tokens a column, got {batch_size} for {len(tokens)} tokens; "
                f"use a smaller batch or a longer text"
            )
        columns = tokens[: steps * batch_size].view(batch_size, steps)[rows.start : rows.stop]
        self.columns = columns.t().repeat(1, copies).contiguous().to(device)  # [steps, B]
        self.bptt = bptt
        self._seed = length_seed
        self._plan: tuple[int, list[int]] = (-1, [])
        self._epoch_starts = [0]
        self.batches_per_epoch = math.ceil((steps - 1) / bptt) if length_seed is None else None

    def segment(self, position: int) -> Segment:
        """Which segment stands at `position`."""
        check_position(position)
        while self._epoch_starts[-1] <= position:
            self._epoch_starts.append(self._epoch_starts[-1] + len(self._ends(len(self._epoch_starts) - 1)))
        epoch = bisect_right(self._epoch_starts, position) - 1
        number = position - self._epoch_starts[epoch]
        ends = self._ends(epoch)
        start = ends[number - 1] if number else 0
        return Segment(epoch, number, start, ends[number] - start)

    def batch(self, position: int | Tensor) -> Batch:
        """The segment at `position`: inputs and targets [length, B]. The position must be an int, as lengths differ."""
        if isinstance(position, Tensor):
            raise TypeError(
                "position must be an int for a text, got a tensor; use segment(position) and window(start, length)"
            )
        segment = self.segment(position)
        return self.window(segment.start, segment.length)

    def window(self, start: int | Tensor, length: int) -> Batch:
        """Steps start, ..., start + length - 1: views for an int; copies for a tensor, which no host has to read."""
        if isinstance(start, int):
            return Batch(self.columns[start : start + length], self.columns[start + 1 : start + length + 1])
        steps = start + torch.arange(length + 1, device=self.columns.device)
        taken = self.columns.index_select(0, steps)
        return Batch(taken[:-1], taken[1:])

    def continues(self, position: int) -> bool:
        """True within an epoch, false for its first segment."""
        return self.segment(position).number > 0

    def learning_rate_scale(self, position: int) -> float:
        """Length of the segment over bptt where lengths are random, else 1."""
        return 1.0 if self._seed is None else self.segment(position).length / self.bptt

    def epoch_start(self, epoch: int) -> int:
        """Position of the first segment of `epoch`."""
        while len(self._epoch_starts) <= epoch:
            self.segment(self._epoch_starts[-1])
        return self._epoch_starts[epoch]

    def _ends(self, epoch: int) -> list[int]:
        """The steps at which the epoch's segments end; the latest epoch's are kept."""
        if self._plan[0] != epoch:
            self._plan = (epoch, segment_ends(self.columns.shape[0] - 1, self.bptt, self._seed, epoch))
        return self._plan[1]


def segment_ends(steps: int, bptt: int, seed: int | None, epoch: int) -> list[int]:
    """Where the segments of `epoch` end that together cover `steps` steps; `seed` None makes each `bptt` long."""
    if seed is None:
        return [*range(bptt, steps, bptt), steps]
    key = sequence_keys(stream_key(torch.tensor([seed]), "train"), torch.tensor([epoch]))
    draws = random_bits(key, 2 * (steps // _SHORTEST + 1)).double().view(2, -1)
    share = (draws + 0.5) / 2**31  # in (0, 1)
    means = torch.where(share[0] < _FULL_SHARE, float(bptt), bptt / 2)
    normal = math.sqrt(2) * torch.erfinv(2 * share[1] - 1)
    lengths = (means + _SPREAD * normal).long().clamp(min=_SHORTEST)
    ends: list[int] = lengths.cumsum(0).tolist()
    return [*(end for end in ends if end < steps), steps]
