"""What is plotted, apart from how: the page and the figures are drawn from the same charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncgru.lab.report.groups import Model, Section
from ncgru.lab.report.run import FAILED, Curve, Run
from ncgru.lab.report.values import quantile

Floats = NDArray[np.float64]
POINTS = 400
"""Most points of a curve in a chart."""

SINGLE_RESOLUTION = 2.0**-23


@dataclass(frozen=True)
class Line:
    """A labelled horizontal line."""

    label: str
    value: float


@dataclass(frozen=True)
class Series:
    """A model's curves over its seeds.

    Attributes:
        label: the model's.
        colour: the number of its colour.
        x: common points.
        seeds: (seed, status, values at x); NaN where the seed has no value there, infinite from where it failed.
        dashed: whether the median is drawn dashed.
    """

    label: str
    colour: int
    x: Floats
    seeds: tuple[tuple[int, str, Floats], ...]
    dashed: bool = False

    def band(self) -> tuple[Floats, Floats, Floats]:
        """Lower quartile, median and upper quartile over the seeds that have got so far; NaN where none has."""
        columns = [[value for value in column if not np.isnan(value)] for column in zip(*self._values, strict=True)]
        low, middle, high = (np.array([quantile(c, share) for c in columns]) for share in (0.25, 0.5, 0.75))
        return low, middle, high

    def counts(self) -> NDArray[np.intp]:
        """How many seeds the band is over."""
        return np.array([np.count_nonzero(~np.isnan(column)) for column in zip(*self._values, strict=True)], np.intp)

    @property
    def _values(self) -> list[Floats]:
        return [values for _, _, values in self.seeds]


@dataclass(frozen=True)
class View:
    """One of the things that a chart can show.

    Attributes:
        name: on the button that shows it.
        series: a curve with a band for each model.
        lines: values to compare with.
    """

    name: str
    series: tuple[Series, ...]
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A plot.

    Attributes:
        key: short name for files.
        title: what is plotted.
        x_label: of the horizontal axis.
        y_label: of the vertical axis.
        views: at least one, the first is shown first.
        logarithmic: whether the vertical axis starts logarithmic.
        note: a sentence below.
    """

    key: str
    title: str
    x_label: str
    y_label: str
    views: tuple[View, ...]
    logarithmic: bool = True
    note: str = field(default="")


def charts(section: Section) -> list[Chart]:
    """The charts of a task for which there are data, the loss first."""
    return [chart for make in (_loss, _orthogonality, _series_norm, _bound, _flow) if (chart := make(section))]


def _loss(section: Section) -> Chart | None:
    splits = dict.fromkeys(run.headline for run in section.runs) | dict.fromkeys(
        split for run in section.runs for split in run.curves
    )
    lines = [("trivial", section.reference(lambda run: run.trivial_loss))]
    lines += [("irreducible", section.reference(lambda run: run.irreducible_loss))]
    known = tuple(Line(f"{name} loss", value) for name, value in lines if value is not None)
    views = [View(split, _over_models(section, _split(split)), known) for split in splits]
    shown = tuple(view for view in views if view.series)
    return Chart("loss", "Loss", "iteration", "loss", shown) if shown else None


def _orthogonality(section: Section) -> Chart | None:
    resolution = Line("resolution of float32", SINGLE_RESOLUTION)
    return _matrix_chart(section, "orthogonality", "Orthogonality error", "‖UᵀU − I‖₂", resolution)


def _series_norm(section: Section) -> Chart | None:
    return _matrix_chart(section, "series_norm", "Norm in the series", "‖Ã δA‖₂", Line("the series needs less", 1.0))


def _matrix_chart(section: Section, quantity: str, title: str, y_label: str, line: Line) -> Chart | None:
    series = _over_models(section, lambda run: _worst(list(run.matrices.get(quantity, {}).values())))
    if not series:
        return None
    note = "Of a model's several matrices the worst at each step."
    return Chart(quantity.replace("_", "-"), title, "iteration", y_label, (View("all", series, (line,)),), note=note)


