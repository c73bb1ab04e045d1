"""Runs that are really killed: what they leave can be gone on from, and nothing of it is wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ncgru.lab.checkpoint import load_latest, save, steps
from ncgru.lab.errors import RunInUseError
from ncgru.lab.rundir import RunDirectory, read_log, run_status
from tests.lab.toy_run import INTERVAL, Toy, ToyRecipe

ROOT = Path(__file__).parent.parent.parent
KILLS = 120


class Forker:
    """The process that forks runs; one run at a time."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.toy_run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | single | {"PYTHONPATH": paths},
        )
        self.pid = 0
        self.said: list[str] = []

    def start(self, directory: Path) -> None:
        """Start a run."""
        assert self.process.stdin is not None
        self.said = []
        print(directory, file=self.process.stdin, flush=True)
        self.pid = self.wait("pid")

    def wait(self, wanted: str) -> int:
        """Wait until a line `<wanted> <number>` comes, and return the number."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())
            if line.startswith(f"{wanted} "):
                return int(line.split()[1])
            assert not line.startswith(("error", "ended")), self.said
        raise AssertionError(f"the runs have ended: {self.said}")

    def kill(self) -> None:
        """Kill the run as `kill -9` does."""
        os.kill(self.pid, signal.SIGKILL)
        self.pid = 0
        assert self.wait("ended") == -signal.SIGKILL, self.said

    def numbers(self, kind: str) -> list[int]:
        """The numbers that the run has said of a kind, "resumed" or "saved"."""
        return [int(line.split()[1]) for line in self.said if line.startswith(f"{kind} ")]

    def close(self) -> None:
        """End the process, and the run that a failed test has left."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


class Truth:
    """The same run without interruption, as far as it has been asked for."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            self.toy = Toy()
            self.random = torch.get_rng_state()
        self.losses: list[float] = []
        self.states = [self.toy.state()[0]]

    def upto(self, step: int) -> None:
        with torch.random.fork_rng():
            torch.set_rng_state(self.random)
            while self.toy.step < step:
                self.losses.append(self.toy.advance())
                self.states.append({name: value.clone() for name, value in self.toy.state()[0].items()})
            self.random = torch.get_rng_state()


def check_what_is_left(directory: Path, saved: int, truth: Truth) -> int:
    """Check a killed run's directory after its last word was that `saved` is saved; returns the step to resume from."""
    assert run_status(directory) in ("new", "interrupted")
    records = read_log(directory) if (directory / "log.jsonl").exists() else []
    found = load_latest(directory / "checkpoints")
    step = found.step if found else 0
    assert saved <= step <= saved + INTERVAL
    assert step <= len(records) <= step + INTERVAL, "more than one interval would be lost"
    truth.upto(len(records))
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert [record["loss"] for record in records] == truth.losses[: len(records)]
    if found:
        assert found.warnings == (), "a kill must not damage a checkpoint"
        assert found.tensors.keys() == truth.states[step].keys()
        assert all(torch.equal(value, truth.states[step][name]) for name, value in found.tensors.items())
    return step


def test_kills_at_random_moments_lose_at_most_one_interval(tmp_path: Path, forker: Forker) -> None:
    directory, truth, moment = tmp_path / "run", Truth(), random.Random()
    step = unfinished = 0
    for kill in range(KILLS):
        forker.start(directory)
        # A third each: at the start, in the first steps, after a checkpoint; so the runs come forward on any machine.
        for sign in ((), ("resumed",), ("resumed", "saved"))[kill % 3]:
            forker.wait(sign)
        time.sleep(10 ** moment.uniform(-4, -1.5))
        forker.kill()
        assert forker.numbers("resumed") in ([], [step])
        step = check_what_is_left(directory, max([step, *forker.numbers("saved")]), truth)
        present = os.listdir(directory / "checkpoints") if (directory / "checkpoints").exists() else []
        unfinished += len(present) != 2 * len(steps(directory / "checkpoints"))
    assert step >= KILLS // 3 * INTERVAL
    assert unfinished > 0, "no kill fell into the writing of a checkpoint"


