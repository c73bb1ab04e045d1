"""Ratios of the measurements, held against what must be reached, as tables of text.

Two measurements are compared only if they come from the same run; of several runs the latest counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.layers import FREE, UPDATE
from benchmarks.gpu.records import Record
from benchmarks.gpu.shapes import (
    BARS,
    GROUPS,
    GRU,
    LOOP,
    LSTM,
    ORTHOGONAL_BARS,
    OURS,
    PAPER,
    SHARE_AIM,
    SHARE_MUST,
    Bar,
    Shape,
)

TRAINING, FORWARD, UPDATING, FIRST = "training", "forward", "update", "first use"
EAGER, GRAPH = "eager", "graph"
TORCH_CAYLEY = "torch parametrizations.orthogonal"


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Row:
    """One shape of a bar.

    Attributes:
        bar: what must be reached.
        shape: T, B and n.
        dtype: ours.
        theirs_dtype: the other's fastest, called from Python.
        ours: microseconds of ours by mode.
        theirs: microseconds of the other's fastest by mode.
    """

    bar: Bar
    shape: Shape
    dtype: str
    theirs_dtype: str
    ours: dict[str, float]
    theirs: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        return {mode: self.theirs[mode] / self.ours[mode] for mode in self.ours if mode in self.theirs}


class Measurements:
    """The medians of a set of records, by run and by what was measured."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.runs: dict[str, dict[tuple[Any, ...], Record]] = {}
        for line in records:
            if "median_us" in line:
                key = (line["group"], _shape(line), line["dtype"], line["what"], line["pass"], line["mode"])
                self.runs.setdefault(f"{line['date']} {line['gpu']}", {})[key] = line

    def latest(self, keys: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], Record]:
        """The records of the latest run that has the first two of the keys; as many of the others as it has."""
        for run in reversed(self.runs.values()):
            if all(key in run for key in keys[:2]):
                return {key: run[key] for key in keys if key in run}
        return {}


def _shape(line: Record) -> Shape:
    return Shape(line["T"], line["B"], line["n"])


def rows(measurements: Measurements, bar: Bar) -> Iterator[Row]:
    """What was measured of this bar."""
    for name in bar.groups:
        group = GROUPS[name]
        for shape in group.shapes:
            if bar.sizes is None or shape.n in bar.sizes:
                for dtype in group.dtypes:
                    row = _row(measurements, bar, name, shape, dtype)
                    if row is not None:
                        yield row


def _row(measurements: Measurements, bar: Bar, group: str, shape: Shape, dtype: str) -> Row | None:
    kinds = bar.theirs or GROUPS[group].dtypes
    ours = {mode: (group, shape, dtype, OURS, TRAINING, mode) for mode in (EAGER, GRAPH)}
    theirs = {(kind, mode): (group, shape, kind, bar.against, TRAINING, mode) for kind in kinds for mode in ours}
    found: dict[tuple[Any, ...], Record] = {}
    for kind in kinds:
        keys = [ours[EAGER], theirs[kind, EAGER], ours[GRAPH], *theirs.values()]
        found = found or measurements.latest(keys)
    if not found:
        return None
    medians = {
        mode: {kind: _median(found, theirs[kind, mode]) for kind in kinds if theirs[kind, mode] in found}
        for mode in ours
    }
    fastest = min(medians[EAGER], key=lambda kind: medians[EAGER][kind])
    return Row(
        bar,
        shape,
        dtype,
        fastest,
        {mode: _median(found, key) for mode, key in ours.items() if key in found},
        {mode: min(values.values()) for mode, values in medians.items() if values},
    )


def _median(found: dict[tuple[Any, ...], Record], key: tuple[Any, ...]) -> float:
    return float(found[key]["median_us"])


def verdict(value: float, must: float, aim: float | None) -> str:
    """A ratio and what it means; both bounds are least values."""
    if not math.isfinite(value):
        return "–"
    word = "aim" if aim is not None and value >= aim else "PASS" if value >= must else "short"
    return f"{value:.2f} {word}" if value < 100 else f"{value:.0f} {word}"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def tables(records: Sequence[Record]) -> list[Table]:
    """All tables that the measurements are enough for."""
    measurements = Measurements(records)
    made = [_bar_table(measurements, bar) for bar in BARS]
    made += [_orthogonal_table(measurements), _share_table(measurements), _first_use_table(measurements)]
    made += [_steps_table(measurements, passing) for passing in (TRAINING, FORWARD)]
    made.append(_failures(records))
    return [table for table in made if table.rows]


def _bar_table(measurements: Measurements, bar: Bar) -> Table:
    found = list(rows(measurements, bar))
    lines = []
    for row in found:
        ratios = row.ratios
        judged = [verdict(ratios.get(mode, math.nan), bar.must, bar.aim) for mode in (EAGER, GRAPH)]
        other = f"{row.theirs[EAGER] / 1e3:.3f} {row.theirs_dtype}"
        lines.append([str(row.shape), row.dtype, f"{row.ours[EAGER] / 1e3:.3f}", other, *judged])
    if bar.mean is not None and len(found) == sum(len(GROUPS[name].shapes) for name in bar.groups):
        means = [geometric_mean([row.ratios.get(mode, math.nan) for row in found]) for mode in (EAGER, GRAPH)]
        lines.append(["geometric mean", "", "", "", *(verdict(mean, bar.mean, None) for mean in means)])
    wanted = f"must {bar.must:g}" + ("" if bar.aim is None else f", aim {bar.aim:g}")
    header = ["shape", "dtype", "NCGRU ms", f"{bar.against} ms", "ratio", "ratio in graphs"]
    return Table(bar.title, f"A training step of one layer: {wanted} times.", header, lines)


