"""What people see while runs go on: a bar in a terminal, plain lines elsewhere, curves in TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncgru.lab.journal import Listener, Result
from ncgru.lab.rundir import run_path

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from torch.utils.tensorboard import SummaryWriter

    from ncgru.lab.recipes import Recipe

LINE_SECONDS = 5.0
"""Plain lines come at most this often."""

WIDE = 100
"""Columns from which on a terminal gets a bar; in a narrower one the figures and the time left need the room."""


class Several(Listener):
    """Hands everything on to several listeners."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = listeners

    def on_start(self, recipe: Recipe, seed: int, step: int, total: int, best: float | None) -> None:
        for listener in self.listeners:
            listener.on_start(recipe, seed, step, total, best)

    def on_step(self, step: int) -> None:
        for listener in self.listeners:
            listener.on_step(step)

    def on_record(self, record: dict[str, Any]) -> None:
        for listener in self.listeners:
            listener.on_record(record)

    def on_end(self, result: Result) -> None:
        for listener in self.listeners:
            listener.on_end(result)

    def beside(self) -> Several:
        return Several([listener.beside() for listener in self.listeners])


class Figures(Listener):
    """What there is to show of the run at hand: its last training loss, and the best of its headline's series."""

    def __init__(self) -> None:
        self._headline = "train"
        self.loss: float | None = None
        self.best: float | None = None

    def on_start(self, recipe: Recipe, seed: int, step: int, total: int, best: float | None) -> None:
        self._headline, self.loss, self.best = recipe.headline, None, best

    def on_record(self, record: dict[str, Any]) -> None:
        if "loss" not in record:
            return
        if record["kind"] == "train":
            self.loss = record["loss"]
        if record.get("split", record["kind"]) == self._headline:
            self.best = record["loss"] if self.best is None else min(self.best, record["loss"])

    def words(self) -> str:
        """Both; the best says of what it is where it is not of the training loss."""
        of = "" if self._headline == "train" else f" {self._headline}"
        return f"loss {_short(self.loss)}  best{of} {_short(self.best)}"


class Bar(Figures):
    """A bar for every run, with the last loss, the best, steps a second and the time left."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self._task: TaskID | None = None

    def on_start(self, recipe: Recipe, seed: int, step: int, total: int, best: float | None) -> None:
        super().on_start(recipe, seed, step, total, best)
        self.best = best
        self._task = self.progress.add_task(
            recipe.name, total=total, completed=step, seed=f"#{seed}", figures=self.words(), rate="–"
        )

    def beside(self) -> Bar:
        return Bar(self.progress)

    def on_step(self, step: int) -> None:
        if self._task is None:
            return
        self.progress.update(self._task, completed=step)
        speed = self.progress.tasks[self.progress.task_ids.index(self._task)].speed
        if speed:
            self.progress.update(self._task, rate=_rate(speed))

    def on_record(self, record: dict[str, Any]) -> None:
        super().on_record(record)
        if self._task is not None:
            self.progress.update(self._task, figures=self.words())

    def on_end(self, result: Result) -> None:
        if self._task is None:  # it ran elsewhere, and was over before anyone had looked
            self.progress.console.print(_end(result), markup=False, highlight=False)
            return
        self.progress.update(self._task, completed=result.step)
        if result.status != "finished":
            self.progress.update(self._task, seed=f"#{result.seed} {result.status}")
        self.progress.stop_task(self._task)
        self._task = None


class Lines(Figures):
    """The same in a line now and then, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self._label = ""
        self._total = 0
        self._began = (0, 0.0)
        self._shown = 0.0

    def on_start(self, recipe: Recipe, seed: int, step: int, total: int, best: float | None) -> None:
        super().on_start(recipe, seed, step, total, best)
        self._label, self._total = f"{recipe.name} seed {seed}", total
        self._shown = time.monotonic()
        self._began = step, self._shown
        self._print(f"{self._label}: {'goes on from' if step else 'starts at'} step {step} of {total}")

    def on_step(self, step: int) -> None:
        now = time.monotonic()
        first, began = self._began
        # A run on Ray that has lost its worker may come back to where it was taken up.
        if self.loss is None or step <= first or now - self._shown < LINE_SECONDS:
            return
        self._shown = now
        rate = (step - first) / (now - began)
        left = timedelta(seconds=round((self._total - step) / rate))
        self._print(f"{self._label}: step {step}/{self._total}  {self.words()}  {_rate(rate)}/s  {left} left")

    def beside(self) -> Lines:
        return Lines(self.console)

    def on_end(self, result: Result) -> None:
        self._print(_end(result))

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class TensorBoard(Listener):
    """Event files in each run's directory, for `tensorboard --logdir runs`.

    Args:
        root: where the run directories are made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._writer: SummaryWriter | None = None

    def on_start(self, recipe: Recipe, seed: int, step: int, total: int, best: float | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps after the checkpoint that a run goes on from are made again: hide what an earlier sitting wrote of them.
        directory = run_path(self.root, recipe.name, seed) / "tensorboard"
        self._writer = SummaryWriter(str(directory), purge_step=step + 1 if step else None)

    def on_step(self, step: int) -> None:
        """Nothing: records say all."""

    def on_record(self, record: dict[str, Any]) -> None:
        if self._writer is not None:
            for name, value in _scalars(record):
                self._writer.add_scalar(name, value, record["step"])

    def on_end(self, result: Result) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


@contextmanager
def watching(console: Console) -> Iterator[Listener]:
    """A listener that shows runs on this console."""
    if not console.is_terminal:
        yield Lines(console)
        return
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column

    whole = Column(no_wrap=True)
    bar: list[ProgressColumn] = [BarColumn(20, table_column=whole)] if console.width >= WIDE else []
    columns = [
        TextColumn("{task.description}", table_column=Column(overflow="ellipsis")),  # gives way alone
        TextColumn("{task.fields[seed]}"),
        *bar,
        TextColumn("{task.percentage:3.0f}%"),
        TextColumn("[green]{task.fields[figures]}"),
        TextColumn("[dim]{task.fields[rate]}/s"),
        TimeRemainingColumn(elapsed_when_finished=True, table_column=whole),
    ]
    with Progress(*columns, console=console) as progress:
        yield Bar(progress)


def _end(result: Result) -> str:
    best = "" if result.headline_min is None else f"  best {result.headline_min:.4g}"
    return f"{result.name} seed {result.seed}: {result.status} at step {result.step}{best}  {result.seconds:.0f} s"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a record with the names that TensorBoard groups them by."""
    kind = record["kind"]
    if kind == "train":
        yield "loss/train", record["loss"]
    elif kind == "eval":
        yield f"loss/{record['split']}", record["loss"]
        for name, value in record["metrics"].items():
            yield f"{name}/{record['split']}", value
    elif kind == "matrix":
        yield "gradient_norm", record["grad_norm"]
        for quantity in ("orthogonality", "series_norm", "residual", "refreshes"):
            for name, value in record[quantity].items():
                yield f"{quantity}/{name}", value
