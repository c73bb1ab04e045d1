"""The parts of a recipe besides its task: model, optimiser, and the paper's number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ncgru._checks import flag, one_of, positive_int, probability
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
        at_least_zero("value", self.value, "pass the paper's number in plain units")
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
            at_least_zero(name, getattr(self, name), "pass 0 for none")

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
        positive("lr", self.lr, "pass a learning rate such as 1e-3")
        at_least_zero("weight_decay", self.weight_decay, "pass 0 for none")
        if not isinstance(self.betas, tuple) or len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {self.betas!r}; pass (0.9, 0.999)")
        positive("eps", self.eps, "pass a small number such as 1e-8")
        for name in ("alpha", "momentum"):
            at_least_zero(name, getattr(self, name), "pass a number from 0 to below 1")
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1, got {getattr(self, name)}; pass for example 0.9")
        if self.skew_name is not None:
            one_of("skew_name", self.skew_name, OPTIMIZERS)
        if self.skew_lr is not None:
            positive("skew_lr", self.skew_lr, "pass a learning rate such as 1e-4, or None for that of the rest")


def _number(name: str, value: object, advice: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}; {advice}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}; {advice}")
    return value


def positive(name: str, value: object, advice: str) -> None:
    """Raise unless `value` is a finite number above 0."""
    if _number(name, value, advice) <= 0:
        raise ValueError(f"{name} must be above 0, got {value}; {advice}")


def at_least_zero(name: str, value: object, advice: str) -> None:
    """Raise unless `value` is a finite number from 0 on."""
    if _number(name, value, advice) < 0:
        raise ValueError(f"{name} must be at least 0, got {value}; {advice}")
