"""Random recurrences, shared by the tests of this area."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ncgru.recurrence import recurrence, unrolled

KINDS = [(reset, phi) for reset in ("before", "after", "none") for phi in ("modrelu", "tanh", "relu")]


@dataclass(frozen=True)
class Case:
    projected: Tensor
    initial: Tensor
    weight: Tensor
    threshold: Tensor | None
    lengths: Tensor | None
    reset: str = "before"
    nonlinearity: str = "modrelu"
    reverse: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return {"reset": self.reset, "nonlinearity": self.nonlinearity, "reverse": self.reverse}

    @property
    def positional(self) -> tuple[Any, ...]:
        """The arguments in the order of `unrolled` and of the operator."""
        return (*self.tensors, self.lengths, self.reset, self.nonlinearity, self.reverse)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return self.projected, self.initial, self.weight, self.threshold

    @property
    def differentiable(self) -> list[Tensor]:
        return [x for x in self.tensors if x is not None]

    def run(self) -> Tensor:
        return recurrence(*self.tensors, self.lengths, **self.settings)

    def unroll(self) -> Tensor:
        return unrolled(*self.positional)

    def with_tensors(self, *tensors: Tensor) -> Case:
        """The same case on other tensors, given as `differentiable` gives them."""
        names = [name for name in ("projected", "initial", "weight", "threshold") if getattr(self, name) is not None]
        changes: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return replace(self, **changes)


def make_case(
    reset: str = "before",
    nonlinearity: str = "modrelu",
    *,
    reverse: bool = False,
    ragged: bool = False,
    steps: int = 7,
    batch: int = 3,
    size: int = 5,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Normal inputs, an orthogonal-sized weight, thresholds of both signs, lengths from 0 to T."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        value = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return value.to(dtype).requires_grad_()

    rows = size if reset == "none" else 3 * size
    return Case(
        normal(steps, batch, rows),
        normal(batch, size),
        normal(rows, size, scale=size**-0.5),
        normal(size, scale=0.3) if nonlinearity == "modrelu" else None,
        torch.randint(0, steps + 1, (batch,), generator=generator) if ragged else None,
        reset,
        nonlinearity,
        reverse,
    )