def test_a_finished_resume_equals_an_uninterrupted_run(tmp_path: Path, forker: Forker) -> None:
    directory, truth = tmp_path / "run", Truth()
    for _ in range(3):
        forker.start(directory)
        forker.wait("saved")
        forker.kill()
    with RunDirectory.open(directory, ToyRecipe(), seed=0) as run, torch.random.fork_rng():
        toy, found = Toy(), run.restore()
        assert found is not None
        toy.restore(found)
        for _ in range(5):
            run.append({"kind": "train", "step": toy.step + 1, "loss": toy.advance()})
        run.append({"kind": "end", "step": toy.step, "status": "finished"})
    truth.upto(toy.step)
    assert [record["loss"] for record in read_log(directory)[:-1]] == truth.losses
    assert all(
        torch.equal(value, truth.states[-1][name]) for name, value in toy.state()[0].items() if "random" not in name
    )
    assert run_status(directory) == "finished"


def test_second_process_is_refused_and_told_the_pid(tmp_path: Path, forker: Forker) -> None:
    forker.start(tmp_path / "run")
    try:
        forker.wait("saved")
        assert run_status(tmp_path / "run") == "running"
        with pytest.raises(RunInUseError, match=rf"in use by process {forker.pid}\b.*wait"):
            RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=0)
        with pytest.raises(RunInUseError):
            RunDirectory.open(tmp_path / "run", ToyRecipe(steps=5), seed=1, allow_other_recipe=True)
    finally:
        forker.kill()
    assert run_status(tmp_path / "run") == "interrupted"
    RunDirectory.open(tmp_path / "run", ToyRecipe(), seed=0).close()


# Kills itself at the n-th file operation of one save: with every n, no moment between two operations is left out.
KILLED_SAVE = """
import os, signal, sys
import torch
from ncgru.lab.checkpoint import save
import safetensors.torch, numpy

def save_and_die(directory, step, operations):
    def count(event, arguments):
        nonlocal operations
        if event in ("open", "os.rename", "os.remove", "os.listdir", "os.mkdir"):
            if operations == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            operations -= 1
    sys.addaudithook(count)
    save(directory, step, {"x": torch.full((5,), 100.0 + step)}, {"generation": 2})
    os._exit(0)

for line in sys.stdin:
    directory, step, operations = line.split()
    child = os.fork()
    if child == 0:
        save_and_die(directory, int(step), int(operations))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def killed_saves() -> Iterator[subprocess.Popen[str]]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": paths}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_SAVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | single,
    ) as process:
        yield process


@pytest.mark.parametrize("step", [20, 30, 25], ids=["same step", "next step", "step between"])
def test_kill_before_every_file_operation_of_a_save(
    tmp_path: Path, killed_saves: subprocess.Popen[str], step: int
) -> None:
    assert killed_saves.stdin is not None
    assert killed_saves.stdout is not None
    for operations in range(200):
        directory = tmp_path / str(operations)
        for earlier in (10, 20):
            save(directory, earlier, {"x": torch.full((5,), float(earlier))}, {"generation": 1})
        print(directory, step, operations, file=killed_saves.stdin, flush=True)
        code = int(killed_saves.stdout.readline())
        assert code in (0, -signal.SIGKILL)
        found = load_latest(directory)
        assert found is not None
        assert found.warnings == ()
        new = found.meta["generation"] == 2
        assert found.step == (step if new else 20)
        assert torch.equal(found.tensors["x"], torch.full((5,), 100.0 + step if new else 20.0))
        save(directory, 40, {"x": torch.ones(5)}, {})
        assert len(os.listdir(directory)) == 4, "a later save must clear up what is left over"
        if code == 0:
            break
    assert operations > 10
    assert new
