"""The page docs/performance.md: writes its tables and its plot anew from the committed results of gpu_recurrence.

Everything between the two marks of the page is replaced; the text around them stays.

    python -m benchmarks.gpu_report
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

from benchmarks.gpu import judge, records
from benchmarks.gpu.records import Record
from benchmarks.gpu.shapes import GROUPS, GRU, LSTM, OURS, Shape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "images" / "performance.svg"
BEGIN, END = "<!-- tables: python -m benchmarks.gpu_report -->", "<!-- end of tables -->"

_COLOURS = {OURS: "#c1440e", GRU: "#27548a", LSTM: "#8a8a8a"}
_PANELS = (
    ("float32, B = 16", ("small", "large-16"), "float32", 16),
    ("float32, B = 64", ("small", "large-64"), "float32", 64),
    ("float32, B = 256", ("small", "large-256"), "float32", 256),
    ("float16, B = 16", ("half-16",), "float16", 16),
    ("float16, B = 64", ("half-64",), "float16", 64),
    ("float16, B = 256", ("half-256",), "float16", 256),
)


def results() -> list[Record]:
    """All committed measurements."""
    return records.read(sorted(RESULTS.glob("*.jsonl")))


def markdown(lines: Sequence[Record]) -> str:
    """All tables, and what they were measured with."""
    tables = [_table(table) for table in judge.tables(lines)]
    return "\n\n".join([_origin(lines), *tables])


def _origin(lines: Sequence[Record]) -> str:
    names = ("gpu", "torch", "cuda", "cudnn", "python", "commit")
    runs = {tuple(str(line[name]) for name in names): str(line["date"])[:10] for line in lines}
    told = [
        f"- {gpu}, PyTorch {torch}, CUDA {cuda}, cuDNN {cudnn}, Python {python}, commit `{commit[:12]}`, {date}"
        for (gpu, torch, cuda, cudnn, python, commit), date in runs.items()
    ]
    return "Measured with:\n\n" + "\n".join(told)


def _table(table: judge.Table) -> str:
    rows = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join([f"### {table.title}", "", table.note, "", *("| " + " | ".join(row) + " |" for row in rows)])


def page(text: str, lines: Sequence[Record]) -> str:
    """The page with its tables made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{markdown(lines)}\n\n{END}{after}"


def plot(lines: Sequence[Record], path: Path) -> None:
    """Time of a training step over the hidden size."""
    plt.rcParams["svg.hashsalt"] = "ncgru"
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.4), sharex=True, sharey="row", layout="constrained")
    measurements = judge.Measurements(lines)
    for axis, (title, groups, dtype, batch) in zip(axes.flat, _PANELS, strict=True):
        for what, colour in _COLOURS.items():
            for mode, style in ((judge.EAGER, "-"), (judge.GRAPH, ":")):
                points = _points(measurements, groups, dtype, batch, what, mode)
                label = f"{what}, {'from Python' if mode == judge.EAGER else 'in a CUDA graph'}"
                if points:
                    axis.plot(*zip(*points, strict=True), style, color=colour, marker=".", label=label)
        axis.set(title=title, yscale="log", xscale="log")
        axis.set_xticks([64, 128, 256, 512, 1024], ["64", "128", "256", "512", "1024"])
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("hidden units = input features")
    for axis in axes[:, 0]:
        axis.set_ylabel("µs a step of time, training")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _points(
    measurements: judge.Measurements, groups: Sequence[str], dtype: str, batch: int, what: str, mode: str
) -> list[tuple[int, float]]:
    found = []
    for group in groups:
        for steps, rows, size in GROUPS[group].shapes:
            key = (group, Shape(steps, rows, size), dtype, what, judge.TRAINING, mode)
            line = measurements.latest([key]).get(key)
            if rows == batch and line is not None:
                found.append((size, float(line["median_us"]) / steps))
    return found


def main() -> None:
    """Write the page and the plot."""
    lines = results()
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
    plot(lines, PLOT)
    print(f"wrote {PAGE.relative_to(ROOT)} and {PLOT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
