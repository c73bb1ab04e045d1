"""Copying: keep ten symbols through a long delay and repeat them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ncgru.lab.tasks.base import Batch
from ncgru.lab.tasks.counter import integers
from ncgru.lab.tasks.recall import RECALLED, RecallTask
from ncgru.lab.tasks.synthetic import one_hot

_MARKER = 9


@dataclass(frozen=True)
class Copying(RecallTask):
    """Ten symbols from 1, ..., 8, then T zeros, then the marker 9, then nine zeros: T + 20 steps, one-hot of width 10.

    The target is 0 for the first T + 10 steps and then the ten symbols in order, the first at the marker's step.

    Attributes:
        length: T, the delay.
        train_size: number of training sequences, which then come round in the same order; None makes every batch fresh.
        test_size: number of test sequences.
    """

    length: int = 1000
    train_size: int | None = None
    test_size: int = 1000

    input_size = 10
    output_size = 9
    symbols = 8

    def __post_init__(self) -> None:
        self._check_sizes()

    @property
    def name(self) -> str:
        return f"copying-{self.length}"

    def generate(self, keys: Tensor, *, dtype: torch.dtype = torch.float32) -> Batch:
        """The sequences with these keys: inputs [T + 20, B, 10], targets [T + 20, B]."""
        symbols = integers(keys, RECALLED, self.symbols) + 1
        tokens = symbols.new_zeros(self.steps, keys.shape[0])
        tokens[:RECALLED] = symbols
        tokens[self.length + RECALLED] = _MARKER
        return Batch(one_hot(tokens, _MARKER + 1, self.input_size, dtype), self._targets(symbols))
