"""What copying and denoise have in common: after T + 10 steps of silence, ten symbols are recalled in order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ncgru.lab.tasks.base import row_cross_entropies
from ncgru.lab.tasks.synthetic import SyntheticTask

RECALLED = 10
"""Symbols to recall."""


class RecallTask(SyntheticTask):
    """T + 20 steps; class 0 means silence and classes 1, ..., `symbols` are the symbols.

    The loss is the cross-entropy in nats, averaged over the batch and all T + 20 steps.
    """

    symbols: int

    @property
    def steps(self) -> int:
        """Length of a sequence, T + 20."""
        return self.length + 2 * RECALLED

    @property
    def trivial_loss(self) -> float:
        """10 ln(symbols) / (T + 20): silence is known from the clock, and each recalled symbol is uniform."""
        return RECALLED * math.log(self.symbols) / self.steps

    def row_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats, the mean over all T + 20 steps."""
        return row_cross_entropies(self._check_outputs(outputs, *targets.shape), targets)

    def row_accuracies(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Share of the ten symbols that are recalled; the silence before them does not count."""
        right = outputs[-RECALLED:].argmax(-1) == targets[-RECALLED:]
        return right.to(torch.float32).mean(0)

    def derived_metrics(self, loss: float) -> dict[str, float]:
        """Adds the nats for each recalled symbol, if all of the loss is put down to them."""
        return {**super().derived_metrics(loss), "nats_per_symbol": loss * self.steps / RECALLED}

    def _targets(self, symbols: Tensor) -> Tensor:
        """Silence, then the symbols [10, B]: [T + 20, B]."""
        targets = symbols.new_zeros(self.steps, symbols.shape[1])
        targets[-RECALLED:] = symbols
        return targets