def _orthogonal_table(measurements: Measurements) -> Table:
    lines = []
    sizes = sorted({key[1].n for run in measurements.runs.values() for key in run if key[0] == "orthogonal"})
    for n in sizes:
        keys = [
            ("orthogonal", Shape(1, 1, n), "float32", what, UPDATING, mode)
            for mode in (EAGER, GRAPH)
            for what in (OURS, TORCH_CAYLEY)
        ]
        found = measurements.latest(keys)
        if found:
            must, aim = next((must, aim) for most, must, aim in ORTHOGONAL_BARS if n <= most)
            ours, theirs = (_median(found, key) for key in keys[:2])
            graph = f"{_median(found, keys[2]):.1f}" if keys[2] in found else "–"
            lines.append([str(n), f"{ours:.1f}", graph, f"{theirs:.0f}", verdict(theirs / ours, must, aim)])
    header = ["n", "ScaledCayley µs", "in a graph µs", f"{TORCH_CAYLEY} µs", "ratio"]
    wanted = "; ".join(f"up to n = {most} must {must:g}, aim {aim:g} times" for most, must, aim in ORTHOGONAL_BARS)
    note = f"Forward and backward of one matrix after a step of A, float32, called from Python: {wanted}."
    return Table("The orthogonal update against torch's Cayley map", note, header, lines)


def _share_table(measurements: Measurements) -> Table:
    lines = []
    for shape in PAPER:
        shares = [_shares(measurements, shape, mode) for mode in (EAGER, GRAPH)]
        if any(shares):
            lines.append([str(shape), *(share for pair in shares for share in pair or ("–", "–"))])
    header = ["shape", "difference", "alone", "difference in graphs", "alone in graphs"]
    note = (
        f"Must be at most {SHARE_MUST:.0%}, aim {SHARE_AIM:.0%}. Difference: what a step takes longer than with a free "
        "matrix in the place of the orthogonal one. Alone: the update by itself over the whole step."
    )
    return Table("The orthogonal update's share of a training step", note, header, lines)


def _shares(measurements: Measurements, shape: Shape, mode: str) -> tuple[str, str] | None:
    keys = [("paper", shape, "float32", what, TRAINING, mode) for what in (OURS, FREE, UPDATE)]
    found = measurements.latest(keys)
    if len(found) < len(keys):
        return None
    whole, free, alone = (_median(found, key) for key in keys)
    return _share_verdict(1 - free / whole), _share_verdict(alone / whole)


def _share_verdict(share: float) -> str:
    word = "aim" if share <= SHARE_AIM else "PASS" if share <= SHARE_MUST else "short"
    return f"{100 * share:.1f} % {word}"


def _first_use_table(measurements: Measurements) -> Table:
    lines = []
    latest = {key: line for run in measurements.runs.values() for key, line in run.items() if key[0] == "first-use"}
    places = dict.fromkeys(key[1:3] for key in latest)
    for shape, dtype in places:
        values = [latest.get(("first-use", shape, dtype, OURS, FIRST, mode)) for mode in ("cold", "warm", "next")]
        texts = ["–" if value is None else f"{value['median_us'] / 1e6:.3f}" for value in values]
        lines.append([f"n{shape.n}", dtype, *texts])
    header = ["size", "dtype", "compiled s", "from the cache s", "each further step s"]
    note = "The first training step of a process: with nothing compiled yet, and with machine code on disk."
    return Table("First use", note, header, lines)


def _steps_table(measurements: Measurements, passing: str) -> Table:
    whats = (OURS, GRU, LSTM, LOOP)
    lines = []
    for name, group in GROUPS.items():
        for shape in group.shapes:
            for dtype in group.dtypes:
                keys = [(name, shape, dtype, what, passing, mode) for what in whats for mode in (EAGER, GRAPH)]
                found = measurements.latest([keys[0], *keys])
                if found:
                    texts = [f"{_median(found, key) / shape.T:.2f}" if key in found else "–" for key in keys]
                    pairs = [f"{eager} / {graph}" for eager, graph in zip(texts[::2], texts[1::2], strict=True)]
                    lines.append([str(shape), dtype, *pairs])
    title = {TRAINING: "Training", FORWARD: "Inference"}[passing] + ", µs a step of time"
    note = "Called from Python / replayed from a CUDA graph."
    return Table(title, note, ["shape", "dtype", *whats], lines)


def _failures(records: Sequence[Record]) -> Table:
    lines = [
        [str(_shape(line)), line["dtype"], line["what"], f"{line['pass']} {line['mode']}", line["failed"]]
        for line in records
        if "failed" in line
    ]
    return Table("What could not be measured", "", ["shape", "dtype", "what", "pass", "reason"], lines)
