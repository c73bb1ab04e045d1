"""How long a recipe takes on this machine's CPU: a rough figure, from a measurement of well under a second."""

from __future__ import annotations

import functools
import time

import torch

from ncgru.lab.recipes import Recipe
from ncgru.nn import NCGRU

STEPS = 40
GATES = {"lstm": 4, "scornn": 1}
BACKWARD = 3
"""A backward takes about twice the products of a forward."""


def seconds(recipe: Recipe) -> float | None:
    """Expected seconds for one seed; None where the task's length is not known without reading data."""
    length = getattr(recipe.task, "length", None) or getattr(recipe.task, "bptt", None)
    if not isinstance(length, int):
        return None
    per_step, per_operation = _costs()
    width = GATES.get(recipe.model.kind, 3)
    products = sum(width * size * 2 * size for size in recipe.model.hidden_sizes)  # with inputs as wide as states
    operations = 2 * BACKWARD * recipe.batch_size * products
    return recipe.steps * length * (len(recipe.model.hidden_sizes) * per_step + operations * per_operation)


@functools.cache
def _costs() -> tuple[float, float]:
    """Seconds a time step whatever its size, and seconds a floating-point operation, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    small, large = _time(hidden=8, batch=4), _time(hidden=160, batch=64)
    torch.set_num_threads(threads)
    operations = 2 * BACKWARD * 64 * 3 * 160 * 2 * 160
    return small, max(large - small, 1e-9) / operations


def _time(hidden: int, batch: int) -> float:
    """Seconds that a training step takes, divided by its time steps: the better of a few."""
    module = NCGRU(hidden, hidden)
    inputs = torch.randn(STEPS, batch, hidden)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        module(inputs)[0].sum().backward()
        times.append(time.perf_counter() - start)
    return min(times) / STEPS
