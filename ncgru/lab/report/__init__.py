"""Reports: from run directories or result files to tables, figures and a page with interactive plots."""

from ncgru.lab.report.loading import Runs, load_runs
from ncgru.lab.report.results import export_results
from ncgru.lab.report.run import Curve, Run
from ncgru.lab.report.tables import Comparison, Table, comparison_table
from ncgru.lab.report.writing import ReportFiles, write_report

__all__ = [
    "Comparison", "Curve", "ReportFiles", "Run", "Runs", "Table",
    "comparison_table", "export_results", "load_runs", "write_report",
]  # fmt: skip
