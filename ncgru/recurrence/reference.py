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

The factors K depend on the saved states and gates only, so they are made for all T at once; phi' is read off c itself
(modReLU: c != 0; tanh: 1 - c^2; relu: c > 0). What is left in the loop is

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
    operand = _rounding(projected.dtype)
    gates = projected.to(state, memory_format=torch.contiguous_format, copy=True)
    ended = _ended(lengths, gates)
    if ended is not None:
        _close_ended(gates, ended, reset)
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
    weight_ru, weight_c = weight[: 2 * size].t(), weight[2 * size :].t()
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
    weight_ru, weight_c = weight[: 2 * size].t(), weight[2 * size :].t()
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
    weight_c = weight.t()
    if ended is None:
        for (c,) in _steps(reverse, gates):
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

    Returns:
        The gradients of projected (in its dtype), initial, weight and threshold (all in the dtype of the state).
    """
    operand = _rounding(operand_dtype)
    weight = operand(weight.to(hidden.dtype))
    error = torch.empty(hidden.shape[0] + 1, *hidden.shape[1:], dtype=hidden.dtype, device=hidden.device)
    arriving, d_initial = (error[:-1], error[-1]) if reverse else (error[1:], error[0])
    arriving.copy_(grad_hidden)
    d_initial.zero_()
    previous = torch.empty_like(hidden)
    (previous[-1] if reverse else previous[0]).copy_(initial)
    (previous[:-1].copy_(hidden[1:]) if reverse else previous[1:].copy_(hidden[:-1]))
    if reset == "none":
        dz, d_weight = _backward_ungated(error, previous, weight, lengths, gates, nonlinearity, operand, reverse)
    elif reset == "after":
        dz, d_weight = _backward_after(error, previous, weight, gates, nonlinearity, operand, reverse)
    else:
        dz, d_weight = _backward_before(error, previous, weight, gates, nonlinearity, operand, reverse)
    size = hidden.shape[2]
    d_threshold = hidden.new_empty(0)
    if nonlinearity == "modrelu":
        d_threshold = (dz[..., -size:] * gates[..., -size:].sign()).sum((0, 1))
    return dz.to(operand_dtype), d_initial.clone(), d_weight, d_threshold


def _backward_before(
    error: Tensor,
    previous: Tensor,
    weight: Tensor,
    gates: Tensor,
    nonlinearity: str,
    operand: Callable[[Tensor], Tensor],
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    size = previous.shape[2]
    weight_ru, weight_c = weight[: 2 * size], weight[2 * size :]
    r, u, c = gates.chunk(3, -1)
    dz = torch.empty_like(gates)  # the factors K, turned into dL/dz step by step
    k_r, k_u, k_c = dz.chunk(3, -1)
    gated = r * previous
    torch.addcmul(gated, gated, r, value=-1, out=k_r)
    torch.mul(torch.ops.aten.sigmoid_backward(c - previous, u), 1, out=k_u)
    torch.mul(u, _slope(c, nonlinearity), out=k_c)
    kept = 1 - u
    pairs = dz[..., size:].unflatten(-1, (2, size))
    arriving, leaving = (error[:-1], error[1:]) if reverse else (error[1:], error[:-1])
    d_gated = torch.empty_like(previous[0])
    views = (arriving, arriving.unsqueeze(2), leaving, pairs, dz[..., : 2 * size], k_r, k_c, kept, r)
    for e, e_pair, e_before, d_uc, d_ru, d_r, d_c, keep, open_ in _steps(not reverse, *views):
        d_uc.mul_(e_pair)
        torch.mm(operand(d_c), weight_c, out=d_gated)
        d_r.mul_(d_gated)
        e_before.addcmul_(e, keep).addcmul_(d_gated, open_).addmm_(operand(d_ru), weight_ru)
    flat = operand(dz).flatten(0, 1).t()
    d_weight = torch.empty_like(weight)
    torch.mm(flat[: 2 * size], operand(previous).flatten(0, 1), out=d_weight[: 2 * size])
    torch.mm(flat[2 * size :], operand(gated).flatten(0, 1), out=d_weight[2 * size :])
    return dz, d_weight


def _backward_after(
    error: Tensor,
    previous: Tensor,
    weight: Tensor,
    gates: Tensor,
    nonlinearity: str,
    operand: Callable[[Tensor], Tensor],
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    size = previous.shape[2]
    r, u, c = gates.chunk(3, -1)
    rows = operand(previous).flatten(0, 1)
    product = torch.mm(rows, weight[2 * size :].t()).view_as(previous)
    slope = u * _slope(c, nonlinearity)
    ds = torch.empty_like(gates)  # factors, then gradients, of W_r h, W_u h and W_c h
    s_r, s_u, s_c = ds.chunk(3, -1)
    torch.mul(slope, r, out=s_c)
    torch.mul(torch.ops.aten.sigmoid_backward(slope * product, r), 1, out=s_r)
    torch.mul(torch.ops.aten.sigmoid_backward(c - previous, u), 1, out=s_u)
    kept = 1 - u
    arriving, leaving = (error[:-1], error[1:]) if reverse else (error[1:], error[:-1])
    views = (arriving, arriving.unsqueeze(2), leaving, ds, ds.unflatten(-1, (3, size)), kept)
    for e, e_triple, e_before, d_all, d_triple, keep in _steps(not reverse, *views):
        d_triple.mul_(e_triple)
        e_before.addcmul_(e, keep).addmm_(operand(d_all), weight)
    d_weight = torch.mm(operand(ds).flatten(0, 1).t(), rows)
    torch.mul(arriving, slope, out=s_c)
    return ds, d_weight


def _backward_ungated(
    error: Tensor,
    previous: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    gates: Tensor,
    nonlinearity: str,
    operand: Callable[[Tensor], Tensor],
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    dz = _slope(gates, nonlinearity)
    ended = _ended(lengths, gates)
    arriving, leaving = (error[:-1], error[1:]) if reverse else (error[1:], error[:-1])
    if ended is None:
        for e, e_before, d in _steps(not reverse, arriving, leaving, dz):
            e_before.addmm_(operand(d.mul_(e)), weight)
    else:
        dz.masked_fill_(ended, 0)
        for e, e_before, d, held in _steps(not reverse, arriving, leaving, dz, ended.to(dz.dtype)):
            e_before.addcmul_(e, held).addmm_(operand(d.mul_(e)), weight)
    return dz, torch.mm(operand(dz).flatten(0, 1).t(), operand(previous).flatten(0, 1))


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
    operand = _rounding(projected.dtype)
    ended = _ended(lengths, projected)
    projected = projected.to(state)
    if ended is not None:
        projected = projected.masked_fill(ended, 0)
    h = initial.to(state)
    weight = operand(weight.to(state)).t()
    size = initial.shape[1]
    states = []
    for t in reversed(range(len(projected))) if reverse else range(len(projected)):
        p = projected[t]
        if reset == "none":
            candidate = nonlinear(p + operand(h) @ weight, threshold, nonlinearity)
            following = candidate
        else:
            r, u = torch.sigmoid(p[:, : 2 * size] + operand(h) @ weight[:, : 2 * size]).chunk(2, 1)
            weight_c = weight[:, 2 * size :]
            recurrent = operand(r * h) @ weight_c if reset == "before" else r * (operand(h) @ weight_c)
            candidate = nonlinear(p[:, 2 * size :] + recurrent, threshold, nonlinearity)
            following = (1 - u) * h + u * candidate
        h = following if ended is None else torch.where(ended[t], h, following)
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


def _slope(c: Tensor, nonlinearity: str) -> Tensor:
    """phi'(z), from c = phi(z)."""
    if nonlinearity == "tanh":
        return torch.addcmul(torch.ones_like(c), c, c, value=-1)
    return (c != 0 if nonlinearity == "modrelu" else c > 0).to(c.dtype)


