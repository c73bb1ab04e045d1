"""The state that the kernels bring up to date, and its layout in the memory of a GPU."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

METHOD_NUMBERS = {"exact": 0, "neumann": 1, "hyperpower": 2}
"""As in matrices.cuh."""


class State(NamedTuple):
    """The buffers of a `ScaledCayley`, in the order of `follow_inverse`'s arguments."""

    anchor: Tensor
    inverse: Tensor
    matrix: Tensor
    signs: Tensor
    updates: Tensor
    refreshes: Tensor
    seal: Tensor

    @property
    def written(self) -> tuple[Tensor, ...]:
        """What following writes to: all but D, which backward passes have saved."""
        return (self.anchor, self.inverse, self.matrix, self.updates, self.refreshes, self.seal)

    def part(self, first: int, count: int) -> State:
        """Some matrices of the flattened batch, as views."""
        n = self.matrix.shape[-1]
        flat = (
            self.anchor.view(self.updates.numel(), -1),
            self.inverse.view(-1, n, n),
            self.matrix.view(-1, n, n),
            self.signs.view(-1, n),
            self.updates.view(-1),
            self.refreshes.view(-1),
            self.seal.view(-1),
        )
        return State(*(tensor[first : first + count] for tensor in flat))
