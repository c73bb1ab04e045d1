"""How the parameters of a layer make up what the recurrence takes: W_hh, the additive bias, modReLU's threshold.

Shapes: H hidden size, G gates, D directions, S structured matrices of a direction, F free ones. Lists have one tensor
for each direction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

Rows = list[Tensor]


class Wiring:
    """The make-up of a layer.

    Args:
        rows: the letters of the blocks of H rows of W_hh, in order.
        structured: those of them whose matrices are made (orthogonal, in fact); the others are trained as they are.
        hidden_size: H.
        nonlinearity: "modrelu", "tanh" or "relu".
        threshold_offset: what is added to modReLU's threshold.
    """

    def __init__(
        self, rows: str, structured: str, hidden_size: int, nonlinearity: str, threshold_offset: float
    ) -> None:
        self.gates = len(rows)
        self.structured = len(structured)
        self.hidden_size = hidden_size
        self.has_threshold = nonlinearity == "modrelu"
        self.threshold_offset = threshold_offset
        self.made = sum(1 << gate for gate, letter in enumerate(rows) if letter in structured)
        # Neighbouring blocks of one kind: whether they are structured, and their rows.
        runs = [(made, len(list(run))) for made, run in groupby(letter in structured for letter in rows)]
        self._order = [made for made, _ in runs]
        self._made_rows = [count * hidden_size for made, count in runs if made]
        self._free_rows = [count * hidden_size for made, count in runs if not made]

    def rows_of(self, matrices: Tensor | None, free: Sequence[Tensor], directions: int) -> list[Rows]:
        """Views of the structured matrices [D*S, H, H] and the free rows [F*H, H] in W_hh's order, a list a direction.

        In this order they make up W_hh; and the gradient of W_hh written to such views is that of each.
        """
        made: Iterator[Tensor] = iter(())
        if matrices is not None:
            made = iter(_split(matrices.reshape(-1, self.hidden_size), self._made_rows * directions))
        rows = []
        for direction in range(directions):
            own = iter(_split(free[direction], self._free_rows) if free else ())
            rows.append([next(made if is_made else own) for is_made in self._order])
        return rows

    def weight(self, matrices: Tensor | None, free: Sequence[Tensor], directions: int, dtype: torch.dtype) -> Tensor:
        """W_hh of all directions, [D*G*H, H]."""
        if free and matrices is not None and free[0].dtype != matrices.dtype:
            free = [rows.to(matrices.dtype) for rows in free]  # torch.cat refuses some pairs under autocast
        if free or matrices is None:
            whole = side_by_side([part for rows in self.rows_of(matrices, free, directions) for part in rows])
        else:
            whole = matrices.reshape(-1, self.hidden_size)
        return whole if whole.dtype == dtype else whole.to(dtype)

    def additive_bias(self, biases: Sequence[Tensor]) -> Tensor | None:
        """What is added to W x [D*G*H]; modReLU's threshold is not."""
        if not biases or (self.has_threshold and self.gates == 1):
            return None
        if not self.has_threshold:
            return side_by_side(biases)
        added = [bias.clone() for bias in biases]
        for bias in added:
            bias[-self.hidden_size :].zero_()
        return side_by_side(added)

    def threshold(self, biases: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor | None:
        """modReLU's thresholds [D*H]; None where the bias of c is additive, or absent and thus zero.

        Args:
            biases: [G*H], or none at all.
            like: a tensor for each direction, of the kind that a threshold without a bias should be.
        """
        if not self.has_threshold or not (biases or self.threshold_offset):
            return None
        if not biases:
            return like[0].new_full((len(like) * self.hidden_size,), self.threshold_offset)
        found = side_by_side([bias[-self.hidden_size :] for bias in biases])
        return found + self.threshold_offset if self.threshold_offset else found

    def room_for_gradients(self, directions: int, like: Tensor) -> tuple[Tensor | None, list[Tensor]]:
        """Memory for the gradients of the structured matrices and of the free rows, in float32 as `like`."""
        size, free = self.hidden_size, self.gates - self.structured
        matrices = like.new_empty(directions * self.structured, size, size) if self.structured else None
        return matrices, [like.new_empty(free * size, size) for _ in range(directions)] if free else []

    def bias_gradients(self, d_projected: Tensor, d_threshold: Tensor) -> Sequence[Tensor]:
        """Those of the biases, from dL/dz [T*B, D*G*H] and modReLU's of each row of the batch [B, D, H]."""
        directions = d_threshold.shape[1]
        if not self.has_threshold:
            return d_projected.sum(0, dtype=torch.float32).chunk(directions)
        if self.gates == 1:
            return d_threshold.sum(0).unbind()
        found = d_projected.sum(0, dtype=torch.float32).view(directions, -1)
        torch.sum(d_threshold, 0, out=found[:, -self.hidden_size :])
        return found.unbind()


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of several; the only one where there is but one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _split(rows: Tensor, counts: list[int]) -> Sequence[Tensor]:
    return (rows,) if len(counts) == 1 else rows.split(counts)
