"""Runs on a local Ray cluster, for tests/lab/test_engines.py; as a program, Ray leaves with it."""

from __future__ import annotations

import argparse
import functools
import importlib
from pathlib import Path

from ncgru.lab.engines import run_many
from ncgru.lab.journal import Listener
from ncgru.lab.progress import TensorBoard
from ncgru.lab.recipes import Recipe
from tests.lab.small_runs import small_recipe

SEEDS = (0, 1, 2)


class Voice(Listener):
    """Prints how far a run has come."""

    def on_start(self, recipe: Recipe, seed: int, step: int, total: int, best: float | None) -> None:
        self.seed = seed

    def on_step(self, step: int) -> None:
        print("at", self.seed, step, flush=True)

    def beside(self) -> Voice:
        return Voice()


def main() -> None:
    """Train, and print a line for every result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--workers", type=int, help="size of the cluster; left to the engine if not given")
    options = parser.parse_args()
    if options.workers:
        importlib.import_module("ray").init(num_cpus=options.workers, log_to_driver=False, include_dashboard=False)
    recipe = small_recipe(steps=options.steps, log_every=50, eval_every=None, measure_every=None, checkpoint_every=50)
    recorder = functools.partial(TensorBoard, options.root)
    for result in run_many([recipe], SEEDS, root=options.root, engine="ray", listener=Voice(), recorder=recorder):
        print("result", result.seed, result.status, result.step, flush=True)


if __name__ == "__main__":
    main()
