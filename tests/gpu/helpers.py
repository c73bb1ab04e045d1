"""What the tests of the recurrence on a GPU share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ncgru.recurrence.cuda.gpu import Gpu, gpu
from ncgru.recurrence.cuda.kind import Limits
from ncgru.recurrence.cuda.machine import Argument

DEVICE = torch.device("cuda", 0)


class Recorder:
    """A GPU that remembers which kernels it launched, with which grids."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.inner = Gpu(0, limits) if limits else gpu(0)
        self.limits = self.inner.limits
        self.launched: list[tuple[str, tuple[int, int, int]]] = []

    def launch(
        self,
        source: str,
        defines: Mapping[str, int],
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        self.launched.append((name, grid))
        self.inner.launch(source, defines, name, grid, threads, arguments, shared=shared, cooperative=cooperative)


def assert_same_but_for_rounding(found: Tensor, expected: Tensor, near: float = 1e-4) -> None:
    """To be used where nothing tells which of the two is better: their distance, for numbers as large as these."""
    scale = float(expected.detach().abs().max().clamp(min=1)) if expected.numel() else 1.0
    torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=near)


def leaf(x: Tensor) -> Tensor:
    return x.detach().to(DEVICE).requires_grad_()
