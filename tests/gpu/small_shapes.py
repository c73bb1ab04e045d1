"""Launches every kernel of the recurrence on small shapes, for a checker: `python -m tests.gpu.small_shapes`.

Checkers slow a kernel down a thousandfold; nothing is compared here.
"""

from __future__ import annotations

import torch

from ncgru.recurrence.cuda.gpu import Gpu, gpu
from ncgru.recurrence.cuda.kind import Limits
from tests.gpu.covering import kind
from tests.recurrence.cuda.proof import Case, inputs, run

KINDS = (
    kind(7, "float32", "before", "modrelu"),
    kind(33, "bfloat16", "after", "tanh"),
    kind(80, "float16", "none", "relu"),
    kind(130, "float32", "before", "modrelu"),
    kind(140, "bfloat16", "after", "tanh"),
    kind(150, "tf32", "none", "relu"),
    kind(200, "float16", "before", "modrelu"),
)
MACHINES = (Limits(1, 232448), Limits(16, 232448), Limits(14, 40000))
"""Two rows a block; wide blocks; matrices that are streamed. As this GPU has room for more, they run on it."""


def main() -> None:
    for one in KINDS:
        for machine in (gpu(0), *(Gpu(0, limits) for limits in MACHINES[one.hidden > 128 :])):
            case = Case(one, 3, 9, "both", lengths=True)
            found = run(machine, case, inputs(case, "cuda"))
            torch.cuda.synchronize()
            assert all(x.isfinite().all() for x in found.values())
            print(one, machine.limits, flush=True)


if __name__ == "__main__":
    main()
