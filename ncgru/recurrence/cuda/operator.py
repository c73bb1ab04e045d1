"""The kernels as operators of torch: `ncgru::recurrence_cuda` and `ncgru::recurrence_cuda_backward`.

One call runs all directions of a layer. It keeps `hidden` and `gates` for the backward, but not the projected input, so
that a layer's memory is what a step needs and no more. The operators check nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from . import gpu, over_steps, passes
from .kind import Kind, kind_of
from .machine import Machine

_SETTINGS = "str reset, str nonlinearity, bool reverse"
_library: Any = torch.library.Library("ncgru", "FRAGMENT")
_library.define(
    "recurrence_cuda(Tensor projected, Tensor initial, Tensor weight, Tensor? threshold, Tensor? lengths, "
    f"{_SETTINGS}) -> (Tensor hidden, Tensor gates)"
)
_library.define(
    "recurrence_cuda_backward(Tensor grad_hidden, Tensor initial, Tensor weight, Tensor? threshold, Tensor? lengths, "
    f"Tensor hidden, Tensor gates, {_SETTINGS}) -> (Tensor d_projected, Tensor d_initial, Tensor d_weight, "
    "Tensor d_threshold)"
)


def allows_tf32() -> bool:
    """PyTorch's own switch for the products of float32 matrices, by its old or its new name."""
    switch = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return bool(torch.backends.cuda.matmul.allow_tf32 if switch is None else switch == "tf32")


def kind_now(dtype: torch.dtype, hidden_size: int, reset: str, nonlinearity: str) -> Kind:
    """What runs for a projected input of this dtype, as PyTorch's switches are now."""
    return kind_of(hidden_size, dtype, reset, nonlinearity, dtype == torch.float32 and allows_tf32())


def forward_on(
    machine: Machine,
    kind: Kind,
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Hidden and gates; weight is [D, G*H, H] and threshold [D, H]."""
    parameters = passes.Parameters.of_whole(kind, weight, threshold)
    made = passes.forward(machine, kind, projected, initial, parameters, lengths, reverse, wants_output=False)
    return made.hidden, made.gates


def backward_on(
    machine: Machine,
    kind: Kind,
    grad_hidden: Tensor,
    initial: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    hidden: Tensor,
    gates: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of projected (in its dtype), initial, weight and threshold (float32)."""
    parameters = passes.Parameters.of_whole(kind, weight, None)
    arguments = (grad_hidden, initial, parameters, lengths, hidden, gates, reverse)
    found = passes.backward(machine, kind, *arguments, wants_initial=True)
    assert found.initial is not None
    d_weight = torch.empty_like(weight, dtype=torch.float32, memory_format=torch.contiguous_format)
    over_steps.weight_gradients(machine, kind, found, initial, hidden, reverse, [[rows] for rows in d_weight])
    return found.projected, found.initial, d_weight, found.biases[..., -kind.hidden :].sum(0)


@torch.library.impl("ncgru::recurrence_cuda", "CUDA", lib=_library)
def _forward(
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    kind = kind_now(projected.dtype, initial.shape[-1], reset, nonlinearity)
    machine = gpu.machine_of(projected)
    return forward_on(machine, kind, projected, initial, weight, threshold, lengths, reverse)


@torch.library.register_fake("ncgru::recurrence_cuda", lib=_library)  # type: ignore[untyped-decorator]
def _forward_fake(
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    directions, batch, size = initial.shape
    hidden = projected.new_empty(projected.shape[0], batch, directions * size, dtype=torch.float32)
    return hidden, projected.new_empty(projected.shape)


@torch.library.impl("ncgru::recurrence_cuda_backward", "CUDA", lib=_library)
def _backward(
    grad_hidden: Tensor,
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
    kind = kind_now(gates.dtype, initial.shape[-1], reset, nonlinearity)
    machine = gpu.machine_of(gates)
    d_projected, d_initial, d_weight, d_threshold = backward_on(
        machine, kind, grad_hidden, initial, weight, lengths, hidden, gates, reverse
    )
    d_threshold = d_threshold.new_empty(0) if threshold is None else d_threshold.to(threshold.dtype)
    return d_projected, d_initial.to(initial.dtype), d_weight.to(weight.dtype), d_threshold


@torch.library.register_fake("ncgru::recurrence_cuda_backward", lib=_library)  # type: ignore[untyped-decorator]
def _backward_fake(
    grad_hidden: Tensor,
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
    made = [x.new_empty(x.shape) for x in (gates, initial, weight)]
    return made[0], made[1], made[2], d_threshold


class _Context(FunctionCtx):
    """What the setup functions leave for the backward."""

    saved_tensors: tuple[Tensor | None, ...]
    settings: tuple[str, str, bool]


def _setup(ctx: _Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, gates = output
    ctx.settings = inputs[5:]
    ctx.save_for_backward(*inputs[1:5], hidden, gates)
    ctx.mark_non_differentiable(gates)
    ctx.set_materialize_grads(False)


def _first_order(ctx: _Context, grad_hidden: Tensor | None, grad_gates: None) -> tuple[Tensor | None, ...]:
    if grad_hidden is None:
        return (None,) * 8
    saved = ctx.saved_tensors  # read once: each reading unpacks anew, which checkpointing forbids
    threshold = saved[2]
    d_projected, d_initial, d_weight, d_threshold = torch.ops.ncgru.recurrence_cuda_backward(
        grad_hidden, *saved, *ctx.settings
    )
    return d_projected, d_initial, d_weight, None if threshold is None else d_threshold, None, None, None, None


def refuse_second_order(ctx: FunctionCtx, *grads: Tensor | None) -> NoReturn:
    """The derivative of a backward by kernels."""
    raise RuntimeError(
        "the backward of the 'cuda' backend cannot be differentiated again; build the module (or call recurrence) with "
        "backend='reference' where second derivatives are needed"
    )


torch.library.register_autograd("ncgru::recurrence_cuda", _first_order, setup_context=_setup, lib=_library)
torch.library.register_autograd("ncgru::recurrence_cuda_backward", refuse_second_order, lib=_library)


def _run_under_autocast(projected: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """`projected` in autocast's dtype, all the rest as autocast found it."""
    projected = projected.to(torch.get_autocast_dtype("cuda"))
    with torch.autocast("cuda", enabled=False):
        return torch.ops.ncgru.recurrence_cuda(projected, *others)  # type: ignore[no-any-return]


def _run_backward_under_autocast(*inputs: Any) -> tuple[Tensor, ...]:
    with torch.autocast("cuda", enabled=False):
        return torch.ops.ncgru.recurrence_cuda_backward(*inputs)  # type: ignore[no-any-return]


_library.impl("recurrence_cuda", _run_under_autocast, "AutocastCUDA")
_library.impl("recurrence_cuda_backward", _run_backward_under_autocast, "AutocastCUDA")
