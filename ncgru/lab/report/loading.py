"""Reading runs, from run directories and from compact result files."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ncgru.lab.errors import LabError
from ncgru.lab.report.references import flat, references, setting
from ncgru.lab.report.results import ResultFileError, read_results
from ncgru.lab.report.run import FINISHED, INTERRUPTED, QUANTITIES, STATUSES, Curve, Run, headline_value
from ncgru.lab.rundir import read_log, read_recipe, run_status

RECIPE, LOG = "recipe.json", "log.jsonl"


class Runs(list[Run]):
    """The runs that were found, with what could not be read or was set aside.

    Attributes:
        problems: sentences for the reader of the report.
    """

    def __init__(self, runs: Iterable[Run] = (), problems: Iterable[str] = ()) -> None:
        super().__init__(runs)
        self.problems = list(problems)


def load_runs(*paths: Path | str) -> Runs:
    """The runs in the given places, sorted by recipe and seed, each (recipe, seed) once.

    Args:
        paths: run directories, folders with run directories or result files anywhere below, or result files.

    Raises:
        ValueError: a path does not exist, or no run could be read.
    """
    runs, problems = Runs(), []
    for path in map(Path, paths):
        for directory in _run_directories(path):
            try:
                runs.append(read_run_directory(directory, _relative(directory, path)))
            except (LabError, ValueError, TypeError, KeyError) as error:
                problems.append(f"{_relative(directory, path)} could not be read: {error}")
        for file in _result_files(path):
            try:
                runs.extend(read_results(file, _relative(file, path)))
            except ResultFileError as error:
                runs.extend(error.runs)
                problems.append(str(error))
    if not runs:
        places = ", ".join(map(str, paths)) or "no path at all"
        raise ValueError(
            "\n".join(
                [f"paths must lead to runs, but there are none in {places}; pass the folder given to train", *problems]
            )
        )
    kept, aside = _each_once(runs)
    return Runs(sorted(kept, key=lambda run: (run.name, run.seed)), problems + aside)


def read_run_directory(directory: Path, place: str) -> Run:
    """The run in a run directory, whatever state it is in.

    Raises:
        LabError: the recipe or the log is damaged beyond a torn last line.
    """
    recipe, seed = read_recipe(directory)
    # Before the log, so that a run that ends meanwhile is not taken for one that was interrupted.
    status = run_status(directory)
    records = read_log(directory) if (directory / LOG).exists() else []
    last = records[-1] if records else {}
    if last.get("kind") == "end":
        status = str(last.get("status"))
    starts = _of_kind(records, "start")
    curves = _loss_curves(records)
    headline = curves.get(str(recipe.get("headline", "train")), Curve.of(()))
    seconds = [float(record["seconds"]) for record in records if record.get("seconds") is not None]
    return Run(
        recipe=recipe,
        seed=seed,
        status=status if status in STATUSES else INTERRUPTED,
        reason=last.get("reason"),
        step=max((int(record["step"]) for record in records if "step" in record), default=0),
        seconds=seconds[-1] if seconds else None,
        provenance=tuple(_provenance(start) for start in starts),
        curves=curves,
        matrices=_matrix_curves(records),
        gradients=tuple(_of_kind(records, "gradients")),
        headline_min=headline_value(recipe, curves),
        headline_final=float(headline.values[-1]) if len(headline) else None,
        problems=tuple(str(warning) for start in starts for warning in start.get("warnings", ())),
        place=place,
        **references(recipe)._asdict(),
    )


def _run_directories(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(
            f"paths must exist, but {path} does not; pass run directories, folders of them or result files"
        )
    return sorted(found.parent for found in path.rglob(RECIPE)) if path.is_dir() else []


def _result_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(found for found in path.rglob("*.jsonl") if not (found.parent / RECIPE).exists())


def _relative(found: Path, given: Path) -> str:
    """The place as the reader knows it, without the folders above the path that was passed."""
    return os.path.join(given.name, found.relative_to(given)) if found != given else given.name


def _of_kind(records: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record.get("kind") == kind]


def _provenance(start: Mapping[str, Any]) -> dict[str, Any]:
    """Hardware and versions at a start, with the device where that was written down."""
    device = {"device": start["device"]} if "device" in start else {}
    return {**start.get("provenance", {}), **device}


def _loss_curves(records: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
    for record in records:
        if record.get("kind") in ("train", "eval"):
            split = "train" if record["kind"] == "train" else str(record["split"])
            # The means of training windows are the series "train"; an evaluation on that split is another thing.
            key = "train, evaluated" if record["kind"] == "eval" and split == "train" else split
            points[key].append((record["step"], record["loss"]))
    return {split: Curve.of(values) for split, values in points.items()}


def _matrix_curves(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Curve]]:
    points: dict[str, dict[str, list[tuple[float, float | None]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.get("kind") == "matrix":
            for quantity in QUANTITIES:
                for name, value in (record.get(quantity) or {}).items():
                    points[quantity][name].append((record["step"], value))
    return {quantity: {name: Curve.of(p) for name, p in names.items()} for quantity, names in points.items()}


def _each_once(runs: Iterable[Run]) -> tuple[list[Run], list[str]]:
    """Every (settings, seed) once: a finished run before one that is not, then the one with more steps, then the first.

    The choice looks at no loss, and what is set aside is named.
    """
    chosen: dict[tuple[str, str, int], Run] = {}
    aside = []
    for run in runs:
        key = (
            run.name,
            json.dumps({k: v for k, v in flat(run.recipe).items() if setting(k)}, sort_keys=True),
            run.seed,
        )
        other = chosen.setdefault(key, run)
        if other is run:
            continue
        better, worse = (run, other) if _progress(run) > _progress(other) else (other, run)
        chosen[key] = better
        if run.provenance and other.provenance and run.provenance[0] == other.provenance[0]:
            continue  # the same run, once from its directory and once from an export of it
        aside.append(
            f"{run.name}, seed {run.seed} was found twice: {better.place} is shown, {worse.place} is set aside"
        )
    return list(chosen.values()), aside


def _progress(run: Run) -> tuple[bool, bool, int]:
    return run.status == FINISHED, run.ended, run.step
