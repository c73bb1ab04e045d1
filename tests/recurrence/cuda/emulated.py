"""The emulator as the machine that the recurrence's kernels run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ncgru.recurrence.cuda.kind import Limits
from ncgru.recurrence.cuda.machine import Argument
from tests.emulator import compile_kernels

H200 = Limits(multiprocessors=132, shared=232448)


@dataclass(frozen=True)
class Emulated:
    """A GPU of `limits`, whose threads run in an order drawn with `seed`."""

    limits: Limits = H200
    seed: int = 0

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
        kernels = compile_kernels("recurrence", source, **defines)
        kernels.launch(name, grid, threads, arguments, shared=shared, at_once=cooperative, seed=self.seed)
