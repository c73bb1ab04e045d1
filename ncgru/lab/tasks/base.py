"""What the trainer knows of a task, and of the data that it draws from it.

Legend: T time, B batch, K width of an input or number of classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ncgru._checks import one_of, positive_int


class Batch(NamedTuple):
    """One batch, time first.

    Attributes:
        inputs: [T, B, K] numbers, or [T, B] int64 tokens where the task's `token_inputs` is true.
        targets: [T - first_scored_step, B, ...]: what the outputs of the scored steps are held against.
    """

    inputs: Tensor
    targets: Tensor


class Source(ABC):
    """The batches of one split for one run: the batch at a position is always the same, whatever was drawn before."""

    batches_per_epoch: int | None
    """Batches in one pass over a fixed set; None where every batch is fresh or passes differ in length."""

    @abstractmethod
    def batch(self, position: int | Tensor) -> Batch:
        """The batch at `position`, counted from 0."""

    def continues(self, position: int) -> bool:
        """Whether the network goes into this batch with the state it left the previous one with."""
        return False

    def learning_rate_scale(self, position: int) -> float:
        """Factor for the learning rate at this batch, where batches differ in length."""
        return 1.0

    def epoch_start(self, epoch: int) -> int:
        """Position of the first batch of `epoch`, counted from 0."""
        if self.batches_per_epoch is None:
            raise ValueError("epoch_start needs a fixed set of data, but every batch here is fresh; count positions")
        return epoch * self.batches_per_epoch


class Task(ABC):
    """A task: its sizes, its data, its loss and what the loss is to be compared with.

    Outputs of a network are [T - first_scored_step, B, output_size]: it reads out only the steps that are scored.
    """

    token_inputs: bool = False
    """Whether inputs are token numbers, which need an embedding, rather than vectors."""

    splits: tuple[str, ...] = ("train", "test")

    @property
    @abstractmethod
    def name(self) -> str:
        """Short name with the size, such as `copying-1000`."""

    @property
    @abstractmethod
    def input_size(self) -> int:
        """Width of an input vector, or number of token types."""

    @property
    @abstractmethod
    def output_size(self) -> int:
        """Width of the network's output at one step."""

    @property
    @abstractmethod
    def trivial_loss(self) -> float:
        """Loss of the best network that ignores its inputs (the docstring gives the formula)."""

    @property
    def irreducible_loss(self) -> float | None:
        """Smallest expected loss that any network can reach; None where nobody knows it."""
        return 0.0

    @property
    def first_scored_step(self) -> int:
        """Step from which on the outputs count; a network need not read out the steps before it."""
        return 0

    @abstractmethod
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
    ) -> Source:
        """The batches of `split`.

        Args:
            split: one of `splits`.
            batch_size: size of the joint batch of all ranks.
            seed: which data; several seeds give their joint batches side by side, those of the first seed first.
                Leave it at 0 for evaluation, so that all runs are measured on the same set.
            rank: number of this process; it gets the rank-th of `world_size` equal slices of the joint batch.
            world_size: number of processes that share a batch.
            device: where the data are made.
            dtype: of input vectors and of targets that are numbers.
        """

    @abstractmethod
    def row_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sequence, [B], differentiable; the batch's loss is its mean."""

    @abstractmethod
    def row_accuracies(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The share of right answers in each sequence, [B]."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The objective: the mean loss of the batch's sequences."""
        return self.row_losses(outputs, targets).mean()

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Loss and accuracy of a batch, as scalars on its device; to average over batches, weigh by scored steps."""
        return {
            "loss": self.loss(outputs, targets),
            "accuracy": self.row_accuracies(outputs, targets).mean(),
        }

    def derived_metrics(self, loss: float) -> dict[str, float]:
        """What a mean loss amounts to in the units in which this task is usually reported."""
        return {"share_of_trivial": loss / self.trivial_loss}

    def _check_outputs(self, outputs: Tensor, steps: int, batch: int) -> Tensor:
        """The outputs in at least float32, after a look at their shape."""
        expected = (steps, batch, self.output_size)
        if tuple(outputs.shape) != expected:
            raise ValueError(
                f"outputs must have shape [scored steps, batch, output_size] = {expected}, got {tuple(outputs.shape)}; "
                f"read out steps {self.first_scored_step} and later, time first"
            )
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def check_split(task: Task, split: str) -> str:
    """Return `split` if the task has it, else raise."""
    return one_of("split", split, task.splits)


def check_position(position: int) -> None:
    """Raise unless `position` counts batches from 0."""
    if isinstance(position, bool) or not isinstance(position, int):
        raise TypeError(f"position must be an int, got {type(position).__name__} {position!r}; pass a batch's number")
    if position < 0:
        raise ValueError(f"position must be at least 0, got {position}; batches are counted from 0")


def rank_rows(batch_size: int, rank: int, world_size: int) -> range:
    """The rows of the joint batch that belong to `rank`, else raise."""
    positive_int("batch_size", batch_size, "pass the size of the joint batch of all ranks")
    positive_int("world_size", world_size, "pass the number of processes that share a batch")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be from 0 to {world_size - 1} (world_size - 1), got {rank}; pass the process's number"
        )
    if batch_size % world_size:
        raise ValueError(
            f"batch_size must be a multiple of world_size={world_size}, got {batch_size}; "
            f"pass {batch_size + world_size - batch_size % world_size}"
        )
    share = batch_size // world_size
    return range(rank * share, (rank + 1) * share)


def checked_seeds(seed: int | Sequence[int]) -> list[int]:
    """The seeds as a list, else raise."""
    seeds = [seed] if isinstance(seed, int) else list(seed)
    if not seeds:
        raise ValueError("seed must be an int or hold at least one, got an empty sequence; pass one seed a model")
    for value in seeds:
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"seed must fit into 64 bits with sign, got {value}; pass a number from 0 to 2**63 - 1")
    return seeds


def row_cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of [T, B, K] outputs, averaged over time: [B]."""
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(0)
