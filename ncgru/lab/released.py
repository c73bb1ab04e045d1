"""The update of the authors' released code, kept for comparison: it is not Algorithm 1.

A moves by the optimiser's step, but the Neumann series is taken in learning rate × gradient, which is another and with
Adam a far smaller number. So Ã hardly follows A between two exact inverses, and U = Ã (I-A) D leaves the orthogonal
matrices. With two matrices there is more:

- both A_r and A_c receive the gradient of U_r, each through its own Ã and U;
- the series for U_r starts from A_c's inverse, the one that has just been brought up to date.

The first update is exact, and after it every `reset_every`-th; nothing guards the series.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ncgru.nn import NCGRU
from ncgru.orthogonal import ScaledCayley, unpack
from ncgru.orthogonal.inverse import cayley_read, exact_inverse, neumann_series, no_autocast, orthogonal_from_inverse


class ReleasedCayley(ScaledCayley):
    """`ScaledCayley` with the released code's update, for one matrix (U_c) or two (U_r, U_c).

    It reads the last gradient of A, so that must still be there at the next forward: clear gradients between the
    forward and the backward pass, and save them with a checkpoint.

    Args:
        size: n.
        count: number of matrices, 1 or 2.
        negatives: number of -1's in each D.
        order: order of the series.
        reset_every: updates between exact inverses; None for none after the first.
        lr: learning rate of A.
        weight_decay: k of the penalty k/2 ‖U_r‖² in the objective of two matrices; none where U_r is orthogonal.
    """

    def __init__(
        self,
        size: int,
        count: int,
        *,
        negatives: tuple[int, ...],
        order: int,
        reset_every: int | None,
        lr: float,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(size, (count,), negatives=negatives, inverse="neumann", order=order, reset_every=reset_every)
        self.lr = lr
        self.weight_decay = weight_decay

    def forward(self, packed: Tensor) -> Tensor:
        """U [k, n, n] of the packed A's [k, m], after the update if they have moved."""
        self._check_packed(packed, self.anchor)
        with torch.no_grad(), no_autocast(packed.device):
            self._follow(packed, packed.grad)
        matrix, _ = cayley_read(packed, self.inverse, self.matrix, self.signs)
        if self.batch_shape == (2,) and matrix.requires_grad:
            matrix.register_hook(self._gradient_of_first)
        result: Tensor = matrix
        return result

    def _gradient_of_first(self, gradient: Tensor) -> Tensor:
        """The gradient of U_r for both."""
        return (gradient[:1] + self.weight_decay * self.matrix[:1]).expand_as(gradient)

    def _follow(self, packed: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            if not torch.equal(packed, self.anchor):
                raise RuntimeError(
                    "A has moved but its gradient is gone, and the released code's update needs it; "
                    "clear gradients after the forward pass, not before"
                )
            return
        changed = (packed != self.anchor).any()
        on_host = packed.device.type == "cpu"
        if on_host and not bool(changed):
            return
        self.updates += changed
        due = self.updates[0] == 1
        if self.reset_every is not None:
            due = (self.updates[0] - 1) % self.reset_every == 0
        skew = unpack(packed, self.size)
        step = unpack(self.lr * gradient, self.size)
        followed = neumann_series(self.inverse[-1:], step[-1:], self.order)
        if len(skew) == 2:
            first = neumann_series(followed, step[:1], self.order)
            followed = torch.cat((first, followed))
        if not on_host or bool(due):
            followed = torch.where(due, exact_inverse(skew), followed)
        matrix = orthogonal_from_inverse(followed, skew, self.signs, self.method)
        self.anchor.copy_(torch.where(changed, packed, self.anchor))
        self.inverse.copy_(torch.where(changed, followed, self.inverse))
        self.matrix.copy_(torch.where(changed, matrix, self.matrix))


def follow_as_released(cell: NCGRU, lr: float, *, weight_decay: float = 0.0) -> None:
    """Make a one-layer NC-GRU(U_c) or NC-GRU(U_r, U_c) follow its A as the released code does.

    Args:
        cell: changed in place; its A and D stay as they are.
        lr: learning rate of A.
        weight_decay: k of the penalty k/2 ‖U_r‖² in the objective; for two matrices.
    """
    if cell.orthogonal not in ("c", "rc") or cell.num_layers != 1 or cell.bidirectional:
        raise ValueError(
            f"cell must be an NCGRU of one layer and direction with orthogonal='c' or 'rc', got {cell}; "
            "there is no released code for others"
        )
    present = cell.cayley_l0
    assert isinstance(present, ScaledCayley)
    released = ReleasedCayley(
        present.size,
        len(cell.orthogonal),
        negatives=cell.negatives,
        order=present.order,
        reset_every=present.reset_every,
        lr=lr,
        weight_decay=weight_decay,
    )
    released.load_state_dict(present.state_dict())
    cell.cayley_l0 = released
