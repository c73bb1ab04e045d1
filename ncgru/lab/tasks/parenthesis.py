r"""Parenthesis: after every symbol, how many brackets of each of three types are open.

The count of a type moves as x_t = clamp(x_{t-1} + d_t, 0, 5) with d_t in {-1, 0, 1}. With S_t = d_1 + ... + d_t and
y_t = x_t - S_t this reads y_t = clamp(y_{t-1}, -S_t, 5 - S_t): a chain of plain clamps. A clamp to [l1, h1] followed by
one to [l2, h2] is the clamp to [clamp(l1, l2, h2), clamp(h1, l2, h2)]. So all prefixes of the chain follow from
ceil(log2 T) rounds that each double the reach of every step's clamp, instead of from T steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ncgru.lab.tasks.base import Batch
from ncgru.lab.tasks.counter import integers
from ncgru.lab.tasks.synthetic import SyntheticTask, one_hot

TYPES = 3
HIGHEST = 5
ALPHABET = "()[]{}."
"""The tokens in the order of their numbers: each type's opening and closing bracket, and the noise symbol."""


@dataclass(frozen=True)
class Parenthesis(SyntheticTask):
    """Tokens are uniform over the seven of `ALPHABET`, one-hot.

    The target at every step is, for each type, the number of open brackets after this symbol: an opening bracket adds
    one, up to 5, a closing one takes one away, down to 0. The 18 outputs are linear: for each type six numbers that
    shall be the one-hot vector of the count. The loss is the mean of the squared differences over batch, time, types
    and classes.

    Attributes:
        length: T.
        train_size: number of training sequences; None makes every batch fresh.
        test_size: number of test sequences.
    """

    length: int = 100
    train_size: int | None = None
    test_size: int = 1600

    input_size = len(ALPHABET)
    output_size = TYPES * (HIGHEST + 1)

    def __post_init__(self) -> None:
        self._check_sizes()

    @property
    def name(self) -> str:
        return f"parenthesis-{self.length}"

    @property
    def trivial_loss(self) -> float:
        """(1/6) sum_c p_c (1 - p_c), with p_c the share of the T steps at which the count is c.

        The best constant for output c is p_c, and the variance of its target is p_c (1 - p_c). The p_c follow from the
        counts' Markov chain, which starts at 0 and goes up and down with probability 1/7 each, stopping at 0 and 5.
        """
        step = 1 / len(ALPHABET)
        now = [1.0] + [0.0] * HIGHEST
        sums = [0.0] * len(now)
        for _ in range(self.length):
            now = [
                (1 - 2 * step) * p + step * now[max(c - 1, 0)] + step * now[min(c + 1, HIGHEST)]
                for c, p in enumerate(now)
            ]
            sums = [s + p for s, p in zip(sums, now, strict=True)]
        shares = [s / self.length for s in sums]
        return sum(p * (1 - p) for p in shares) / len(shares)

    def generate(self, keys: Tensor, *, dtype: torch.dtype = torch.float32) -> Batch:
        """The sequences with these keys: inputs [T, B, 7], targets [T, B, 3] (counts)."""
        tokens = integers(keys, self.length, len(ALPHABET))
        return Batch(one_hot(tokens, len(ALPHABET), self.input_size, dtype), open_brackets(tokens))

    def row_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared difference from the counts' one-hot vectors."""
        outputs = self._check_outputs(outputs, *targets.shape[:2])
        wanted = one_hot(targets, HIGHEST + 1, HIGHEST + 1, outputs.dtype).flatten(2)
        return (outputs - wanted).square().mean((0, 2))

    def row_accuracies(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Share of the counts at which the largest of the six outputs stands."""
        answers = outputs.reshape(*targets.shape, HIGHEST + 1).argmax(-1)
        return (answers == targets).to(torch.float32).mean((0, 2))


def open_brackets(tokens: Tensor) -> Tensor:
    """Numbers of open brackets of each type after each token: int64 [T, B] to int64 [T, B, 3]."""
    # Row k of effects holds what token k does to each type. float32 holds all sums exactly and has the fastest clamp.
    kinds = torch.eye(TYPES, device=tokens.device)
    effects = torch.cat((torch.stack((kinds, -kinds), 1).flatten(0, 1), kinds.new_zeros(1, TYPES)))
    walk = F.embedding(tokens, effects).cumsum(0)  # S, [T, B, 3]
    bounds = torch.stack((-walk, HIGHEST - walk))  # the clamps' lower and upper ends, [2, T, B, 3]
    reach = 1
    while reach < tokens.shape[0]:
        bounds[:, reach:] = torch.clamp(bounds[:, :-reach], bounds[0, reach:], bounds[1, reach:])
        reach *= 2
    return (walk + torch.clamp(torch.zeros_like(walk), bounds[0], bounds[1])).to(torch.int64)
