r"""The recurrence in plain torch: what every backend computes, and the backward written by hand.

This file is the specification. T time, B batch, H hidden size; G = 3 rows of gates (r, u, c) or G = 1 (c alone).
`p` is the projected input (W x plus every additive bias), s the logistic function, phi the nonlinearity:

    reset="before"   r = s(p_r + W_r h)   u = s(p_u + W_u h)   c = phi(p_c + W_c (r*h))     h' = (1-u)*h + u*c
    reset="after"    r, u as above                             c = phi(p_c + r*(W_c h))     h' = (1-u)*h + u*c
    reset="none"                                               c = phi(p_c + W_c h)         h' = c

A row whose sequence is over holds its state: u = 0 there (for "none", h' = h). With `reverse` time runs from T-1 to 0.

**Backward.** Let e = dL/dh' be the whole gradient that arrives at a step's state: the caller's gradient plus what came
back from the following step. From h' = (1-u)*h + u*c,

    dL/dz_c = e * u * phi'(z_c)             =: e * K_c
    dL/dz_u = e * (c-h) * u*(1-u)           =: e * K_u
    before:  q = r*h,  dL/dq = W_c^T dL/dz_c,   dL/dz_r = dL/dq * h * r*(1-r) =: dL/dq * K_r
    after:   m = W_c h,  dL/dm = dL/dz_c * r,   dL/dz_r = dL/dz_c * m * r*(1-r)

The factors K depend on the saved states and gates only, so they are made for many steps at once; phi' is read off c
itself (modReLU: c != 0; tanh: 1 - c^2; relu: c > 0). What is left in the loop is

    before:  e_{t-1} += e*(1-u) + dL/dq*r + W_ru^T dL/dz_ru
    after:   e_{t-1} += e*(1-u) + W^T (dL/dz_r, dL/dz_u, dL/dm)
    none:    e_{t-1} += W^T dL/dz_c

and the weights' gradients are single products over T*B: dL/dz^T h for r and u, dL/dz_c^T (r*h) or dL/dm^T h for c.
The threshold's is the sum of dL/dz_c * sign(c), as |z| + b grows with b on both sides of zero.

**16 bits.** Where `projected` is float16 or bfloat16, the operands of every product (h, r*h, W; backward the dL/dz) are
rounded to it, while sums, gates and state stay float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

RESETS = ("before", "after", "none")
NONLINEARITIES = ("modrelu", "tanh", "relu")


def forward(
    projected: Tensor,  # [T, B, G*H]
    initial: Tensor,  # [B, H]
    weight: Tensor,  # [G*H, H]
    threshold: Tensor | None,  # [H]
    lengths: Tensor | None,  # [B]
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence.

    Returns:
        hidden [T, B, H], and gates [T, B, G*H]: the activated r, u, c that the backward needs.
    """
    state = state_dtype(projected)
    operand = rounding(projected.dtype)
    gates = projected.to(state, memory_format=torch.contiguous_format, copy=True)
    ended = ended_steps(lengths, gates)
    if ended is not None:
        close_ended(gates, ended, reset)
    hidden = gates.new_empty(*gates.shape[:2], initial.shape[1])
    previous = initial.to(state)
    weight = operand(weight.to(state))
    activate_ = _activation(nonlinearity, None if threshold is None else threshold.to(state), previous)
    if reset == "none":
        _forward_ungated(gates, hidden, previous, weight, ended, activate_, operand, reverse)
    elif reset == "after":
        _forward_after(gates, hidden, previous, weight, activate_, operand, reverse)
    else:
        _forward_before(gates, hidden, previous, weight, activate_, operand, reverse)
    return hidden, gates


def _forward_before(
    gates: Tensor,
    hidden: Tensor,
    previous: Tensor,
    weight: Tensor,
    activate_: Callable[[Tensor], None],
    operand: Callable[[Tensor], Tensor],
    reverse: bool,
) -> None:
    size = hidden.shape[2]
    weight_ru, weight_c = (_upright(part, len(hidden)) for part in (weight[: 2 * size], weight[2 * size :]))
    gates_ru = gates[..., : 2 * size]
    gated = torch.empty_like(previous)
    for ru, r, u, c, following in _steps(reverse, gates_ru, *gates.chunk(3, -1), hidden):
        ru.addmm_(operand(previous), weight_ru).sigmoid_()
        torch.mul(r, previous, out=gated)
        activate_(c.addmm_(operand(gated), weight_c))
        torch.lerp(previous, c, u, out=following)
        previous = following


