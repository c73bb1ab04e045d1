"""Tasks whose sequences are made on the device, each from its own 64-bit key.

Legend: T time, B batch, K width of an input, S seeds trained side by side.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ncgru._checks import positive_int
from ncgru.lab.tasks.base import Batch, Source, Task, check_position, check_split, checked_seeds, rank_rows
from ncgru.lab.tasks.counter import sequence_keys, stream_key


class SyntheticTask(Task):
    """A task that can make any sequence from a key.

    Sequence i of a stream is row i mod B of batch i // B, or, where the training set is fixed, sequence i mod
    `train_size`; so batches of every size walk through the same sequences in the same order.
    """

    length: int
    train_size: int | None = None
    """Number of different training sequences; None makes every batch fresh."""
    test_size: int = 1000

    @abstractmethod
    def generate(self, keys: Tensor, *, dtype: torch.dtype = torch.float32) -> Batch:
        """The sequences with these keys (int64 [B]), on the device of the keys."""

    def source(
        self,
        split: str,
        *,
        batch_size: int,
        seed: int | Sequence[int] = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> SyntheticSource:
        """See `Task.source`; the test set must be a whole number of batches."""
        size = self.train_size if check_split(self, split) == "train" else self.test_size
        rows = rank_rows(batch_size, rank, world_size)
        if split == "test" and self.test_size % batch_size:
            raise ValueError(
                f"batch_size must divide the {self.test_size} test sequences, got {batch_size}; "
                f"pass {_divisor_below(self.test_size, batch_size)}"
            )
        return SyntheticSource(self, split, batch_size, rows, size, seed, device, dtype)

    def _check_sizes(self) -> None:
        positive_int("length", self.length, "pass the task's T")
        positive_int("test_size", self.test_size, "pass the number of test sequences")
        if self.train_size is not None:
            positive_int("train_size", self.train_size, "pass the number of training sequences, or None for fresh ones")


class SyntheticSource(Source):
    """Batches made on the device from (seed, position).

    `batch` launches the same work at every position and never waits for the device. A position that is an int64 tensor
    of no dimensions on the device may be changed in place between replays of a captured CUDA graph.
    """

    def __init__(
        self,
        task: SyntheticTask,
        split: str,
        batch_size: int,
        rows: range,
        size: int | None,
        seed: int | Sequence[int],
        device: torch.device | str | None,
        dtype: torch.dtype,
    ) -> None:
        seeds = torch.tensor(checked_seeds(seed), device=device)
        self.task = task
        self.batch_size = batch_size
        self.batches_per_epoch = None if size is None else -(-size // batch_size)
        self._size = size
        self._dtype = dtype
        self._streams = stream_key(seeds, split).unsqueeze(1)  # [S, 1]
        self._rows = torch.arange(rows.start, rows.stop, device=device)

    def batch(self, position: int | Tensor) -> Batch:
        """The batch at `position`; [T, S * B / world_size, ...]."""
        if not isinstance(position, Tensor):
            check_position(position)
        index = self._rows + position * self.batch_size
        if self._size is not None:
            index %= self._size
        keys = sequence_keys(self._streams, index).flatten()
        return self.task.generate(keys, dtype=self._dtype)


def one_hot(tokens: Tensor, values: int, width: int, dtype: torch.dtype) -> Tensor:
    """One-hot vectors of tokens 0, ..., values - 1; a token of `width` or more becomes the zero vector.

    A row of a small table is copied for each token, which is several times as fast as a comparison or a scatter.
    """
    return F.embedding(tokens, torch.eye(values, width, dtype=dtype, device=tokens.device))


def _divisor_below(number: int, bound: int) -> int:
    """The largest divisor of `number` that is at most `bound`."""
    return next(d for d in range(min(number, bound), 0, -1) if number % d == 0)
