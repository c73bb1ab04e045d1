"""What a run is: a frozen description that is complete in itself, checked when it is made, and exact as JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

from ncgru._checks import flag, one_of, positive_int, probability
from ncgru.lab.recipes import encoding
from ncgru.lab.tasks import Task
from ncgru.nn.rotations import RotationLayout
from ncgru.orthogonal.inverse import METHODS
from ncgru.orthogonal.skew import INITS as ANGLES

KINDS: dict[str, tuple[str, ...]] = {
    "lstm": ("tensorflow", "torch"),
    "gru": ("tensorflow", "torch"),
    "cho-gru": ("tensorflow", "torch"),
    "scornn": ("small",),
    "goru": ("small",),
    "nc-gru": ("he", "he-normal-gates", "he-normal-candidate", "normal-biases", "torch"),
}
"""The kinds of model, each with the initialisations that it has; the first is the default."""

READOUTS = ("glorot", "glorot-bias", "denoise", "tiny-normal", "language")
OPTIMIZERS = ("adam", "adamw", "rmsprop", "sgd")
HEADLINES = ("train", "valid", "test")
PRECISIONS = ("float32", "bfloat16")
METRICS = ("loss", "bits_per_character", "perplexity")


@dataclass(frozen=True)
class PaperNumber:
    """A number of the paper's tables.

    Attributes:
        table: which table, 1 to 6.
        value: the number in plain units, those of `metric`.
        text: as it is printed.
        unit: what the printed figure is to be multiplied by or measured in, such as `×10⁻³`.
        metric: what the value is compared with: `loss`, or one of the task's derived metrics.
    """

    table: int
    value: float
    text: str
    unit: str
    metric: str = "loss"

    def __post_init__(self) -> None:
        positive_int("table", self.table, "pass the number of the paper's table")
        _at_least_zero("value", self.value, "pass the paper's number in plain units")
        one_of("metric", self.metric, METRICS)


@dataclass(frozen=True)
class ModelSpec:
    """A model without its task: the task gives the sizes of input and output.

    Attributes:
        kind: one of `KINDS`.
        hidden_sizes: units of each layer, one number a layer.
        orthogonal: NC-GRU's orthogonal matrices, letters out of r, u, c; "" for other kinds.
        negatives: number of -1's in D (NC-GRU, scoRNN).
        inverse: how (I+A)^-1 is followed: "neumann" (Algorithm 1), "hyperpower" or "exact".
        order: order of the series.
        reset_every: updates between exact inverses; None for never.
        released: whether the update is that of the authors' released code, which differs from Algorithm 1.
        init: initialisation, one of those that `KINDS` has for the kind; "" takes its first.
        angles: first values of the orthogonal matrices: "cayley", "henaff" or "haar".
        capacity: GORU's number of rotation layers.
        embedding: width of the embedding where the task's inputs are tokens.
        tied: whether the read-out has the embedding's weight.
        dropout: share of the last layer's outputs dropped, one mask a sequence (as the next two).
        dropout_input: the same of the embedded inputs.
        dropout_hidden: the same between layers.
        dropout_embedding: share of token types whose embedding is dropped.
        readout: initialisation of the read-out.
        weight_decay_readout: k in the penalty k/2 ‖W‖² on the read-out's weight, which is not part of the logged loss.
        weight_decay_recurrent: the same on the recurrent matrices of the gates that are trained freely.
        activation_penalty: factor of the mean square of the last layer's outputs after dropout (AWD-LSTM's alpha).
        slowness_penalty: factor of the mean square of their differences in time, before dropout (AWD-LSTM's beta).
    """

    kind: str
    hidden_sizes: tuple[int, ...]
    orthogonal: str = ""
    negatives: int | None = None
    inverse: str = "neumann"
    order: int = 2
    reset_every: int | None = None
    released: bool = False
    init: str = ""
    angles: str = "cayley"
    capacity: int = 4
    embedding: int | None = None
    tied: bool = False
    dropout: float = 0.0
    dropout_input: float = 0.0
    dropout_hidden: float = 0.0
    dropout_embedding: float = 0.0
    readout: str = "glorot"
    weight_decay_readout: float = 0.0
    weight_decay_recurrent: float = 0.0
    activation_penalty: float = 0.0
    slowness_penalty: float = 0.0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        object.__setattr__(self, "init", one_of("init", self.init or KINDS[self.kind][0], KINDS[self.kind]))
        self._check_sizes()
        self._check_orthogonal()
        one_of("readout", self.readout, READOUTS)
        for name in ("dropout", "dropout_input", "dropout_hidden", "dropout_embedding"):
            if probability(name, getattr(self, name)) == 1:
                raise ValueError(f"{name} must be below 1, got 1.0; it would leave nothing")
        for name in ("weight_decay_readout", "weight_decay_recurrent", "activation_penalty", "slowness_penalty"):
            _at_least_zero(name, getattr(self, name), "pass 0 for none")

    def _check_sizes(self) -> None:
        if not isinstance(self.hidden_sizes, tuple) or not self.hidden_sizes:
            raise ValueError(
                f"hidden_sizes must be a tuple with the units of each layer, got {self.hidden_sizes!r}; "
                "pass (56,) for one layer of 56"
            )
        for size in self.hidden_sizes:
            positive_int("hidden_sizes", size, "pass the number of hidden units of each layer")
            if self.kind == "goru":
                RotationLayout(size, self.capacity)
        if self.embedding is not None:
            positive_int("embedding", self.embedding, "pass the width of the embedding, or None without one")
        if flag("tied", self.tied) and self.embedding != self.hidden_sizes[-1]:
            raise ValueError(
                f"embedding must equal the last of hidden_sizes={self.hidden_sizes} where tied is True, "
                f"got {self.embedding}; make them equal or pass tied=False"
            )

    def _check_orthogonal(self) -> None:
        letters = self.orthogonal
        if not isinstance(letters, str) or set(letters) - set("ruc") or len(set(letters)) < len(letters):
            raise ValueError(
                f"orthogonal must be letters out of 'ruc', each at most once, got {letters!r}; for example 'c' or 'rc'"
            )
        if letters and self.kind != "nc-gru":
            raise ValueError(f"orthogonal must be '' for kind={self.kind!r}, got {letters!r}; it is NC-GRU's")
        if self.negatives is not None:
            smallest = min(self.hidden_sizes)
            if isinstance(self.negatives, bool) or not isinstance(self.negatives, int):
                raise TypeError(f"negatives must be an int, got {self.negatives!r}; pass the number of -1's in D")
            if not 0 <= self.negatives <= smallest:
                raise ValueError(
                    f"negatives must be between 0 and the smallest of hidden_sizes, {smallest}, got {self.negatives}; "
                    "pass the number of -1's in D"
                )
        one_of("inverse", self.inverse, METHODS)
        positive_int("order", self.order, "pass 1, 2 (the paper's), 3, ...")
        if self.reset_every is not None:
            positive_int("reset_every", self.reset_every, "pass None for no exact inverse by the count")
        one_of("angles", self.angles, ANGLES)
        if flag("released", self.released) and (letters not in ("c", "rc") or self.inverse != "neumann"):
            raise ValueError(
                f"released must be False unless orthogonal is 'c' or 'rc' and inverse 'neumann', got "
                f"orthogonal={letters!r} and inverse={self.inverse!r}; the released code has no others"
            )


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimiser; the skew-symmetric A's have an instance of their own.

    Attributes:
        name: one of `OPTIMIZERS`.
        lr: learning rate.
        weight_decay: PyTorch's, on everything but the A's.
        betas: Adam's.
        eps: Adam's and RMSprop's.
        alpha: RMSprop's smoothing.
        momentum: of SGD and RMSprop.
        skew_name: optimiser of the A's; None for the same.
        skew_lr: learning rate of the A's; None for the same.
    """

    name: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    alpha: float = 0.99
    momentum: float = 0.0
    skew_name: str | None = None
    skew_lr: float | None = None

    def __post_init__(self) -> None:
        one_of("optimizer.name", self.name, OPTIMIZERS)
        _positive("lr", self.lr, "pass a learning rate such as 1e-3")
        _at_least_zero("weight_decay", self.weight_decay, "pass 0 for none")
        if not isinstance(self.betas, tuple) or len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {self.betas!r}; pass (0.9, 0.999)")
        _positive("eps", self.eps, "pass a small number such as 1e-8")
        for name in ("alpha", "momentum"):
            _at_least_zero(name, getattr(self, name), "pass a number from 0 to below 1")
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1, got {getattr(self, name)}; pass for example 0.9")
        if self.skew_name is not None:
            one_of("skew_name", self.skew_name, OPTIMIZERS)
        if self.skew_lr is not None:
            _positive("skew_lr", self.skew_lr, "pass a learning rate such as 1e-4, or None for that of the rest")


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
            _positive("clip", self.clip, "pass the largest norm of the gradient, or None for no clipping")
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
            if isinstance(seed, bool) or not isinstance(seed, int):
                raise TypeError(f"seeds must be ints, got {seed!r}; pass for example (0, 1)")
            if not 0 <= seed < 2**63:
                raise ValueError(f"seeds must be from 0 to 2**63 - 1, got {seed}; pass for example (0, 1)")

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


def _number(name: str, value: object, advice: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}; {advice}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}; {advice}")
    return value


def _positive(name: str, value: object, advice: str) -> None:
    if _number(name, value, advice) <= 0:
        raise ValueError(f"{name} must be above 0, got {value}; {advice}")


def _at_least_zero(name: str, value: object, advice: str) -> None:
    if _number(name, value, advice) < 0:
        raise ValueError(f"{name} must be at least 0, got {value}; {advice}")
