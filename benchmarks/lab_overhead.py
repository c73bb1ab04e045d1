"""What the laboratory's trainer adds to the bare training step on the CPU, and what making the data costs.

A real run is timed from one logged window to the next: data, step, running loss, log, diagnostics and checkpoints, at
the recipe's own cadences (evaluations are left out: they are work that was asked for). In every pause between two
windows the same number of bare steps (forward, backward, update of an equal model on a fixed batch) and of batches is
timed, so that what else the machine does meets all three. Prints a table, then one line of JSON.

    python benchmarks/lab_overhead.py --recipe parenthesis-100/nc-gru-c --windows 20
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ncgru.lab import recipes
from ncgru.lab.journal import Listener
from ncgru.lab.recipes import Recipe
from ncgru.lab.trainer import Trainer, train

AIMS = {"trainer": 10.0, "data": 5.0}
"""Largest shares of the bare step, in percent."""


class Windows(Listener):
    """Times a run's windows, and in the pauses what they are held against."""

    def __init__(self, recipe: Recipe) -> None:
        self.steps = recipe.log_every
        self.seconds: dict[str, list[float]] = {"trainer": [], "bare": [], "data": []}
        self._bare = bare_step(recipe)
        source = recipe.task.source("train", batch_size=recipe.batch_size)
        self._data = lambda position: source.batch(position)
        self._since = 0.0

    def on_record(self, record: dict[str, Any]) -> None:
        now = time.perf_counter()
        if record["kind"] == "train":
            # The first window has warmed everything up.
            if record["step"] > self.steps:
                self.seconds["trainer"].append((now - self._since) / self.steps)
            for name, action in (("bare", self._bare), ("data", self._data)):
                self.seconds[name].append(seconds_each(action, self.steps))
            self._since = time.perf_counter()


def bare_step(recipe: Recipe) -> Callable[[int], Any]:
    """Forward, backward and update of the recipe's model on one batch, and nothing else."""
    trainer = Trainer(recipe, 0)
    model, optimizers, task = trainer.model, trainer.optimizers, recipe.task
    batch = trainer.source.batch(0)

    def step(_: int) -> None:
        output = model(batch.inputs)
        loss = task.loss(output.outputs, batch.targets)
        objective = loss if output.penalty is None else loss + output.penalty
        for parameter in trainer.parameters:
            parameter.grad = None
        objective.backward()
        optimizers.step()

    return step


def seconds_each(action: Callable[[int], Any], count: int) -> float:
    """Mean seconds of `action`."""
    began = time.perf_counter()
    for position in range(count):
        action(position)
    return (time.perf_counter() - began) / count


def measure(name: str, windows: int) -> dict[str, Any]:
    """Medians over the windows, in microseconds a step, and the shares of the bare step in percent."""
    recipe = recipes.get(name)
    recipe = replace(recipe, steps=(windows + 1) * recipe.log_every, eval_every=None, headline="train", select=None)
    watch = Windows(recipe)
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder, "run"), 0, listener=watch)
    medians = {kind: 1e6 * statistics.median(seconds) for kind, seconds in watch.seconds.items()}
    shares = {
        "trainer": 100 * (medians["trainer"] / medians["bare"] - 1),
        "data": 100 * medians["data"] / medians["bare"],
    }
    return {"recipe": name, "windows": windows, "microseconds": medians, "percent": shares}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="parenthesis-100/nc-gru-c")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.recipe, options.windows)
    print(f"{options.recipe}, medians of {options.windows} windows, {options.threads} threads")
    for kind, value in result["microseconds"].items():
        print(f"  {kind:8s} {value:9.0f} µs a step")
    for kind, share in result["percent"].items():
        print(f"  {kind:8s} {share:+9.1f} % of the bare step (aim: at most {AIMS[kind]:.0f} %)")
    versions = {"torch": str(torch.__version__), "python": platform.python_version(), "threads": options.threads}
    print(json.dumps({**result, **versions}))


if __name__ == "__main__":
    main()
