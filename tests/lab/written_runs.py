"""Run directories as the trainer leaves them, written by hand: curves that look like training, in any state."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ncgru.lab import recipes
from ncgru.lab.recipes import Recipe

PROVENANCE = {
    "ncgru": "0.1.0",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "torch": "2.13.0",
    "python": "3.12.4",
    "platform": "Linux 6.1 x86_64",
    "cpu": "A Processor",
    "cores": 8,
    "threads": 8,
    "cuda": None,
    "gpus": [],
    "date": "2026-11-18T12:00:00+00:00",
}


def small(name: str, *, steps: int = 2000, log_every: int = 100, **changes: Any) -> Recipe:
    """A recipe with fewer steps, so that few lines make a run; it bears the name of the one that it changes."""
    recipe = recipes.get(name)
    fields = {"steps": steps, "log_every": log_every, "measure_every": log_every, "seeds": (0, 1, 2), **changes}
    return replace(recipe, **{"eval_every": recipe.eval_every and log_every, **fields})


def losses(recipe: Recipe, seed: int, best: float) -> list[tuple[int, float]]:
    """A falling curve from a little above the trivial loss to about `best`, with noise of its seed."""
    generator = np.random.default_rng([seed, len(recipe.name)])
    steps = range(recipe.log_every, recipe.steps + 1, recipe.log_every)
    spread = math.exp(0.3 * generator.standard_normal())
    start = recipe.task.trivial_loss
    points = []
    for step in steps:
        share = 1 / (1 + math.exp(10 * (step / recipe.steps - 0.35)))
        value = math.exp(share * math.log(start) + (1 - share) * math.log(best * spread))
        points.append((step, value * math.exp(0.12 * generator.standard_normal())))
    return points


def records(recipe: Recipe, seed: int, best: float, *, until: int | None = None) -> list[dict[str, Any]]:
    """The log of a run up to step `until`, without an end."""
    last = recipe.steps if until is None else until
    log: list[dict[str, Any]] = [{"kind": "start", "step": 0, "provenance": PROVENANCE, "seed": seed}]
    for step, loss in losses(recipe, seed, best):
        if step > last:
            break
        if recipe.model.orthogonal or recipe.model.kind == "scornn":
            log.append(matrix_record(recipe, seed, step))
        log.append({"kind": "train", "step": step, "loss": loss, "seconds": step / 100})
        if recipe.eval_every:
            metrics = {"accuracy": 0.5, **recipe.task.derived_metrics(loss * 1.05)}
            log += [
                {"kind": "eval", "step": step, "split": split, "loss": loss * 1.05, "metrics": metrics}
                for split in recipe.eval_splits
            ]
    return log


def matrix_record(recipe: Recipe, seed: int, step: int) -> dict[str, Any]:
    """What is measured of the orthogonal matrices at a step."""
    generator = np.random.default_rng([seed, step])
    names = [f"rnn.weight_hh_l0.{letter}" for letter in recipe.model.orthogonal or "c"]
    drift = 1e-2 * step / recipe.steps if recipe.model.released else 0.0
    return {
        "kind": "matrix",
        "step": step,
        "orthogonality": {name: float(1e-6 * (1 + generator.random()) + drift) for name in names},
        "series_norm": {name: float(0.05 * (1 + generator.random())) for name in names},
        "residual": {name: 1e-6 for name in names},
        "refreshes": {name: step // 1000 for name in names},
        "updates": {name: step for name in names},
        "grad_norm": 0.1,
    }


def gradients(step: int, length: int = 60) -> dict[str, Any]:
    """Profiles along a sequence as they might be measured at a step."""
    position = np.arange(1, length + 1)
    norm = 1 + 0.2 * np.sin(position / 5) + (0.5 if step else 0)
    return {
        "kind": "gradients",
        "step": step,
        "jacobian_norm": norm.tolist(),
        "bound": (norm * 4).tolist(),
        "state_gradient": np.exp(-(length - position) / (40 if step else 12)).tolist(),
    }


def end(step: int, status: str = "finished", reason: str | None = None) -> dict[str, Any]:
    """How a run ended."""
    return {"kind": "end", "step": step, "status": status, "reason": reason, "seconds": step / 100}


def write_run(root: Path, recipe: Recipe, seed: int, log: Iterable[dict[str, Any]], *, torn: str = "") -> Path:
    """A run directory under `root`; `torn` is what stands behind the last whole line of its log."""
    directory = Path(root, *recipe.name.split("/"), f"seed-{seed}")
    directory.mkdir(parents=True)
    document = {"format": 1, "seed": seed, **recipe.to_dict()}
    (directory / "recipe.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    text = "".join(json.dumps(record) + "\n" for record in log)
    (directory / "log.jsonl").write_text(text + torn, encoding="utf-8")
    return directory


def finished(root: Path, recipe: Recipe, best: float, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """Finished runs of several seeds."""
    for seed in seeds:
        write_run(root, recipe, seed, [*records(recipe, seed, best), end(recipe.steps)])


def campaign(root: Path, seeds: int = 8) -> None:
    """A folder as it may lie there in the middle of things: two tasks, all sorts of runs."""
    values = {"lstm": 2e-3, "gru": 1e-3, "scornn": 2e-2, "goru": 1.4e-3, "nc-gru-c": 2.6e-4, "nc-gru-rc": 1.7e-4}
    for model, best in values.items():
        recipe = small(f"parenthesis-100/{model}", steps=20_000, seeds=tuple(range(seeds)))
        broken = {"nc-gru-rc": 1, "lstm": 2}.get(model, 0)
        finished(root, recipe, best, range(broken, seeds))
        for seed in range(broken):
            log = records(recipe, seed, best, until=9000)
            log += [{"kind": "train", "step": 9100, "loss": "NaN", "seconds": 91.0}]
            write_run(root, recipe, seed, [*log, end(9100, "failed", "the loss was nan at step 9100")])
    released = small("parenthesis-100/nc-gru-c@released", steps=20_000, seeds=tuple(range(seeds)))
    finished(root, released, 5e-4, range(seeds // 2))
    for model, best in {"gru": 2e-5, "nc-gru-c": 1e-5, "scornn": 0.15}.items():
        recipe = small(f"adding-200/{model}", steps=20_000, seeds=tuple(range(seeds)))
        for seed in range(seeds):
            log = records(recipe, seed, best, until=recipe.steps if seed % 3 else 12_000)
            profiles = [gradients(0), gradients(recipe.steps)]
            write_run(root, recipe, seed, [*log, *profiles, *([end(recipe.steps)] if seed % 3 else [])], torn="{")
