"""The log: strict JSON lines, readable at any moment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ncgru.lab.errors import LabError
from ncgru.lab.log import Log, read_log
from ncgru.lab.rundir import RunDirectory
from tests.lab.toy_run import ToyRecipe

RECORDS: list[dict[str, Any]] = [
    {"kind": "start", "provenance": {"cpu": "Prozeßor ×2"}, "step": 0},
    {"kind": "train", "step": 10, "loss": 0.1 + 0.2},
    {"kind": "end", "status": "failed", "reason": "a line\nbreak", "headline_min": None},
]


def write(path: Path, *records: dict[str, Any]) -> Log:
    log = Log(path)
    for record in records:
        log.append(record)
    return log


def test_records_come_back_while_the_log_is_open(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", *RECORDS)
    assert read_log(tmp_path) == read_log(log.path) == RECORDS
    assert log.size == log.sync() == log.path.stat().st_size
    assert len(log.path.read_bytes().splitlines()) == 3
    log.close()
    log.close()


def test_numbers_that_are_not_finite_are_strict_json_and_come_back(tmp_path: Path) -> None:
    record = {"kind": "train", "loss": math.nan, "norms": [math.inf, -math.inf, 1.0], "deep": {"x": math.inf}}
    write(tmp_path / "log.jsonl", record).close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    line = (tmp_path / "log.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse)["norms"] == ["Infinity", "-Infinity", 1.0]
    (back,) = read_log(tmp_path)
    assert math.isnan(back["loss"])
    assert (back["norms"], back["deep"]) == (record["norms"], record["deep"])


@pytest.mark.parametrize("torn", [b'{"kind":"tr', b'{"kind":"train"', b"\0" * 50, b'"kind"}\n', b"\xff\xfe", b"{"])
def test_torn_last_line_is_left_out(tmp_path: Path, torn: bytes) -> None:
    log = write(tmp_path / "log.jsonl", *RECORDS)
    log.close()
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + torn)
    assert read_log(tmp_path) == RECORDS


def test_every_cut_leaves_whole_records(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", *RECORDS)
    log.close()
    whole = log.path.read_bytes()
    for length in range(len(whole)):
        log.path.write_bytes(whole[:length])
        records = read_log(tmp_path)
        assert records == RECORDS[: len(records)]
        assert whole[:length].count(b"\n") <= len(records) <= whole[:length].count(b"\n") + 1
        again = write(log.path, {"kind": "train"})
        again.close()
        assert read_log(tmp_path) == [*RECORDS[: whole[:length].count(b"\n")], {"kind": "train"}]


def test_damaged_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", *RECORDS)
    log.close()
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(lines[0] + b"{oops}\n" + lines[2])
    with pytest.raises(LabError, match=r"line 2 of .*log\.jsonl is damaged: b'\{oops\}'"):
        read_log(tmp_path)


def test_missing_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"cannot read .*log\.jsonl: No such file"):
        read_log(tmp_path)


def test_truncation_only_shortens(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", RECORDS[0])
    size = log.size
    log.append(RECORDS[1])
    log.truncate(10**9)
    assert read_log(tmp_path) == RECORDS[:2]
    log.truncate(size)
    log.append(RECORDS[2])
    assert read_log(tmp_path) == [RECORDS[0], RECORDS[2]]


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        ({"step": 1}, ValueError, "record must have a 'kind' of type str, got None"),
        ({"kind": 3}, ValueError, "record must have a 'kind' of type str, got 3"),
        (
            {"kind": "train", "loss": torch.tensor(1.0)},
            TypeError,
            r"record\.loss must be .* got Tensor; pass \.item\(\)",
        ),
        ({"kind": "matrix", "norm": {0: 1.0}}, TypeError, r"record\.norm must have keys of type str, got 0"),
    ],
)
def test_what_is_no_record_is_refused(
    tmp_path: Path, record: dict[str, Any], error: type[Exception], message: str
) -> None:
    with RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=0) as run:
        with pytest.raises(error, match=message):
            run.append(record)
        assert run.log_path.read_bytes() == b""
