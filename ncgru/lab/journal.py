"""What a run writes down while it goes: records for the log and the listener, and the headline number."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ncgru.lab.checkpoint import Checkpoint
from ncgru.lab.errors import LabError
from ncgru.lab.provenance import provenance
from ncgru.lab.recipes.recipe import Recipe
from ncgru.lab.rundir import RunDirectory, read_log

TELL_SECONDS = 0.2


class Result(NamedTuple):
    """How a run ended.

    Attributes:
        name: the recipe's.
        seed: the run's.
        status: "finished", "stopped" (it can go on) or "failed" (the loss was no longer finite).
        step: steps made.
        headline_min: the smallest value of the series that the paper's number is taken from; None if there was none.
        headline_final: its last value.
        reason: why it stopped or failed.
        seconds: time spent, over all sittings.
    """

    name: str
    seed: int
    status: str
    step: int
    headline_min: float | None
    headline_final: float | None
    reason: str | None
    seconds: float


class Listener:
    """Someone who watches a run, such as a progress bar; the methods of this one do nothing."""

    def on_start(self, recipe: Recipe, seed: int, step: int, total: int, best: float | None) -> None:
        """The run begins, or goes on from `step`, with the best headline of earlier sittings."""

    def on_step(self, step: int) -> None:
        """So many steps are made; told a few times a second at most."""

    def on_record(self, record: dict[str, Any]) -> None:
        """A record, as in the log."""

    def on_end(self, result: Result) -> None:
        """The run is over, for now."""

    def beside(self) -> Listener:
        """A listener for one of several runs that go on at the same time; itself if it keeps nothing of a run."""
        return self


class Journal:
    """Writes to the run directory and tells the listener; on ranks that do not lead it has neither.

    Args:
        recipe: of the run.
        seed: of the run.
        run: where log and checkpoints are.
        listener: who else gets the records.
    """

    def __init__(self, recipe: Recipe, seed: int, run: RunDirectory | None, listener: Listener | None) -> None:
        self.recipe = recipe
        self.seed = seed
        self._run = run
        self._listener = listener
        self._provenance = provenance()
        self._saved: int | None = None
        self._latest: dict[str, tuple[int, float]] = {}
        self._selected: float | None = None
        self._headline: float | None = None
        self._told = 0.0
        self._earlier_seconds = 0.0
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time since the start, without the pauses between sittings."""
        return self._earlier_seconds + time.monotonic() - self._began

    def earlier_result(self, resume: bool) -> Result | None:
        """The result of a run that has made all its steps; None if there are steps to make.

        Raises:
            LabError: a run has begun here, and is not to be resumed.
        """
        assert self._run is not None
        if self._run.status == "new":
            return None
        if not resume:
            raise LabError(f"{self._run.path} holds a run that has begun; resume it, or choose another directory")
        end = read_log(self._run.log_path)[-1]
        if end.get("status") != "finished" or end["step"] < self.recipe.steps:
            return None
        fields: dict[str, Any] = {name: end.get(name) for name in Result._fields if name not in ("name", "seed")}
        return Result(name=self.recipe.name, seed=self.seed, **fields)

    def load(self) -> Checkpoint | None:
        """The last checkpoint, the log cut back to it."""
        assert self._run is not None
        return self._run.restore()

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Write a checkpoint, with the recipe and what made it."""
        assert self._run is not None
        self._run.save(step, tensors, {**meta, "recipe": self.recipe.to_dict(), "provenance": self._provenance})
        self._saved = step

    def last_good_state(self) -> str:
        """Where a failed run could be taken up, in words."""
        return "nothing was saved before" if self._saved is None else f"the state of step {self._saved} is kept"

    def start(self, step: int, device: str, warnings: Sequence[str]) -> None:
        """Log that the run begins at `step`, on which device, and what was wrong with later checkpoints."""
        self._saved = step or None
        if self._listener is not None:
            self._listener.on_start(self.recipe, self.seed, step, self.recipe.steps, self._headline)
        extra = {"warnings": list(warnings)} if warnings else {}
        self.write("start", step, provenance=self._provenance, device=device, seed=self.seed, **extra)

    def stepped(self, step: int) -> None:
        """Tell the listener, now and then, how far the run is."""
        if self._listener is not None and time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            self._listener.on_step(step)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """Log one record."""
        if kind == "train" or (kind == "eval" and fields["split"] != "train"):
            self._follow(fields.get("split", "train"), step, fields["loss"])
        record = {"kind": kind, "step": step, **fields}
        if self._run is not None:
            self._run.append(record)
        if self._listener is not None:
            self._listener.on_record(record)

    def end(self, step: int, status: str, reason: str | None) -> Result:
        """Log the end, and return it."""
        final = self._latest.get(self.recipe.headline, (0, None))[1]
        result = Result(self.recipe.name, self.seed, status, step, self._headline, final, reason, self.seconds)
        self.write("end", **{name: value for name, value in result._asdict().items() if name not in ("name", "seed")})
        if self._listener is not None:
            self._listener.on_end(result)
        return result

    def state(self) -> dict[str, Any]:
        """What a later sitting needs to go on."""
        return {
            "latest": self._latest,
            "selected": self._selected,
            "headline": self._headline,
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._latest, self._selected, self._headline = state["latest"], state["selected"], state["headline"]
        self._earlier_seconds = state["seconds"]
        self._began = time.monotonic()

    def _follow(self, series: str, step: int, loss: float) -> None:
        """The headline: the least of its series, or its value where the least of the selecting series is."""
        self._latest[series] = (step, loss)
        select = self.recipe.select or self.recipe.headline
        if series not in (select, self.recipe.headline):
            return
        chosen, value = self._latest.get(select), self._latest.get(self.recipe.headline)
        if chosen is None or value is None or chosen[0] != value[0]:
            return
        if self._selected is None or chosen[1] < self._selected:
            self._selected, self._headline = chosen[1], value[1]
