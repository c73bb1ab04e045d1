"""Runs of the real trainer in processes of their own, for tests that send them signals.

As a program it imports everything once and forks a run for every line `<directory> <steps>` that it reads. It
writes the lines `pid <number>`, and of the run `at <step>` for each record, `result <status> <step> <reason>` and
`ended <exit code>`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ncgru.lab.journal import Listener
from ncgru.lab.recipes.recipe import Recipe
from ncgru.lab.trainer import train
from tests.lab.small_runs import small_recipe

ROOT = Path(__file__).parent.parent.parent
LIFETIME = 120  # seconds; should the test be gone, its runs end by themselves


def signalled_recipe(steps: int) -> Recipe:
    """Short steps and many checkpoints, so that signals meet all of a run's doings."""
    return small_recipe(steps=steps, log_every=3, eval_every=50, measure_every=7, checkpoint_every=5)


class Trainee:
    """A process that forks runs, seen from the test; one run at a time."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.lab.forked_training"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        self.pid = 0

    def start(self, directory: Path, steps: int) -> None:
        """Fork a run."""
        assert self.process.stdin is not None
        print(directory, steps, file=self.process.stdin, flush=True)
        self.pid = int(self.wait("pid")[-1].split()[1])

    def wait(self, word: str) -> list[str]:
        """The lines up to the next that begins with `word`."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line.strip())
            if line.startswith(f"{word} "):
                return lines
        raise AssertionError(f"the runs have ended: {lines}")

    def signal_after(self, number: int, seconds: float) -> list[str]:
        """Send a signal after a random time of at most `seconds`; returns the lines until the run has ended."""
        time.sleep(random.uniform(0, seconds))
        os.kill(self.pid, number)
        return self.wait("ended")

    def close(self) -> None:
        """End the process, whose runs have ended."""
        self.process.communicate()


class _Voice(Listener):
    def on_start(self, recipe: Recipe, seed: int, step: int, total: int, best: float | None) -> None:
        _say(f"at {step}")

    def on_record(self, record: dict[str, Any]) -> None:
        _say(f"at {record['step']}")

    def on_end(self, result: Any) -> None:
        _say(f"result {result.status} {result.step} {result.reason}")


def _say(line: str) -> None:
    """Write a line at once and in one piece."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main() -> None:
    """Fork runs as asked for."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:  # what is imported at the first step shall not be in every fork
        train(signalled_recipe(8), Path(folder, "run"), 0)
    for line in sys.stdin:
        directory, steps = line.split()
        child = os.fork()
        if child == 0:
            signal.alarm(LIFETIME)
            train(signalled_recipe(int(steps)), directory, 0, listener=_Voice())
            os._exit(0)
        _say(f"pid {child}")
        _say(f"ended {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


if __name__ == "__main__":
    main()
