"""Trains on a GPU that others use at the same time: `python -m tests.gpu.sharing ROUNDS`.

Prints "ready", waits for a line, and then "done" if every round gave the same bits.
"""

from __future__ import annotations

import sys

import torch

from ncgru.recurrence.cuda.gpu import gpu
from tests.gpu.covering import kind
from tests.recurrence.cuda.proof import Case, inputs, run

CASES = (
    Case(kind(1024, "float32", "before", "modrelu"), 30, 64, lengths=True),
    Case(kind(512, "bfloat16", "after", "tanh"), 50, 33, "both"),
    Case(kind(118, "float32", "before", "modrelu"), 50, 128, "both"),
)
"""The first fill the whole GPU with blocks that wait for each other."""


def main(rounds: int) -> None:
    given = [inputs(case, "cuda") for case in CASES]
    first = [run(gpu(0), *pair) for pair in zip(CASES, given, strict=True)]
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    wrong = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(rounds):
        for case, x, expected in zip(CASES, given, first, strict=True):
            for name, found in run(gpu(0), case, x).items():
                wrong |= (found != expected[name]).any()
        torch.cuda.synchronize()
    assert not wrong
    print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
