"""A layer as one step of autograd: orthogonal update, projection and recurrence forward, and by hand all gradients.

It is the same work as the operators of `ncgru.recurrence` do between operations of torch, with fewer calls for the host
to issue. It is for tensors that simply hold numbers (`simply_computes`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ncgru.nn.wiring import Wiring, side_by_side
from ncgru.orthogonal.reading import Reading, follow, gradient_in_packed
from ncgru.recurrence.again import gates_again
from ncgru.recurrence.cuda import gpu, operator, over_steps, passes
from ncgru.recurrence.cuda.kind import Kind

Gradients = tuple[Tensor | None, ...]

_BATCHED = [torch._C._parse_dispatch_key(name) for name in ("Batched", "FuncTorchBatched")]


class Weights(NamedTuple):
    """The parameters of a layer. Lists have a tensor for each direction, or none at all.

    Attributes:
        matrices: the structured recurrent matrices of all directions [D*S, H, H], if there are any; the packed A's
            [D*S, H(H-1)/2], where a `Reading` makes them.
        free: the rows of the others [F*H, H].
        inputs: the input weights [G*H, I].
        biases: [G*H].
    """

    matrices: Tensor | None
    free: list[Tensor]
    inputs: list[Tensor]
    biases: list[Tensor]


# No properties of `Weights`: torch.compile of PyTorch 2.6 does not know those of a NamedTuple.
def tensors_of(weights: Weights) -> tuple[Tensor | None, ...]:
    """All of them, in their order."""
    return weights.matrices, *weights.free, *weights.inputs, *weights.biases


def run_layer(
    wiring: Wiring,
    kind: Kind,
    input: Tensor,
    initial: Tensor | None,
    weights: Weights,
    reading: Reading | None,
    lengths: Tensor | None,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """One layer, all directions: [T, B, I] -> [T, B, D*H] and the final states [D, B, H].

    Under autocast `kind` says the dtype that the projection is taken in. With `recompute` no gates are kept. A
    `reading` makes the structured matrices from the packed A's in their place.
    """
    plan = _Plan(wiring, kind, reading, len(weights.free), len(weights.inputs), recompute)
    made: tuple[Tensor, Tensor] = _Layer.apply(plan, lengths, input, initial, *tensors_of(weights))  # type: ignore[no-untyped-call]
    return made


class _Plan(NamedTuple):
    """What a layer has to know beside tensors.

    Attributes:
        wiring, kind, reading, recompute: as given to `run_layer`.
        free: how many tensors of free rows there are.
        directions: how many directions.
    """

    wiring: Wiring
    kind: Kind
    reading: Reading | None
    free: int
    directions: int
    recompute: bool


def project(wiring: Wiring, input: Tensor, inputs: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """W x and all additive biases, for every step and direction at once: [T, B, I] -> [T, B, D*G*H]."""
    return F.linear(input, side_by_side(inputs), wiring.additive_bias(biases))


def final_states(output: Tensor, directions: int) -> Tensor:
    """The states [D, B, H] after the last step of each direction; a copy, as people write to states."""
    if directions == 1:
        return output[-1:].clone()
    size = output.shape[-1] // directions
    return torch.stack([output[-1, :, :size], output[0, :, size:]])


def _without_autocast(function: Any) -> Any:
    """`function` with autocast off; it says itself which dtypes it wants."""

    @functools.wraps(function)
    def run(ctx: Any, *args: Any) -> Any:
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
                return function(ctx, *args)
        return function(ctx, *args)

    return run


class _Layer(torch.autograd.Function):
    @staticmethod
    @_without_autocast
    def forward(
        ctx: Any,
        plan: _Plan,
        lengths: Tensor | None,
        input: Tensor,
        initial: Tensor | None,
        matrices: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        wiring, kind, reading, *counts, recompute = plan
        free, inputs, biases = _grouped(parameters, counts)
        inverse = signs = None
        if reading is not None:
            matrices, inverse = follow(reading)
            signs = reading.state.signs
        dtype = getattr(torch, kind.storage)
        if inputs[0].dtype != dtype or input.dtype != dtype:
            input, inputs = input.to(dtype), [x.to(dtype) for x in inputs]
        machine = gpu.machine_of(input)
        projected = over_steps.project(machine, kind, input, side_by_side(inputs))
        learnt = _learnt(wiring, kind, matrices, free, biases)
        made = passes.forward(machine, kind, projected, initial, learnt, lengths, False, wants_output=True)
        ctx.settings = _Settings(wiring, kind, len(free), len(biases), ctx.needs_input_grad[2:])
        ctx.set_materialize_grads(False)
        kept, again = (None, biases) if recompute else (made.gates, ())
        assert made.last is not None
        states = made.hidden, None if made.output is made.hidden else made.output
        ctx.save_for_backward(lengths, input, initial, *states, kept, matrices, inverse, signs, *free, *inputs, *again)
        return made.output, made.last

    @staticmethod
    @_without_autocast
    def backward(ctx: Any, grad_output: Tensor | None, grad_final: Tensor | None) -> Gradients:
        found: Gradients = (None,) * len(ctx.settings.needs)
        if grad_output is not None or grad_final is not None:
            _refuse_batched(grad_output, grad_final)
            saved = ctx.saved_tensors  # read once: each reading unpacks anew, which checkpointing forbids
            run = _Backward.apply if torch.is_grad_enabled() else _gradients
            found = run(ctx.settings, grad_output, grad_final, *saved)
        return None, None, *found


def _refuse_batched(*gradients: Tensor | None) -> None:
    """Raise where vmap hides several gradients in one tensor, whose memory a kernel cannot read."""
    for gradient in gradients:
        keys = None if gradient is None else torch._C._dispatch_keys(gradient)
        if keys is not None and any(key is not None and keys.has(key) for key in _BATCHED):
            raise RuntimeError(
                "batched gradients (is_grads_batched, jacobian(vectorize=True)) do not go through the kernels; build "
                "the module with backend='reference' where they are needed"
            )


class _Settings(NamedTuple):
    """What the backward has to know beside tensors.

    Attributes:
        wiring, kind: as the forward's.
        free: how many tensors of free rows there are.
        biases: how many biases there are.
        needs: which gradients are wanted, in their order.
    """

    wiring: Wiring
    kind: Kind
    free: int
    biases: int
    needs: tuple[bool, ...]


class _Backward(torch.autograd.Function):
    """`_gradients` where somebody might differentiate again."""

    @staticmethod
    def forward(ctx: Any, settings: _Settings, *tensors: Tensor | None) -> Gradients:
        return _gradients(settings, *tensors)  # type: ignore[arg-type]

    backward = staticmethod(operator.refuse_second_order)


def _learnt(
    wiring: Wiring, kind: Kind, matrices: Tensor | None, free: Sequence[Tensor], biases: Sequence[Tensor]
) -> passes.Parameters:
    return passes.Parameters.of_layer(kind, matrices, free, wiring.made, biases, wiring.threshold_offset)


def _gradients(
    settings: _Settings,
    grad_output: Tensor | None,
    grad_final: Tensor | None,
    lengths: Tensor | None,
    input: Tensor,
    initial: Tensor | None,
    hidden: Tensor,
    output: Tensor | None,
    gates: Tensor | None,
    matrices: Tensor | None,
    inverse: Tensor | None,
    signs: Tensor | None,
    *others: Tensor,
) -> Gradients:
    """Gradients of input, initial, matrices (or packed A's), free rows, input weights, biases, in autograd's order."""
    wiring, kind, free_count, biases, needs = settings
    directions = hidden.shape[-1] // kind.hidden
    free, inputs, kept_biases = _grouped(others, (free_count, directions))
    learnt, machine = _learnt(wiring, kind, matrices, free, kept_biases), gpu.machine_of(hidden)
    if gates is None:
        gates = _gates_again(wiring, kind, input, initial, lengths, hidden, matrices, free, inputs, kept_biases)
    grad_hidden = _gradient_of_states(hidden, grad_output, grad_final, len(inputs))
    arguments = (grad_hidden, initial, learnt, lengths, hidden, gates, False)
    found = passes.backward(machine, kind, *arguments, wants_initial=needs[1])
    flat = found.projected.view(-1, gates.shape[-1])
    d_input: Tensor | None = None
    if needs[0]:
        d_input = over_steps.input_gradient(machine, kind, flat, side_by_side(inputs)).view(input.shape)
    first = 3 + len(free)
    d_matrices: Tensor | None = None
    d_free: Sequence[Tensor | None] = [None] * len(free)
    into: Sequence[Sequence[Tensor]] = ()
    if any(needs[2:first]):
        d_matrices, room = wiring.room_for_gradients(len(inputs), hidden)
        into, d_free = wiring.rows_of(d_matrices, room, len(inputs)), room
    rows = d_rows = None
    if any(needs[first : first + len(inputs)]):
        rows, d_rows = over_steps.in_rows(input), input.new_empty(gates.shape[-1], input.shape[-1])
    if into or d_rows is not None:
        states = hidden if output is None else output
        over_steps.weight_gradients(machine, kind, found, initial, states, False, into, rows, d_rows)
    if d_matrices is not None and inverse is not None:
        assert matrices is not None
        assert signs is not None
        d_matrices = gradient_in_packed(d_matrices, matrices, inverse, signs) if needs[2] else None
    d_inputs: Sequence[Tensor | None] = [d_rows]
    if directions == 2:
        d_inputs = [None, None] if d_rows is None else d_rows.chunk(2)
    d_biases = _bias_gradients(wiring, kind, flat, found.biases) if biases else ()
    return d_input, found.initial, d_matrices, *d_free, *d_inputs, *d_biases


def _gates_again(
    wiring: Wiring,
    kind: Kind,
    input: Tensor,
    initial: Tensor | None,
    lengths: Tensor | None,
    hidden: Tensor,
    matrices: Tensor | None,
    free: Sequence[Tensor],
    inputs: Sequence[Tensor],
    biases: Sequence[Tensor],
) -> Tensor:
    """The gates that the forward did not keep: [T, B, D*G*H]."""
    count, size, dtype = len(inputs), kind.hidden, input.dtype
    whole = wiring.weight(matrices, free, count, torch.float32)
    threshold = wiring.threshold(biases, inputs)
    found = []
    for d, (weight, weight_ih) in enumerate(zip(whole.view(count, -1, size), inputs, strict=True)):
        projected = F.linear(input, weight_ih).to(hidden.dtype)
        added = wiring.additive_bias(biases[d : d + 1])
        if added is not None:  # as the kernels do, in float32, to a product that may have been rounded
            projected = projected + added
        before = hidden.new_zeros(hidden.shape[1], size) if initial is None else initial[d]
        bias = None if threshold is None else threshold[d * size : (d + 1) * size].to(hidden.dtype)
        states = hidden[..., d * size : (d + 1) * size]
        settings = (kind.reset, kind.nonlinearity, d == 1)
        found.append(gates_again(projected, dtype, before, weight, bias, lengths, states, *settings).to(dtype))
    return found[0] if count == 1 else torch.cat(found, -1)


def _bias_gradients(wiring: Wiring, kind: Kind, d_projected: Tensor, found: Tensor) -> Sequence[Tensor]:
    if passes.finds_bias_gradients(kind):
        return [found.sum((0, 1))] if found.shape[1] == 1 else found.sum(0).unbind()
    return wiring.bias_gradients(d_projected, found)


def _gradient_of_states(
    hidden: Tensor, grad_output: Tensor | None, grad_final: Tensor | None, directions: int
) -> Tensor:
    """dL/dh of all steps, from those of the output and of the final states."""
    if grad_final is None:
        assert grad_output is not None
        return grad_output
    grad = torch.zeros_like(hidden) if grad_output is None else grad_output.to(hidden.dtype, copy=True)
    size = hidden.shape[-1] // directions
    grad[-1, :, :size] += grad_final[0]
    if directions == 2:
        grad[0, :, size:] += grad_final[1]
    return grad


def _grouped(
    parameters: Sequence[Tensor], counts: Sequence[int]
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """The parameters as free rows, input weights and biases, of which the first two are so many."""
    free, inputs = counts
    return parameters[:free], parameters[free : free + inputs], parameters[free + inputs :]
