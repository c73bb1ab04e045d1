"""What runs kernels, as those who launch them see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from .kind import Limits

Argument = Tensor | tuple[Tensor, int] | int | float | bytes | None
"""Of a kernel; a tensor with an offset in bytes is an address within it."""


class Machine(Protocol):
    """What runs kernels: a GPU, or in tests the emulator."""

    @property
    def limits(self) -> Limits:
        """What it offers."""

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
        """Launch the kernel `name` of a source file compiled with these macros."""
