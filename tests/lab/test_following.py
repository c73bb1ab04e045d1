"""Runs in other processes are told from their logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ncgru.lab.following import Follower
from ncgru.lab.journal import Listener
from ncgru.lab.recipes import Recipe
from ncgru.lab.rundir import RunDirectory
from ncgru.lab.trainer import train
from tests.lab.small_runs import StopAfter, small_recipe


class Ear(Listener):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.start: tuple[str, int, int, int] | None = None
        self.losses: list[float] = []
        self.steps: list[int] = []

    def on_start(self, recipe: Recipe, seed: int, step: int, total: int, best: float | None) -> None:
        assert self.start is None
        self.start = recipe.name, seed, step, total

    def on_record(self, record: dict[str, Any]) -> None:
        assert record["kind"] != "end"
        if record["kind"] == "train":
            self.losses.append(record["loss"])

    def on_step(self, step: int) -> None:
        self.steps.append(step)


def follower(path: Path) -> tuple[Follower, Ear]:
    ear = Ear()
    return Follower(small_recipe(), 3, path, ear), ear


def train_record(step: int) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 1 / step}


def test_all_records_are_told_once_and_in_order(tmp_path: Path) -> None:
    following, ear = follower(tmp_path / "run")
    following.look()
    with RunDirectory.open(tmp_path / "run", small_recipe(), 3) as run:
        following.look()
        assert ear.start is None
        run.append({"kind": "start", "step": 0})
        run.append(train_record(4))
        following.look()
        assert ear.start == ("small/nc-gru-c", 3, 0, 24)
        following.look()
        for step in (8, 12):
            run.append(train_record(step))
        following.look()
        run.append({"kind": "end", "step": 12, "status": "finished"})
        following.look()
    assert ear.losses == [1 / 4, 1 / 8, 1 / 12]
    assert ear.steps == [4, 12, 12]


def test_an_earlier_sitting_is_told_when_the_run_goes_on(tmp_path: Path) -> None:
    train(small_recipe(), tmp_path / "run", 3, stop=StopAfter(9))
    following, ear = follower(tmp_path / "run")
    following.look()
    assert ear.start is None, "nobody works on it"
    with RunDirectory.open(tmp_path / "run", small_recipe(), 3) as run:
        run.restore()
        run.append({"kind": "start", "step": 9})
        following.look()
    assert ear.start == ("small/nc-gru-c", 3, 9, 24)
    assert len(ear.losses) == 2


def test_a_log_that_is_cut_back_goes_on_being_told(tmp_path: Path) -> None:
    following, ear = follower(tmp_path / "run")
    with RunDirectory.open(tmp_path / "run", small_recipe(), 3) as run:
        run.append({"kind": "start", "step": 0})
        for step in (4, 8, 12):
            run.append(train_record(step))
        following.look()
        log = run.log_path.read_bytes()
        run.log_path.write_bytes(b"".join(log.splitlines(keepends=True)[:2]))
        following.look()
        run.append(train_record(8))
        following.look()
    assert ear.losses == [1 / 4, 1 / 8, 1 / 12, 1 / 8]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    following, ear = follower(tmp_path / "run")
    with RunDirectory.open(tmp_path / "run", small_recipe(), 3) as run:
        run.append({"kind": "start", "step": 0})
        with run.log_path.open("ab") as log:
            log.write(b'{"kind":"train","st')
            log.flush()
            following.look()
            assert ear.losses == []
            log.write(b'ep":4,"loss":0.5}\n')
        following.look()
    assert ear.losses == [0.5]
