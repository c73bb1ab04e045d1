"""Adding: sum the two marked numbers of a long sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ncgru.lab.tasks.base import Batch
from ncgru.lab.tasks.counter import integers, uniform
from ncgru.lab.tasks.synthetic import SyntheticTask


@dataclass(frozen=True)
class Adding(SyntheticTask):
    """Two channels: values uniform over [0, 1), and marks, which are 1 at two steps and 0 elsewhere.

    One marked step is uniform over 0, ..., h - 1 and the other over h, ..., T - 1, with h = floor((T - 1) / 2). The
    target is the sum of the two marked values. Only the output of the last step is scored, by its squared error.

    The training sequences are a fixed set in a fixed order, by default 100,000 of them. They are made anew at each
    visit, so they need no memory.

    Attributes:
        length: T, at least 3.
        train_size: number of training sequences; None makes every batch fresh.
        test_size: number of test sequences.
    """

    length: int = 200
    train_size: int | None = 100_000
    test_size: int = 10_000

    input_size = 2
    output_size = 1
    trivial_loss = 1 / 6
    """The best constant is the mean, 1; the loss is then the variance of a sum of two uniforms, 2/12 = 1/6."""

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.length < 3:
            raise ValueError(f"length must be at least 3, got {self.length}; each half needs room for its mark")

    @property
    def name(self) -> str:
        return f"adding-{self.length}"

    @property
    def first_scored_step(self) -> int:
        return self.length - 1

    def generate(self, keys: Tensor, *, dtype: torch.dtype = torch.float32) -> Batch:
        """The sequences with these keys: inputs [T, B, 2], targets [1, B, 1]."""
        half = (self.length - 1) // 2
        values = uniform(keys, self.length, dtype=dtype)
        early = integers(keys, 1, half, first=self.length)
        late = integers(keys, 1, self.length - half, first=self.length + 1) + half
        marked = torch.cat((early, late))
        inputs = values.new_zeros(*values.shape, 2)
        inputs[..., 0] = values
        inputs[..., 1].scatter_(0, marked, 1.0)
        return Batch(inputs, values.gather(0, marked).sum(0).view(1, -1, 1))

    def row_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Squared errors of the last step's outputs."""
        outputs = self._check_outputs(outputs, 1, targets.shape[1])
        return (outputs - targets).square().flatten()

    def row_accuracies(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """1 where the sum is off by less than 0.04, the usual bound for this task, else 0."""
        return ((outputs - targets).abs() < 0.04).flatten().to(torch.float32)
