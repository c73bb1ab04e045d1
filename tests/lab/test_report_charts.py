"""What is plotted: medians and bands over seeds, whatever became of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ncgru.lab.report import Curve, Run, figures, load_runs
from ncgru.lab.report.charts import POINTS, Chart, charts
from ncgru.lab.report.groups import sections
from tests.lab.written_runs import end, finished, gradients, records, small, write_run

RECIPE = small("parenthesis-100/nc-gru-c")


def found(runs: list[Run]) -> dict[str, Chart]:
    (section,) = sections(runs)
    return {chart.key: chart for chart in charts(section)}


def run(seed: int, values: list[float], status: str = "finished") -> Run:
    steps = range(10, 10 * len(values) + 1, 10)
    return Run({"name": "own/x"}, seed, status, 10, curves={"train": Curve.of(zip(steps, values, strict=True))})


def test_band_is_the_quartiles_over_seeds(tmp_path: Path) -> None:
    finished(tmp_path, RECIPE, 1e-3, range(5))
    runs = load_runs(tmp_path)
    view = found(runs)["loss"].views[0]
    values = np.array([run.curves["train"].values for run in runs])
    low, median, high = view.series[0].band()
    np.testing.assert_allclose(low, np.quantile(values, 0.25, axis=0))
    np.testing.assert_allclose(median, np.quantile(values, 0.5, axis=0))
    np.testing.assert_allclose(high, np.quantile(values, 0.75, axis=0))
    assert set(view.series[0].counts()) == {5}
    assert {line.label: line.value for line in view.lines} == {
        "trivial loss": RECIPE.task.trivial_loss,
        "irreducible loss": 0.0,
    }


def test_headline_split_comes_first(tmp_path: Path) -> None:
    finished(tmp_path, small("adding-200/gru"), 1e-3, [0])
    assert [view.name for view in found(load_runs(tmp_path))["loss"].views] == ["test", "train"]


def test_failed_seed_is_worse_than_any_number_from_its_failure_on() -> None:
    runs = [run(0, [3, 2, 1, 1]), run(1, [3, 2, float("nan")], "failed"), run(2, [5, 4, 3, 3])]
    (series,) = found(runs)["loss"].views[0].series
    low, median, high = series.band()
    assert median.tolist() == [3, 2, 3, 3]
    assert high.tolist() == [4, 3, np.inf, np.inf]
    assert low.tolist() == [3, 2, 2, 2]


def test_seed_that_failed_between_two_values() -> None:
    (series,) = found([run(0, [3, 2, 1, 1]), run(1, [3, 2], "failed")])["loss"].views[0].series
    assert series.seeds[1][2].tolist() == [3, 2, np.inf, np.inf]


def test_seed_that_goes_on_takes_part_as_far_as_it_has_come() -> None:
    (series,) = found([run(0, [3, 2, 1, 1]), run(1, [1, 1], "interrupted")])["loss"].views[0].series
    assert series.counts().tolist() == [2, 2, 1, 1]
    assert series.band()[1].tolist() == [2, 1.5, 1, 1]


def test_curves_on_different_steps_meet_between_them() -> None:
    other = replace(run(1, []), curves={"train": Curve.of([(10, 1.0), (30, 3.0)])})
    (series,) = found([run(0, [2, 2, 2]), other])["loss"].views[0].series
    assert series.x.tolist() == [10, 20, 30]
    assert series.seeds[1][2].tolist() == [1, 2, 3]


def test_long_curves_are_thinned_to_the_end() -> None:
    (series,) = found([run(0, [1.0] * 5000)])["loss"].views[0].series
    assert len(series.x) == POINTS
    assert series.x[-1] == 50_000


def test_matrices_show_the_worst_of_several(tmp_path: Path) -> None:
    recipe = small("parenthesis-100/nc-gru-rc")
    finished(tmp_path, recipe, 1e-3, [0])
    (series,) = found(load_runs(tmp_path))["orthogonality"].views[0].series
    expected = [max(r["orthogonality"].values()) for r in records(recipe, 0, 1e-3) if r["kind"] == "matrix"]
    assert series.seeds[0][2].tolist() == expected


def test_gradients_of_the_trained_and_the_untrained_model(tmp_path: Path) -> None:
    log = [*records(RECIPE, 0, 1e-3), gradients(0), gradients(1000), gradients(2000)]
    write_run(tmp_path, RECIPE, 0, [*log, end(2000)])
    shown = found(load_runs(tmp_path))
    trained, untrained = shown["jacobian"].views
    assert [view.name for view in (trained, untrained)] == ["trained", "untrained"]
    assert [series.dashed for series in trained.series] == [False, True]
    assert trained.series[0].seeds[0][2].tolist() == gradients(2000)["jacobian_norm"]
    assert trained.series[1].seeds[0][2].tolist() == gradients(2000)["bound"]
    assert untrained.series[0].seeds[0][2].tolist() == gradients(0)["jacobian_norm"]
    assert shown["flow"].views[0].series[0].seeds[0][2].tolist() == gradients(2000)["state_gradient"]


def test_run_without_any_value_has_no_chart(tmp_path: Path) -> None:
    write_run(tmp_path, RECIPE, 0, [])
    assert found(load_runs(tmp_path)) == {}


@pytest.mark.parametrize(("low", "high"), [(0.082, 0.14), (0.021, 0.099), (0.3, 0.31), (0.004, 0.09), (1e-6, 0.1)])
def test_every_figure_has_several_numbers_on_its_axis(low: float, high: float) -> None:
    """Also where a logarithmic axis spans less than a decade."""
    chart = found([run(0, [high, (low + high) / 2, low])])["loss"]
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    figures._plot(axes, chart, "own")
    figure.canvas.draw()
    bottom, top = axes.get_ylim()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    labels = [tick.label1.get_text() for tick in ticks if bottom <= tick.get_loc() <= top]
    assert len([label for label in labels if label]) >= 3
