"""Saves on a disk that fills up, with more room each time; a program, as it may need its own mounts or limits.

Usage: `full_disk.py tmpfs|limit <directory>`. With `tmpfs`, the directory is on a small file system of its own; with
`limit`, no file may become larger than the room. Writes one line of JSON: the errors of the saves and of the log.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ncgru.lab.checkpoint import load_latest, save, steps
from ncgru.lab.errors import LabError
from ncgru.lab.log import Log, read_log
from ncgru.lab.rundir import RunDirectory, read_recipe
from tests.lab.toy_run import ToyRecipe

PAGE = 4096
TENSORS = {"x": torch.arange(3 * PAGE // 4, dtype=torch.float32)}  # three pages
META = {"text": "x" * 2 * PAGE}  # and two of JSON


def leave_room_by_ballast(directory: Path, room: int | None) -> None:
    """Fill the file system but for `room` bytes; None takes the ballast away."""
    ballast = directory / "ballast"
    ballast.unlink(missing_ok=True)
    if room is not None:
        state = os.statvfs(directory)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, state.f_bavail * state.f_frsize - room))


def leave_room_by_limit(_: Path, room: int | None) -> None:
    """Let no file become larger than `room` bytes."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if room is None else room, hard))


def fill_up(directory: Path, leave_room: Callable[[Path, int | None], None]) -> list[str]:
    """Save with ever more room until it works; returns the errors on the way."""
    checkpoints, errors = directory / "checkpoints", []
    for step in (10, 20):
        save(checkpoints, step, TENSORS, META | {"step": step})
    before = sorted(os.listdir(checkpoints))
    for room in range(0, 100 * PAGE, PAGE // 2):
        leave_room(directory, room)
        try:
            save(checkpoints, 30, TENSORS, META | {"step": 30})
        except LabError as error:
            errors.append(str(error))
        finally:
            leave_room(directory, None)
        found = load_latest(checkpoints)
        assert found is not None
        assert not found.warnings
        assert torch.equal(found.tensors["x"], TENSORS["x"])
        if found.step == 30:
            assert steps(checkpoints) == [20, 30]
            return errors
        assert found.step == 20
        assert sorted(os.listdir(checkpoints)) == before, "something half-written was left"
    raise AssertionError("a save never worked")


def fill_log(directory: Path, leave_room: Callable[[Path, int | None], None]) -> list[str]:
    """Append to a log until there is no room; returns the error."""
    log, record = Log(directory / "log.jsonl"), {"kind": "train", "text": "x" * 700}
    leave_room(directory, 2 * PAGE)
    for count in range(1000):
        try:
            log.append(record)
        except LabError as error:
            leave_room(directory, None)
            assert log.path.read_bytes().endswith(b"\n")
            assert read_log(directory) == [record] * count
            log.append(record)
            assert read_log(directory) == [record] * (count + 1)
            return [str(error)]
    raise AssertionError("the disk was never full")


def open_runs(directory: Path, leave_room: Callable[[Path, int | None], None]) -> list[str]:
    """Open a new run with ever more room until it works; returns the errors on the way."""
    errors = []
    for room in (0, 1, PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE, 5 * PAGE):
        leave_room(directory, room)
        try:
            RunDirectory.open(directory / "run", ToyRecipe(note="x" * PAGE), seed=0).close()
        except LabError as error:
            errors.append(str(error))
        finally:
            leave_room(directory, None)
        if (directory / "run" / "recipe.json").exists():
            assert read_recipe(directory / "run").seed == 0
            return errors
        assert os.listdir(directory / "run") == ["lock"], "something half-written was left"
    raise AssertionError("a run could never be opened")


def main() -> None:
    kind, directory = sys.argv[1], Path(sys.argv[2])
    leave_room = {"tmpfs": leave_room_by_ballast, "limit": leave_room_by_limit}[kind]
    proofs = {"save": fill_up, "log": fill_log, "open": open_runs}
    print(json.dumps({name: proof(directory, leave_room) for name, proof in proofs.items()}))


if __name__ == "__main__":
    main()
