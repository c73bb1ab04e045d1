"""The whole report: page, tables and figures in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ncgru.lab.durable import replace_file, storage_error
from ncgru.lab.report.figures import write_figures
from ncgru.lab.report.groups import sections
from ncgru.lab.report.html import page
from ncgru.lab.report.loading import load_runs
from ncgru.lab.report.tables import comparison_table


class ReportFiles(NamedTuple):
    """What was written.

    Attributes:
        page: the HTML page; it works alone.
        tables: the headline tables in Markdown.
        figures: PNG and PDF files.
    """

    page: Path
    tables: Path
    figures: tuple[Path, ...]


def write_report(paths: Sequence[Path | str], out: Path | str, *, figures: bool = True) -> ReportFiles:
    """Write `report.html`, `tables.md` and, in `figures/`, every plot as PNG and PDF.

    Args:
        paths: run directories, folders with such anywhere below, or result files.
        out: a folder; it is made if it is not there.
        figures: whether to draw the files for papers, which takes about half a second a plot.

    Raises:
        ValueError: there is no run in `paths`.
        LabError: the folder cannot be written to.
    """
    runs = load_runs(*paths)
    grouped = sections(runs)
    folder = Path(out)
    try:
        (folder / "figures" if figures else folder).mkdir(parents=True, exist_ok=True)
        drawn = write_figures(grouped, folder / "figures") if figures else {}
        replace_file(folder / "report.html", page(grouped, runs.problems, drawn, folder).encode())
        replace_file(folder / "tables.md", comparison_table(runs).markdown().encode())
    except OSError as error:
        raise storage_error(f"write the report to {folder}", error) from error
    files = tuple(file for files in drawn.values() for file in files)
    return ReportFiles(folder / "report.html", folder / "tables.md", files)