def _forward_after(
    gates: Tensor,
    hidden: Tensor,
    previous: Tensor,
    weight: Tensor,
    activate_: Callable[[Tensor], None],
    operand: Callable[[Tensor], Tensor],
    reverse: bool,
) -> None:
    size = hidden.shape[2]
    weight_ru, weight_c = (_upright(part, len(hidden)) for part in (weight[: 2 * size], weight[2 * size :]))
    gates_ru = gates[..., : 2 * size]
    product = torch.empty_like(previous)
    for ru, r, u, c, following in _steps(reverse, gates_ru, *gates.chunk(3, -1), hidden):
        rounded = operand(previous)
        ru.addmm_(rounded, weight_ru).sigmoid_()
        torch.mm(rounded, weight_c, out=product)
        activate_(c.addcmul_(r, product))
        torch.lerp(previous, c, u, out=following)
        previous = following


def _forward_ungated(
    gates: Tensor,
    hidden: Tensor,
    previous: Tensor,
    weight: Tensor,
    ended: Tensor | None,
    activate_: Callable[[Tensor], None],
    operand: Callable[[Tensor], Tensor],
    reverse: bool,
) -> None:
    weight_c = _upright(weight, len(hidden))
    if ended is None:
        for c in _in_order(gates, reverse):
            activate_(c.addmm_(operand(previous), weight_c))
            previous = c
        hidden.copy_(gates)
        return
    for over, c, following in _steps(reverse, ended, gates, hidden):
        activate_(c.addmm_(operand(previous), weight_c))
        torch.where(over, previous, c, out=following)
        previous = following


