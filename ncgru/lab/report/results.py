"""Compact result files: JSON lines, one a run, small enough to be kept beside the code.

A line holds the recipe, the seed, the provenance, how the run ended, its headline numbers from the full curve, and its
curves thinned to a few hundred points.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ncgru.lab.durable import replace_file
from ncgru.lab.report.references import differences
from ncgru.lab.report.run import STATUSES, Curve, Run

FORMAT = 1
POINTS = 300
DIGITS = 6
KEPT = ("recipe", "seed", "status", "reason", "step", "seconds", "headline_min", "headline_final")


class ResultFileError(ValueError):
    """Some lines of a result file could not be read.

    Attributes:
        runs: the runs of the other lines.
    """

    def __init__(self, message: str, runs: list[Run]) -> None:
        super().__init__(message)
        self.runs = runs


def export_results(runs: Iterable[Run], file: Path | str, *, points: int = POINTS) -> Path:
    """Write a result file with exactly these runs, sorted by recipe and seed.

    To add to a file, load it together with the new runs: `export_results(load_runs(file, "runs"), file)`.

    Args:
        runs: the runs, failed ones too.
        file: the file; it is replaced as a whole.
        points: most points of a curve.
    """
    lines = [_line(run, points) for run in sorted(runs, key=lambda run: (run.name, run.seed))]
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(f"{line}\n" for line in lines).encode())
    return path


def read_results(file: Path, place: str) -> list[Run]:
    """The runs of a result file.

    Raises:
        ResultFileError: with the runs of those lines that could be read.
    """
    runs: list[Run] = []
    damaged: list[str] = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            runs.append(_run(json.loads(line), f"{place}, line {number}"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            damaged.append(f"line {number} ({type(error).__name__}: {error})")
    if damaged:
        raise ResultFileError(f"{place} has lines that are no results: {'; '.join(damaged[:3])}", runs)
    return runs


def _line(run: Run, points: int) -> str:
    content = {
        "format": FORMAT,
        **{name: getattr(run, name) for name in (*KEPT, "trivial_loss", "irreducible_loss")},
        "provenance": run.provenance,
        "curves": {split: _points(curve, points) for split, curve in run.curves.items()},
        "matrices": {
            quantity: {name: _points(curve, points) for name, curve in curves.items()}
            for quantity, curves in run.matrices.items()
        },
        "gradients": [_short(record) for record in run.gradients],
    }
    return json.dumps(_strict(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _run(content: Mapping[str, Any], place: str) -> Run:
    if content.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT}, got {content.get('format')!r}")
    if content["status"] not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {content['status']!r}")
    scalars: dict[str, Any] = {name: content[name] for name in KEPT}
    return Run(
        **scalars,
        trivial_loss=content.get("trivial_loss"),
        irreducible_loss=content.get("irreducible_loss"),
        differences=differences(content["recipe"]),
        provenance=tuple(content.get("provenance", ())),
        curves={split: _curve(points) for split, points in content["curves"].items()},
        matrices={
            quantity: {name: _curve(points) for name, points in curves.items()}
            for quantity, curves in content.get("matrices", {}).items()
        },
        gradients=tuple(content.get("gradients", ())),
        place=place,
    )


def _points(curve: Curve, points: int) -> dict[str, list[Any]]:
    thin = curve.thinned(points)
    return {"step": [int(step) for step in thin.steps], "value": [_rounded(value) for value in thin.values]}


def _curve(points: Mapping[str, list[Any]]) -> Curve:
    return Curve.of(zip(points["step"], points["value"], strict=True))


def _rounded(value: Any) -> Any:
    """Numbers of a curve with `DIGITS` digits; whole numbers without a decimal point."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_short(inner) for inner in value]
    return _rounded(value)


def _strict(value: Any) -> Any:
    """The content as JSON knows it: what is no finite number becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _strict(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
