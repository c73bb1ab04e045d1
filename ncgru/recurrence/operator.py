"""The recurrence as operators of torch: `ncgru::recurrence` and `ncgru::recurrence_backward`.

Registered with fake implementations, autograd (of any order) and autocast, so that torch.compile(fullgraph=True) and
torch.export see one opaque operation. The operators check nothing: `ncgru.recurrence.recurrence` is the public entry.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from . import reference

_SETTINGS = "str reset, str nonlinearity, bool reverse"
_INPUTS = "Tensor projected, Tensor initial, Tensor weight, Tensor? threshold, Tensor? lengths"
_library: Any = torch.library.Library("ncgru", "FRAGMENT")
_library.define(f"recurrence({_INPUTS}, {_SETTINGS}) -> (Tensor hidden, Tensor gates)")
_library.define(
    f"recurrence_backward(Tensor grad_hidden, {_INPUTS}, Tensor hidden, Tensor gates, {_SETTINGS})"
    " -> (Tensor d_projected, Tensor d_initial, Tensor d_weight, Tensor d_threshold)"
)


@torch.library.impl("ncgru::recurrence", "default", lib=_library)
def _recurrence(
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    return reference.forward(projected, initial, weight, threshold, lengths, reset, nonlinearity, reverse)


@torch.library.register_fake("ncgru::recurrence", lib=_library)  # type: ignore[untyped-decorator]
def _recurrence_fake(
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    dtype = reference.state_dtype(projected)
    hidden = projected.new_empty(projected.shape[0], *initial.shape, dtype=dtype)
    return hidden, projected.new_empty(projected.shape, dtype=dtype)


@torch.library.impl("ncgru::recurrence_backward", "default", lib=_library)
def _recurrence_backward(
    grad_hidden: Tensor,
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    hidden: Tensor,
    gates: Tensor,
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_projected, d_initial, d_weight, d_threshold = reference.backward(
        grad_hidden, initial, weight, lengths, hidden, gates, projected.dtype, reset, nonlinearity, reverse
    )
    d_threshold = d_threshold.new_empty(0) if threshold is None else d_threshold.to(threshold.dtype)
    return d_projected, d_initial.to(initial.dtype), d_weight.to(weight.dtype), d_threshold


@torch.library.register_fake("ncgru::recurrence_backward", lib=_library)  # type: ignore[untyped-decorator]
def _recurrence_backward_fake(
    grad_hidden: Tensor,
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    hidden: Tensor,
    gates: Tensor,
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_threshold = hidden.new_empty(0) if threshold is None else threshold.new_empty(threshold.shape)
    made = [x.new_empty(x.shape) for x in (projected, initial, weight)]
    return made[0], made[1], made[2], d_threshold


class _Context(FunctionCtx):
    """What the setup functions leave for the backward."""

    saved_tensors: tuple[Tensor | None, ...]
    settings: tuple[str, str, bool]
    device_type: str


def _setup(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, gates = output
    ctx.settings = inputs[5:]
    ctx.save_for_backward(*inputs[:5], hidden, gates)
    ctx.mark_non_differentiable(gates)
    ctx.set_materialize_grads(False)


def _first_order(ctx: _Context, grad_hidden: Tensor | None, grad_gates: None) -> tuple[Tensor | None, ...]:
    if grad_hidden is None:
        return (None,) * 8
    saved = ctx.saved_tensors  # read once: each reading unpacks anew, which checkpointing forbids
    threshold = saved[3]
    d_projected, d_initial, d_weight, d_threshold = torch.ops.ncgru.recurrence_backward(
        grad_hidden, *saved, *ctx.settings
    )
    return d_projected, d_initial, d_weight, None if threshold is None else d_threshold, None, None, None, None


def _setup_backward(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.settings = inputs[8:]
    ctx.device_type = output[0].device.type
    ctx.save_for_backward(*inputs[:6])
    ctx.set_materialize_grads(False)


def _second_order(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Differentiate the backward by running the unrolled recurrence under autograd.

    `hidden` and `gates` are functions of the other inputs, which carry the whole gradient. The inputs are aliased, so
    that autograd stops at them even where one was computed from another; as the aliases hang on the inputs, orders
    above the second work too.
    """
    create_graph = torch.is_grad_enabled()
    *inputs, lengths = ctx.saved_tensors
    with torch.enable_grad(), torch.autocast(ctx.device_type, enabled=False):
        aliases = [None if x is None else x.view_as(x) for x in inputs]
        sources = {k: x for k, x in enumerate(aliases) if x is not None and x.requires_grad}
        arguments: list[Any] = [*aliases[1:], lengths, *ctx.settings]
        hidden = reference.unrolled(*arguments)
        values = {k: x for k, x in sources.items() if k > 0}
        first = torch.autograd.grad(
            hidden, tuple(values.values()), aliases[0], create_graph=True, materialize_grads=True
        )
        pairs = [
            (gradient, grads[k - 1])
            for k, gradient in zip(values, first, strict=True)
            if grads[k - 1] is not None and gradient.requires_grad
        ]
        if not pairs:
            return (None,) * 11
        second = torch.autograd.grad(
            [gradient for gradient, _ in pairs],
            tuple(sources.values()),
            [direction for _, direction in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    found = dict(zip(sources, second, strict=True))
    return (*(found.get(k) for k in range(5)), *[None] * 6)


torch.library.register_autograd("ncgru::recurrence", _first_order, setup_context=_setup, lib=_library)
torch.library.register_autograd(
    "ncgru::recurrence_backward", _second_order, setup_context=_setup_backward, lib=_library
)


def _register_autocast(device_type: str) -> None:
    """Under autocast: `projected` in autocast's dtype (float64 is left alone), all the rest as autocast found it."""

    def run(projected: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        if projected.dtype != torch.float64:
            projected = projected.to(torch.get_autocast_dtype(device_type))
        with torch.autocast(device_type, enabled=False):
            return torch.ops.ncgru.recurrence(projected, *others)  # type: ignore[no-any-return]

    def run_backward(*inputs: Any) -> tuple[Tensor, ...]:
        with torch.autocast(device_type, enabled=False):
            return torch.ops.ncgru.recurrence_backward(*inputs)  # type: ignore[no-any-return]

    key = f"Autocast{device_type.upper()}"
    _library.impl("recurrence", run, key)
    _library.impl("recurrence_backward", run_backward, key)


for _device_type in ("cpu", "cuda"):
    _register_autocast(_device_type)
