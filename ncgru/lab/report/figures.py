"""Figures for papers: PNG and PDF, median over seeds with the band between the quartiles."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ncgru.lab.durable import replace_file
from ncgru.lab.report import palette
from ncgru.lab.report.charts import Chart, Floats, Series, View, charts
from ncgru.lab.report.groups import Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (5.2, 3.5)
DPI = 150
NARROW = 4
"""A logarithmic axis up to less than so many times its lower end has its ticks where a linear one would."""
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "mathtext.fontset": "dejavusans",
    "pdf.fonttype": 42,
}
# Nothing of the machine or the hour, so that the same runs give the same bytes.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}


def write_figures(sections: Sequence[Section], folder: Path) -> dict[tuple[str, str], list[Path]]:
    """Every chart as PNG and PDF.

    Args:
        sections: of the report.
        folder: where they go; it must be there.

    Returns:
        The files by the section's title and the chart's key.
    """
    written: dict[tuple[str, str], list[Path]] = {}
    taken: set[str] = set()
    for section in sections:
        for chart in charts(section):
            stem = _free(f"{slug(section.title)}-{chart.key}", taken)
            contents = draw(chart, section.title)
            files = [folder / f"{stem}.{kind}" for kind in contents]
            for file, content in zip(files, contents.values(), strict=True):
                replace_file(file, content)
            written[section.title, chart.key] = files
    return written


def draw(chart: Chart, title: str) -> dict[str, bytes]:
    """The chart's first view as the bytes of a file of each kind."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        # A name may be written in signs that the font lacks; it is drawn with boxes then.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        _plot(figure.add_subplot(), chart, title)
        return {kind: _bytes(figure, kind) for kind in METADATA}


def slug(text: str) -> str:
    """The text as a name for files and anchors."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:80] or "unnamed"


def _plot(axes: Axes, chart: Chart, title: str) -> None:
    view = chart.views[0]
    for series in view.series:
        _plot_series(axes, series)
    if chart.logarithmic and _has_positive(view):
        axes.set_yscale("log")
    bottom, top = axes.get_ylim()
    for line in view.lines:
        if bottom / 50 < line.value < top * 50 or (axes.get_yscale() == "linear" and line.value == 0):
            axes.axhline(line.value, color="0.45", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
            axes.annotate(
                _plain(line.label), (1, line.value), xycoords=("axes fraction", "data"), xytext=(0, 2),
                textcoords="offset points", ha="right", va="bottom", fontsize=7, color="0.35",
            )  # fmt: skip
    _format_ticks(axes)
    subject = chart.title[0].lower() + chart.title[1:]
    axes.set_title(_plain(f"{title}: {subject}" + (f" ({view.name})" if len(chart.views) > 1 else "")), fontsize=9)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.margins(x=0.01)
    axes.legend(loc="best", ncols=1 if len(view.series) < 7 else 2)


def _format_ticks(axes: Axes) -> None:
    """Thousands apart, and plain numbers on a logarithmic axis that spans no powers of ten to speak of."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    bottom, top = axes.get_ylim()
    if axes.get_yscale() == "log" and bottom > 1e-3 and top < 100 * bottom:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if top < NARROW * bottom:
            axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
            axes.yaxis.set_minor_locator(NullLocator())
            return
        few = FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
        axes.yaxis.set_minor_formatter(few)


def _plot_series(axes: Axes, series: Series) -> None:
    low, middle, high = (np.where(np.isinf(part), np.nan, part) for part in series.band())
    colour = palette.colour(series.colour)
    count = len(series.seeds)
    dashes = [float(part) for part in ("3 2" if series.dashed else palette.dash(series.colour)).split()]
    label = _plain(f"{series.label}, bound" if series.dashed else series.label)
    style: Any = (0, dashes) if dashes else "-"
    axes.plot(series.x, middle, color=colour, linestyle=style, label=label, marker="o" if len(series.x) == 1 else "")
    if count > 1:
        axes.fill_between(series.x, low, _filled(high, middle), color=colour, alpha=0.18, linewidth=0)


def _filled(high: Floats, middle: Floats) -> Floats:
    """An upper quartile that is infinite ends the band at the median."""
    return np.where(np.isnan(high), middle, high)


def _plain(text: str) -> str:
    """Text in which nothing is taken for a formula, or for a curve to be left out of the legend (a first `_`)."""
    escaped = text.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def _has_positive(view: View) -> bool:
    return any(np.any(np.isfinite(values) & (values > 0)) for s in view.series for _, _, values in s.seeds)


def _bytes(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, metadata=METADATA[kind])
    return buffer.getvalue()


def _free(stem: str, taken: set[str]) -> str:
    names: Iterator[str] = (stem if number == 1 else f"{stem}-{number}" for number in range(1, len(taken) + 2))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    return name
