"""A tiny run and a process that forks many of them, for tests that kill them.

As a program it imports torch once, and then forks a run for every line that it reads: `<directory>`. It and the runs
write lines: `pid <number>`, `resumed <step>`, `saved <step>`, `error <text>`, `ended <exit code, or minus the signal>`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ncgru.lab.checkpoint import Checkpoint, flatten, random_state, restore_random_state, unflatten
from ncgru.lab.errors import LabError
from ncgru.lab.rundir import RunDirectory

INTERVAL = 3
"""Steps between checkpoints."""

_LIFETIME = 120  # seconds; should the test be gone, its runs end by themselves


class ToyRecipe:
    """A recipe as far as a run directory knows one."""

    def __init__(self, **fields: Any) -> None:
        self.fields = {"name": "toy/adam", "steps": 10**6, "optimizer": {"name": "adam", "lr": 0.01}, **fields}

    def to_dict(self) -> dict[str, Any]:
        return self.fields


class Toy:
    """Noisy Adam on eight numbers: a state with an optimiser and a random generator in it."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.step = 0
        self.weight = torch.nn.Parameter(torch.rand(8))
        self.optimizer = torch.optim.Adam([self.weight], lr=0.01)

    def advance(self) -> float:
        """One step; returns the loss."""
        self.step += 1
        self.weight.grad = (self.weight + torch.rand(8) - 1).detach()
        self.optimizer.step()
        return float(self.weight.detach().square().sum())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint holds."""
        state = {"weight": self.weight.detach(), "optimizer": self.optimizer.state_dict(), "random": random_state()}
        tensors, structure = flatten(state, "toy")
        return tensors, {"state": structure}

    def restore(self, found: Checkpoint) -> None:
        """Go back to a checkpoint."""
        state = unflatten(found.tensors, found.meta["state"])
        self.step = found.step
        self.weight.data.copy_(state["weight"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_random_state(state["random"])


def run_for_ever(directory: Path) -> None:
    """Open or resume a run and train until killed."""
    with RunDirectory.open(directory, ToyRecipe(), seed=0) as run:
        toy = Toy()
        found = run.restore()
        if found is not None:
            toy.restore(found)
        say(f"resumed {toy.step}")
        while True:
            run.append({"kind": "train", "step": toy.step + 1, "loss": toy.advance()})
            if toy.step % INTERVAL == 0:
                run.save(toy.step, *toy.state())
                say(f"saved {toy.step}")


def say(line: str) -> None:
    """Write a line at once and in one piece, so that lines of several processes do not mix."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main() -> None:
    torch.set_num_threads(1)
    Toy().advance()  # what torch imports at the first step, it imports before the forks
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            say(f"pid {os.getpid()}")
            signal.alarm(_LIFETIME)
            try:
                run_for_ever(Path(line.strip()))
            except LabError as error:
                say(f"error {error}")
            os._exit(1)
        say(f"ended {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


if __name__ == "__main__":
    main()
