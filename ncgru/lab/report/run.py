"""What the report knows of one run, wherever it was read from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FINISHED, FAILED, STOPPED, RUNNING, INTERRUPTED = "finished", "failed", "stopped", "running", "interrupted"
STATUSES = (FINISHED, FAILED, STOPPED, RUNNING, INTERRUPTED)
"""How a run stands. Stopped: it was told to, and saved its state; interrupted: its process is gone without a word."""

QUANTITIES = ("orthogonality", "series_norm", "residual", "refreshes", "updates")
"""What is measured of each orthogonal matrix while a run goes on."""


@dataclass(frozen=True)
class Curve:
    """A quantity over training. A value that is no finite number is NaN or infinite, never left out.

    Attributes:
        steps: optimiser steps made, rising.
        values: one for each of the steps.
    """

    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float | None]]) -> Curve:
        """The curve through points (step, value); None is what JSON makes of a value that is no finite number."""
        pairs = [(float(step), math.nan if value is None else float(value)) for step, value in points]
        array = np.array(pairs, dtype=np.float64).reshape(-1, 2)
        return cls(array[:, 0], array[:, 1])

    def __len__(self) -> int:
        return len(self.steps)

    def minimum(self) -> tuple[float, int] | None:
        """The smallest finite value and its step; None where there is none."""
        finite = np.where(np.isfinite(self.values), self.values, np.inf)
        if not len(finite) or not np.isfinite(finite.min()):
            return None
        index = int(finite.argmin())
        return float(finite[index]), int(self.steps[index])

    def at(self, step: int) -> float | None:
        """The finite value at a step; None where there is none."""
        found = self.values[(self.steps == step) & np.isfinite(self.values)]
        return float(found[-1]) if len(found) else None

    def thinned(self, points: int) -> Curve:
        """At most `points` of the points, evenly spread, the first and the last among them."""
        if len(self) <= points:
            return self
        kept = np.unique(np.linspace(0, len(self) - 1, points).round().astype(np.intp))
        return Curve(self.steps[kept], self.values[kept])


def headline_value(recipe: Mapping[str, Any], curves: Mapping[str, Curve]) -> float | None:
    """What the paper's rule makes of the curves: the headline at its minimum, or at the minimum of `select`."""
    headline = curves.get(str(recipe.get("headline", "train")), Curve.of(()))
    selecting = headline if recipe.get("select") is None else curves.get(str(recipe["select"]), Curve.of(()))
    least = selecting.minimum()
    return None if least is None else headline.at(least[1])


@dataclass(frozen=True)
class Run:
    """One seed of one recipe.

    Attributes:
        recipe: the recipe as its `to_dict()` wrote it, so that old files stay readable.
        seed: the seed.
        status: one of `STATUSES`.
        reason: why it ended, where it failed or was stopped.
        step: steps made.
        seconds: wall time, where recorded.
        provenance: hardware, versions and commit at each start; a resumed run has several.
        curves: the loss by split; "train" holds means over windows of steps.
        matrices: quantity -> name of the matrix -> curve.
        gradients: measured profiles along a sequence, with the steps at which they were measured.
        headline_min: the recipe's headline series, from the full curve, at its minimum over training, or, where the
            recipe has `select`, at the minimum of that split.
        headline_final: the last value of that series.
        trivial_loss: loss of the best network that ignores its inputs, where known.
        irreducible_loss: smallest expected loss that any network can reach, where known.
        differences: (field, value here, value there) against the recipe of that name; None if there is none.
        problems: what was wrong with the files, in words.
        place: where it was read from.
    """

    recipe: Mapping[str, Any]
    seed: int
    status: str
    step: int
    reason: str | None = None
    seconds: float | None = None
    provenance: tuple[Mapping[str, Any], ...] = ()
    curves: Mapping[str, Curve] = field(default_factory=dict)
    matrices: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict)
    gradients: tuple[Mapping[str, Any], ...] = ()
    headline_min: float | None = None
    headline_final: float | None = None
    trivial_loss: float | None = None
    irreducible_loss: float | None = None
    differences: tuple[tuple[str, Any, Any], ...] | None = ()
    problems: tuple[str, ...] = ()
    place: str = ""

    @property
    def name(self) -> str:
        """The recipe's name."""
        return str(self.recipe.get("name", "unnamed"))

    @property
    def headline(self) -> str:
        """The split whose minimum is the number that the paper reports."""
        return str(self.recipe.get("headline", "train"))

    @property
    def select(self) -> str | None:
        """The split whose minimum says where the headline is read; None for the headline's own minimum."""
        return self.recipe.get("select")

    @property
    def steps(self) -> int | None:
        """Steps that the recipe asks for."""
        steps = self.recipe.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def ended(self) -> bool:
        """Whether no more is to come: the run reached its last step or failed."""
        return self.status in (FINISHED, FAILED)