def backward(
    grad_hidden: Tensor,  # [T, B, H]
    initial: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    hidden: Tensor,
    gates: Tensor,
    operand_dtype: torch.dtype,
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the recurrence for the gradient of its states; `operand_dtype` is `projected`'s.

    Time passes in blocks: what is hoisted out of the loop is hoisted over a block, whose temporaries then stay in the
    processor's cache (over all T at once it took 1.3 to 1.5 times as long) and in the same room, as fresh memory is
    slow to touch.

    Returns:
        The gradients of projected (in its dtype), initial, weight and threshold (all in the dtype of the state).
    """
    size = hidden.shape[2]
    operand = rounding(operand_dtype)
    weight = operand(weight.to(hidden.dtype))
    ended = ended_steps(lengths, gates)
    differentiate = {"before": _backward_before, "after": _backward_after, "none": _backward_ungated}[reset]
    d_projected = torch.empty_like(gates, dtype=operand_dtype)
    d_initial = torch.zeros_like(hidden[0])
    d_weight = torch.zeros_like(weight)
    d_threshold = hidden.new_zeros(size)
    blocks = _blocks(hidden, reverse=not reverse)
    longest = max(times.stop - times.start for times in blocks)
    room = hidden.new_empty(4, longest, *hidden.shape[1:])
    for times in blocks:
        c = gates[times, :, -size:]
        errors, slope, kept, product = room[:, : times.stop - times.start]
        block = _Block(
            errors=errors.copy_(grad_hidden[times]),
            leaving=d_initial,
            previous=previous_states(hidden, initial, times, reverse),
            gates=gates[times],
            slope=_slope(c, nonlinearity, out=slope),
            kept=kept,
            product=product,
            ended=None if ended is None else ended[times],
            dz=d_projected[times] if d_projected.dtype == gates.dtype else torch.empty_like(gates[times]),
        )
        differentiate(block, weight, d_weight, operand, not reverse)
        dz = block.dz
        if dz.dtype != operand_dtype:
            d_projected[times].copy_(dz)
        if nonlinearity == "modrelu":
            d_threshold += torch.sign(c, out=slope).mul_(dz[..., -size:]).sum((0, 1))
    return d_projected, d_initial, d_weight, d_threshold


class _Block(NamedTuple):
    """Consecutive steps on the way back; S of them."""

    errors: Tensor  # [S, B, H] the caller's gradient of the states, to become the whole gradient
    leaving: Tensor  # [B, H] what the steps after the block send back; to become what this block sends back
    previous: Tensor  # [S, B, H] the states before the steps
    gates: Tensor  # [S, B, G*H]
    slope: Tensor  # [S, B, H] phi'
    kept: Tensor  # [S, B, H] room for 1-u
    product: Tensor  # [S, B, H] room for r*h or W_c h
    ended: Tensor | None  # [S, B, 1]
    dz: Tensor  # [S, B, G*H] to be filled: the gradient of projected

    def chain(self, backwards: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Each step's whole gradient e, and where it adds what it sends back."""
        errors = _in_order(self.errors, backwards)
        errors[0].add_(self.leaving)
        self.leaving.zero_()
        return errors, (*errors[1:], self.leaving)


def _backward_before(
    block: _Block, weight: Tensor, d_weight: Tensor, operand: Callable[[Tensor], Tensor], backwards: bool
) -> None:
    size = weight.shape[1]
    weight_ru, weight_c = weight[: 2 * size], weight[2 * size :]
    r, u, c = block.gates.chunk(3, -1)
    kept = torch.sub(1, u, out=block.kept)
    gated = torch.mul(r, block.previous, out=block.product)
    dz = block.dz  # the factors K at first, which the loop turns into dL/dz
    dz_ru, dz_uc, (dz_r, dz_u, dz_c) = dz[..., : 2 * size], _side_by_side(dz)[:, 1:], dz.chunk(3, -1)
    torch.addcmul(gated, gated, r, value=-1, out=dz_r)
    torch.sub(c, block.previous, out=dz_u).mul_(u).mul_(kept)
    torch.mul(u, block.slope, out=dz_c)
    d_gated = torch.empty_like(block.leaving)
    views = (_in_order(x, backwards) for x in (dz_uc, dz_c, dz_r, dz_ru, kept, r))
    for e, e_before, d_uc, d_c, d_r, d_ru, keep, open_ in zip(*block.chain(backwards), *views, strict=True):
        d_uc.mul_(e)
        torch.mm(operand(d_c), weight_c, out=d_gated)
        d_r.mul_(d_gated)
        e_before.addcmul_(e, keep).addcmul_(d_gated, open_).addmm_(operand(d_ru), weight_ru)
    rows = operand(dz).flatten(0, 1).t()
    d_weight[: 2 * size].addmm_(rows[: 2 * size], operand(block.previous).flatten(0, 1))
    d_weight[2 * size :].addmm_(rows[2 * size :], operand(gated).flatten(0, 1))


def _backward_after(
    block: _Block, weight: Tensor, d_weight: Tensor, operand: Callable[[Tensor], Tensor], backwards: bool
) -> None:
    size = weight.shape[1]
    r, u, c = block.gates.chunk(3, -1)
    kept = torch.sub(1, u, out=block.kept)
    rows = operand(block.previous).flatten(0, 1)
    product = block.product
    torch.mm(rows, weight[2 * size :].t(), out=product.flatten(0, 1))
    factor = block.slope.mul_(u)
    ds = block.dz  # factors, then gradients, of W_r h, W_u h and W_c h
    ds_r, ds_u, ds_c = ds.chunk(3, -1)
    torch.mul(factor, r, out=ds_c)
    torch.addcmul(product.mul_(ds_c), product, r, value=-1, out=ds_r)
    torch.sub(c, block.previous, out=ds_u).mul_(u).mul_(kept)
    views = (_in_order(x, backwards) for x in (ds, _side_by_side(ds), kept))
    for e, e_before, d_all, d_each, keep in zip(*block.chain(backwards), *views, strict=True):
        d_each.mul_(e)
        e_before.addcmul_(e, keep).addmm_(operand(d_all), weight)
    d_weight.addmm_(operand(ds).flatten(0, 1).t(), rows)
    torch.mul(factor, block.errors, out=ds_c)  # p_c is not behind r: its gradient lacks that factor


def _backward_ungated(
    block: _Block, weight: Tensor, d_weight: Tensor, operand: Callable[[Tensor], Tensor], backwards: bool
) -> None:
    dz = block.dz.copy_(block.slope)
    if block.ended is None:
        for e, e_before, d in zip(*block.chain(backwards), _in_order(dz, backwards), strict=True):
            e_before.addmm_(operand(d.mul_(e)), weight)
    else:
        dz.masked_fill_(block.ended, 0)
        views = (_in_order(x, backwards) for x in (dz, block.ended.to(dz.dtype)))
        for e, e_before, d, held in zip(*block.chain(backwards), *views, strict=True):
            e_before.addcmul_(e, held).addmm_(operand(d.mul_(e)), weight)
    d_weight.addmm_(operand(dz).flatten(0, 1).t(), operand(block.previous).flatten(0, 1))


def unrolled(
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> Tensor:
    """The same states by differentiable torch operations, step by step: for autograd of any order, and as a check."""
    state = state_dtype(projected)
    operand = rounding(projected.dtype)
    ended = ended_steps(lengths, projected)
    projected = projected.to(state)
    if ended is not None:
        projected = projected.masked_fill(ended, 0)
    h = initial.to(state)
    weight = operand(weight.to(state)).t()
    size = initial.shape[1]
    states = []
    over = None if ended is None else _in_order(ended, reverse)
    for t, p in enumerate(_in_order(projected, reverse)):
        if reset == "none":
            candidate = nonlinear(p + operand(h) @ weight, threshold, nonlinearity)
            following = candidate
        else:
            r, u = torch.sigmoid(p[:, : 2 * size] + operand(h) @ weight[:, : 2 * size]).chunk(2, 1)
            weight_c = weight[:, 2 * size :]
            recurrent = operand(r * h) @ weight_c if reset == "before" else r * (operand(h) @ weight_c)
            candidate = nonlinear(p[:, 2 * size :] + recurrent, threshold, nonlinearity)
            following = (1 - u) * h + u * candidate
        h = following if over is None else torch.where(over[t], h, following)
        states.append(h)
    return torch.stack(states[::-1] if reverse else states)


def nonlinear(z: Tensor, threshold: Tensor | None, nonlinearity: str) -> Tensor:
    """phi(z): tanh, relu, or modReLU sign(z) * max(|z| + threshold, 0), where sign(0) = 0 and no threshold means 0."""
    if nonlinearity == "tanh":
        return torch.tanh(z)
    if nonlinearity == "relu":
        return torch.relu(z)
    size = z.abs() if threshold is None else z.abs() + threshold.to(z.dtype)
    return z.sign() * torch.relu(size)


def _upright(weight: Tensor, steps: int) -> Tensor:
    """The transpose, copied where that pays: a CPU takes 0.7 to 0.95 of the time for each product then."""
    return weight.t().contiguous() if steps >= 16 else weight.t()


def _activation(nonlinearity: str, threshold: Tensor | None, like: Tensor) -> Callable[[Tensor], None]:
    """phi in place, for states shaped as `like`."""
    if nonlinearity == "tanh":
        return Tensor.tanh_  # type: ignore[return-value]
    if nonlinearity == "relu":
        return Tensor.relu_  # type: ignore[return-value]
    sign, size = torch.empty_like(like), torch.empty_like(like)
    bias = like.new_zeros(like.shape[1]) if threshold is None else threshold

    def modrelu_(z: Tensor) -> None:
        torch.sign(z, out=sign)
        torch.addcmul(bias, z, sign, out=size)
        torch.mul(size.relu_(), sign, out=z)

    return modrelu_


def _slope(c: Tensor, nonlinearity: str, out: Tensor) -> Tensor:
    """phi'(z), from c = phi(z)."""
    if nonlinearity == "tanh":
        return torch.mul(c, c, out=out).neg_().add_(1)
    return torch.sign(c, out=out).abs_()  # relu's c is never negative; on a CPU 8 times as fast as a comparison


def _in_order(sequence: Tensor, backwards: bool) -> tuple[Tensor, ...]:
    """The time steps of a sequence, the last one first if `backwards`."""
    steps = sequence.unbind(0)
    return steps[::-1] if backwards else steps


def _steps(backwards: bool, *sequences: Tensor) -> zip[tuple[Tensor, ...]]:
    """The time steps of several sequences side by side."""
    return zip(*(_in_order(sequence, backwards) for sequence in sequences), strict=True)


def _side_by_side(gates: Tensor) -> Tensor:
    """View [S, B, 3*H] as [S, 3, B, H], so that one [B, H] multiplies all the gates of a step."""
    return gates.view(*gates.shape[:2], 3, gates.shape[2] // 3).transpose(1, 2)


def _blocks(hidden: Tensor, reverse: bool) -> list[slice]:
    """Stretches of time whose states fill about a quarter of a megabyte (in float32), but of 8 steps at least."""
    steps, batch, size = hidden.shape
    span = max(8, 2**16 // max(1, batch * size))
    blocks = [slice(start, min(start + span, steps)) for start in range(0, steps, span)]
    return blocks[::-1] if reverse else blocks


def previous_states(hidden: Tensor, initial: Tensor, times: slice, reverse: bool) -> Tensor:
    """The states before the steps at `times`."""
    first = initial.to(hidden.dtype).unsqueeze(0)
    if reverse:
        following = hidden[times.start + 1 : times.stop + 1]
        return following if times.stop < len(hidden) else torch.cat([following, first])
    return hidden[times.start - 1 : times.stop - 1] if times.start else torch.cat([first, hidden[: times.stop - 1]])


def ended_steps(lengths: Tensor | None, like: Tensor) -> Tensor | None:
    """True where a row's sequence is over: [T, B, 1]."""
    if lengths is None:
        return None
    return (torch.arange(like.shape[0], device=like.device)[:, None] >= lengths).unsqueeze(2)


def close_ended(gates: Tensor, ended: Tensor, reset: str) -> None:
    """Make u = sigmoid(-inf) = 0 where a sequence is over, whatever the padding holds (even NaN)."""
    gates.masked_fill_(ended, 0)
    if reset != "none":
        gates.chunk(3, -1)[1].masked_fill_(ended, -torch.inf)


def state_dtype(projected: Tensor) -> torch.dtype:
    return torch.float64 if projected.dtype == torch.float64 else torch.float32


def rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What happens to an operand of a product: nothing, or rounding to `dtype` where it has 16 bits."""
    if dtype in (torch.float32, torch.float64):
        return lambda x: x
    return lambda x: x.to(dtype).to(torch.float32)
