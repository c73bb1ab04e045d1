"""The charts as the JSON from which the page's script draws them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ncgru.lab.report import palette
from ncgru.lab.report.charts import Chart, Floats, Series, View

DIGITS = 4


def chart_data(charts: Sequence[Chart]) -> str:
    """The charts as JSON that cannot end the script element it stands in."""
    text = json.dumps([_chart(chart) for chart in charts], allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart(chart: Chart) -> dict[str, Any]:
    views = [_view(view) for view in chart.views]
    return {
        "title": chart.title,
        "x": chart.x_label,
        "y": chart.y_label,
        "log": chart.logarithmic,
        "note": chart.note,
        "views": views,
    }


def _view(view: View) -> dict[str, Any]:
    lines = [{"label": line.label, "value": line.value} for line in view.lines]
    return {"name": view.name, "lines": lines, "series": [_series(series) for series in view.series]}


def _series(series: Series) -> dict[str, Any]:
    low, median, high = series.band()
    return {
        "label": series.label,
        "colour": series.colour % len(palette.LIGHT),
        "dash": "3 2" if series.dashed else palette.dash(series.colour),
        "bound": series.dashed,
        "x": [int(x) for x in series.x],
        "n": [int(amount) for amount in series.counts()],
        "low": _values(low),
        "median": _values(median),
        "high": _values(high),
        "seeds": [{"seed": seed, "status": status, "y": _values(values)} for seed, status, values in series.seeds],
    }


def _values(values: Floats) -> list[float | str | None]:
    """Numbers with few digits; "inf" after a failure, null where there is nothing. JSON has no word for either."""
    return [
        None if math.isnan(value) else "inf" if math.isinf(value) else float(f"{value:.{DIGITS}g}")
        for value in values.tolist()
    ]
