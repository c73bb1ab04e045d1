"""What a run is: a frozen description that is complete in itself, checked when it is made, and exact as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from ncgru._checks import one_of, positive_int
from ncgru.lab.recipes import encoding
from ncgru.lab.recipes.specs import ModelSpec, OptimizerSpec, PaperNumber, positive
from ncgru.lab.tasks import Task

__all__ = ["ModelSpec", "OptimizerSpec", "PaperNumber", "Recipe"]

HEADLINES = ("train", "valid", "test")
PRECISIONS = ("float32", "bfloat16")


def check_seed(name: str, seed: object) -> None:
    """Raise unless `seed` can be a run's."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"{name} must be an int, got {seed!r}; pass for example 0")
    if not 0 <= seed < 2**63:
        raise ValueError(f"{name} must be from 0 to 2**63 - 1, got {seed}; pass for example 0")


@dataclass(frozen=True)
class Recipe:
    """A run, complete but for its seed.

    Attributes:
        name: such as `adding-200/nc-gru-c`; a variant is marked by `@`.
        task: what is learnt, with its length.
        model: see `ModelSpec`.
        optimizer: see `OptimizerSpec`.
        steps: number of updates.
        batch_size: sequences (or columns of a text) in the joint batch.
        log_every: updates over which the logged training loss is a mean.
        eval_every: updates between evaluations; None for none.
        eval_splits: what is evaluated then.
        eval_batch_size: sequences in a batch of an evaluation.
        eval_batches: how many batches of each split; None for all.
        clip: largest norm of the gradient; None for no clipping.
        precision: "float32" or "bfloat16" (autocast).
        seeds: which seeds are run unless told otherwise.
        measure_every: updates between measurements of the orthogonal matrices; None for none.
        checkpoint_every: updates between checkpoints.
        headline: the series whose minimum is compared with the paper: "train" (the logged means), "valid" or "test".
        select: None; or the split whose least loss says at which evaluation the headline is read.
        paper: the number of the paper that this run is to reproduce, if there is one.
        note: which variant it is, and in what it deviates.
    """

    name: str
    task: Task
    model: ModelSpec
    optimizer: OptimizerSpec
    steps: int
    batch_size: int
    log_every: int
    eval_every: int | None = None
    eval_splits: tuple[str, ...] = ("test",)
    eval_batch_size: int = 1000
    eval_batches: int | None = None
    clip: float | None = None
    precision: str = "float32"
    seeds: tuple[int, ...] = (0,)
    measure_every: int | None = None
    checkpoint_every: int = 1000
    headline: str = "test"
    select: str | None = None
    paper: PaperNumber | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be a text that is not empty, got {self.name!r}; pass for example 'my/run'")
        for name, kind in (("task", Task), ("model", ModelSpec), ("optimizer", OptimizerSpec)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}; build one")
        for name in ("steps", "batch_size", "log_every", "eval_batch_size", "checkpoint_every"):
            positive_int(name, getattr(self, name), "pass a whole number from 1 on")
        for name in ("eval_every", "eval_batches", "measure_every"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name), "pass a whole number from 1 on, or None")
        if self.clip is not None:
            positive("clip", self.clip, "pass the largest norm of the gradient, or None for no clipping")
        one_of("precision", self.precision, PRECISIONS)
        self._check_seeds()
        self._check_headline()
        if self.model.embedding is None and self.task.token_inputs:
            raise ValueError("model.embedding must be a width for a task of tokens, got None; pass for example 400")
        if self.model.embedding is not None and not self.task.token_inputs:
            raise ValueError(
                f"model.embedding must be None for a task of vectors, got {self.model.embedding}; leave it out"
            )

    def _check_seeds(self) -> None:
        seeds = self.seeds
        if not isinstance(seeds, tuple) or not seeds or len(set(seeds)) < len(seeds):
            raise ValueError(f"seeds must be a tuple of different numbers, got {seeds!r}; pass for example (0, 1)")
        for seed in seeds:
            check_seed("seeds", seed)

    def _check_headline(self) -> None:
        for split in self.eval_splits:
            one_of("eval_splits", split, self.task.splits)
        one_of("headline", self.headline, HEADLINES)
        for name in ("headline", "select"):
            split = getattr(self, name)
            if split not in (None, "train") and (self.eval_every is None or split not in self.eval_splits):
                raise ValueError(
                    f"{name} must be 'train' or a split that is evaluated, got {split!r} with "
                    f"eval_every={self.eval_every} and eval_splits={self.eval_splits}; evaluate it too"
                )

    @property
    def eval_split(self) -> str:
        """The first of `eval_splits`."""
        return self.eval_splits[0]

    def with_settings(self, settings: dict[str, str]) -> Recipe:
        """A recipe with some fields changed, their values given as text.

        Args:
            settings: for each field its dotted path (`optimizer.lr`), its own name where only one field has it (`lr`),
                or an alias (`hidden_size`, `learning_rate`), and its value.

        Raises:
            ValueError: unknown or ambiguous field, or a value that it cannot have.
        """
        from ncgru.lab.recipes.settings import apply

        return apply(self, settings)

    def quick(self) -> Recipe:
        """A smaller run of the same kind for a CPU: fewer steps, shorter sequences; its name ends in `@quick`."""
        from ncgru.lab.recipes.quick import quick

        return quick(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as what JSON has; `from_dict` gives an equal recipe back."""
        encoded: dict[str, Any] = encoding.encode(self)
        return encoded

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Recipe:
        """The recipe that `to_dict` has described.

        Raises:
            ValueError: a field is missing, unknown or of the wrong type.
        """
        recipe: Recipe = encoding.decode(cls, description, "recipe")
        return recipe

    def difference(self, other: Recipe) -> list[tuple[str, Any, Any]]:
        """The fields in which `other` differs: dotted name, this recipe's value, the other's."""
        mine, theirs = encoding.flatten(self.to_dict()), encoding.flatten(other.to_dict())
        names = [*mine, *(name for name in theirs if name not in mine)]
        return [(name, mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)]

    def variant(self, mark: str, note: str, **changes: Any) -> Recipe:
        """This recipe as `name@mark` with some fields changed; a change of `model`, `optimizer` or `task` is a dict."""
        for field in ("model", "optimizer", "task"):
            if isinstance(changes.get(field), dict):
                changes[field] = dataclasses.replace(getattr(self, field), **changes[field])
        return replace(self, name=f"{self.name}@{mark}", note=note, **changes)