def _bound(section: Section) -> Chart | None:
    views = []
    for name, pick in (("trained", -1), ("untrained", 0)):
        series = [*_profiles(section, "jacobian_norm", pick), *_profiles(section, "bound", pick)]
        if series:
            views.append(View(name, tuple(series), (Line("neither growth nor decay", 1.0),)))
    if not views:
        return None
    note = "Dashed: the bound of Theorem 1. Solid: the largest singular value of the measured Jacobian."
    return Chart("jacobian", "One step's Jacobian", "position in the sequence", "‖∂hₜ/∂hₜ₋₁‖₂", tuple(views), note=note)


def _flow(section: Section) -> Chart | None:
    views = []
    for name, pick in (("trained", -1), ("untrained", 0)):
        series = _profiles(section, "state_gradient", pick)
        if series:
            views.append(View(name, tuple(series)))
    if not views:
        return None
    note = "How much of an early state reaches the end of the sequence."
    return Chart(
        "flow", "Gradient of the last state", "position in the sequence", "‖∂h_T/∂hₜ‖₂", tuple(views), note=note
    )


def _over_models(section: Section, read: Callable[[Run], Curve | None]) -> tuple[Series, ...]:
    found = []
    for model in section.models:
        curves = [(run, curve) for run in model.runs if (curve := read(run)) is not None and len(curve)]
        if curves:
            found.append(_series(model, curves))
    return tuple(found)


def _series(model: Model, curves: Sequence[tuple[Run, Curve]]) -> Series:
    x = np.unique(np.concatenate([curve.thinned(POINTS).steps for _, curve in curves]))
    if len(x) > POINTS:
        x = x[np.unique(np.linspace(0, len(x) - 1, POINTS).round().astype(np.intp))]
    return Series(
        model.label, model.colour, x, tuple((run.seed, run.status, _on(x, run, curve)) for run, curve in curves)
    )


def _on(x: Floats, run: Run, curve: Curve) -> Floats:
    """The curve at the points x by linear interpolation; outside of it NaN, behind the end of a failed run infinite."""
    values = np.interp(x, curve.steps, curve.values, left=np.nan, right=np.nan)
    if run.status == FAILED:
        broken = ~np.isfinite(curve.values)
        end = curve.steps[broken.argmax()] if broken.any() else curve.steps[-1]
        values = np.where((x >= end) if broken.any() else (x > end), np.inf, values)
    return values


def _split(split: str) -> Callable[[Run], Curve | None]:
    return lambda run: run.curves.get(split)


def _worst(curves: Sequence[Curve]) -> Curve | None:
    """The largest value at each step of curves that were measured together."""
    if not curves:
        return None
    length = min(map(len, curves))
    return Curve(curves[0].steps[:length], np.max([curve.values[:length] for curve in curves], axis=0))


def _profiles(section: Section, quantity: str, pick: int) -> list[Series]:
    """A quantity along the sequence, from each run's first (pick 0) or last (pick -1) measurement."""
    found = []
    for model in section.models:
        curves = []
        for run in model.runs:
            records = [record for record in run.gradients if record.get(quantity) and _is_picked(record, pick)]
            if records:
                curves.append((run, _profile(records[pick], quantity)))
        if curves:
            series = _series(model, [(run, curve) for run, curve in curves])
            # A failed run's profile ends where the sequence ends, not where the run failed.
            seeds = tuple((seed, status, np.where(np.isinf(v), np.nan, v)) for seed, status, v in series.seeds)
            found.append(Series(series.label, series.colour, series.x, seeds, dashed=quantity == "bound"))
    return found


def _is_picked(record: Mapping[str, Any], pick: int) -> bool:
    return (record.get("step") == 0) == (pick == 0)


def _profile(record: Mapping[str, Any], quantity: str) -> Curve:
    values = record[quantity]
    positions = record.get("positions") or range(1, len(values) + 1)
    return Curve.of(zip(positions, values, strict=False))
