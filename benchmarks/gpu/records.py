"""Measurements as JSON lines: each names what was measured, where, and with which versions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.timing import Sample
from ncgru.lab.provenance import provenance

Record = Mapping[str, Any]


def facts(commit: str | None) -> dict[str, Any]:
    """What is the same for all measurements of a run; `date` names the run."""
    found = provenance()
    properties: Any = torch.cuda.get_device_properties(0)
    kept = {name: found[name] for name in ("date", "ncgru", "torch", "cuda", "python", "cpu", "cores")}
    return {
        "benchmark": "gpu_recurrence",
        **kept,
        "commit": commit or found["commit"] or "unknown",
        "cudnn": torch.backends.cudnn.version(),
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
    }


def record(
    common: Record,
    group: str,
    shape: Shape,
    dtype: str,
    what: str,
    passing: str,
    mode: str,
    result: Sample | str,
    **more: Any,
) -> dict[str, Any]:
    """A measurement in microseconds of the whole sequence, or the reason why there is none."""
    measured: dict[str, Any] = {"failed": result}
    if isinstance(result, Sample):
        measured = {
            "median_us": round(result.median, 3),
            "quartiles_us": [round(value, 3) for value in result.quartiles],
            "repeats": result.repeats,
            "calls": result.calls,
        }
    place = {"group": group, **shape._asdict(), "dtype": dtype, "what": what, "pass": passing, "mode": mode}
    return {**place, **measured, **more, **common}


def append(path: Path, records: Iterable[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in records)


def read(paths: Iterable[Path]) -> list[Record]:
    """All measurements of these files, in the order of their runs."""
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if line]
    found: list[Record] = [json.loads(line) for line in lines]
    return sorted((line for line in found if line["benchmark"] == "gpu_recurrence"), key=lambda line: str(line["date"]))
