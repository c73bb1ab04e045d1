"""The gates of a recurrence once more, from its states: what a backward needs and a forward need not keep.

The states before all steps are known, so there is no loop over time: a product or two over T*B rows.
Shapes and equations are those of `reference.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import close_ended, ended_steps, nonlinear, previous_states, rounding


def gates_again(
    projected: Tensor,
    products: torch.dtype,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    hidden: Tensor,
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> Tensor:
    """What `reference.forward` returned as gates beside these `hidden`, but for rounding.

    The arguments are its own, and `products`, the dtype that operands are rounded to.
    """
    size, operand = hidden.shape[-1], rounding(products)
    gates = projected.to(hidden.dtype, copy=True)
    ended = ended_steps(lengths, gates)
    if ended is not None:
        close_ended(gates, ended, reset)
    before = previous_states(hidden, initial, slice(0, len(hidden)), reverse)
    rows_ru, rows_c = operand(weight.to(hidden.dtype)).split([len(weight) - size, size])
    ru, c = gates[..., :-size], gates[..., -size:]
    if reset != "none":
        ru.add_(operand(before) @ rows_ru.t()).sigmoid_()
    if reset == "before":
        c.add_(operand(ru[..., :size] * before) @ rows_c.t())
    else:
        product = operand(before) @ rows_c.t()
        c.add_(product if reset == "none" else ru[..., :size] * product)
    c.copy_(nonlinear(c, threshold, nonlinearity))
    return gates