def _steps(reverse: bool, *sequences: Tensor) -> zip[tuple[Tensor, ...]]:
    """The time steps of several sequences side by side, the last one first if `reverse`."""
    views = (sequence.unbind(0) for sequence in sequences)
    return zip(*((view[::-1] for view in views) if reverse else views), strict=True)


def _ended(lengths: Tensor | None, like: Tensor) -> Tensor | None:
    """True where a row's sequence is over: [T, B, 1]."""
    if lengths is None:
        return None
    return (torch.arange(like.shape[0], device=like.device)[:, None] >= lengths).unsqueeze(2)


def _close_ended(gates: Tensor, ended: Tensor, reset: str) -> None:
    """Make u = sigmoid(-inf) = 0 where a sequence is over, whatever the padding holds (even NaN)."""
    gates.masked_fill_(ended, 0)
    if reset != "none":
        gates.chunk(3, -1)[1].masked_fill_(ended, -torch.inf)


def state_dtype(projected: Tensor) -> torch.dtype:
    return torch.float64 if projected.dtype == torch.float64 else torch.float32


def _rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What happens to an operand of a product: nothing, or rounding to `dtype` where it has 16 bits."""
    if dtype in (torch.float32, torch.float64):
        return lambda x: x
    return lambda x: x.to(dtype).to(torch.float32)
