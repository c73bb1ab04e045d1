"""Launches kernels on small shapes, for a checker, which slows them down a thousandfold; nothing is compared here.

python -m tests.gpu.small_shapes               # every kernel: products, orthogonal update, recurrence
python -m tests.gpu.small_shapes full-barriers # without those whose warps wait for each other in part
python -m tests.gpu.small_shapes hand-over     # a few lines in which warps do that and nothing else
"""

from __future__ import annotations

import sys

import torch

from ncgru._cuda import program
from ncgru.orthogonal import ScaledCayley, packed_size
from ncgru.recurrence.cuda import product, small
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


def hand_over() -> None:
    """Some warps write, and others read."""
    y = torch.full((128,), -1, dtype=torch.int32, device="cuda")
    program("tests.cuda_support", "hand_over.cu", {}).kernel("hand_over", 0).launch((1, 1, 1), (384, 1, 1), y)
    assert y.tolist() == [8 * (5 + i // 32) for i in range(128)]


def multiply() -> None:
    """Products over all steps, in the three ways that operands lie, whole and in slices and parts."""
    m, n, k = 130, 70, 200
    for a_along, b_along in ((True, True), (True, False), (False, False)):
        a = torch.randn(m, k, device="cuda") if a_along else torch.randn(k, m, device="cuda").t()
        b = torch.randn(n, k, device="cuda").t() if b_along else torch.randn(k, n, device="cuda")
        for room in (product.ROOM, 2 * (m + n) * k):
            out = torch.empty(m, n, device="cuda")
            problems = [(product.operand(a, 1), product.operand(b, 0), product.Result(out, 0, n))]
            product.products(gpu(0), k, problems, room)
            assert out.isfinite().all()
        print("product", a_along, b_along, flush=True)


def follow_matrices() -> None:
    """Some updates of orthogonal matrices, small and large, and their gradients."""
    for n in (7, 40, 170):
        module = ScaledCayley(n, (2,), reset_every=2, device="cuda")
        packed = torch.zeros(2, packed_size(n), device="cuda", requires_grad=True)
        for _ in range(3):
            module(packed).sum().backward()
            with torch.no_grad():
                packed.add_(1e-3)
        print("matrices", n, flush=True)


def main() -> None:
    what = sys.argv[1:]
    if what == ["hand-over"]:
        hand_over()
        return
    multiply()
    follow_matrices()
    for one in KINDS:
        if what == ["full-barriers"] and one.hidden > small.LARGEST_HIDDEN:
            continue
        for machine in (gpu(0), *(Gpu(0, limits) for limits in MACHINES[one.hidden > 128 :])):
            case = Case(one, 3, 9, "both", lengths=True)
            found = run(machine, case, inputs(case, "cuda"))
            torch.cuda.synchronize()
            assert all(x.isfinite().all() for x in found.values())
            print(one, machine.limits, flush=True)


if __name__ == "__main__":
    main()
