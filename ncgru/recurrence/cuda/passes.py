"""Forward and backward of the recurrence by kernels: memory, launches, and the products that are left to torch.

Shapes: T time, B batch, D directions, H hidden size, G gates (r, u, c, or c alone). The tensors are those of
`reference.py` with D added: projected and gates [T, B, D*G*H], hidden [T, B, D*H], initial [D, B, H], weight
[D, G*H, H], threshold [D, H]. With D = 2 the second direction runs from the last step to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from . import large, small
from .kind import Kind, Limits

Argument = Tensor | int | None


class Machine(Protocol):
    """What runs kernels: a GPU, or in tests the emulator."""

    @property
    def limits(self) -> Limits:
        """What it offers."""

    def launch(
        self,
        source: str,
        defines: Mapping[str, int],
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Launch the kernel `name` of a source file compiled with these macros."""


@functools.lru_cache(maxsize=256)
def design(kind: Kind, limits: Limits, backward: bool) -> large.Design:
    return large.Design(kind, limits, backward)


def forward(
    machine: Machine,
    kind: Kind,
    projected: Tensor,
    initial: Tensor,
    weight: Tensor,
    threshold: Tensor | None,
    lengths: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence: hidden in float32, and gates in the dtype of `projected`."""
    directions, batch, size = initial.shape
    steps = projected.shape[0]
    hidden = projected.new_empty(steps, batch, directions * size, dtype=torch.float32)
    gates = torch.empty_like(projected, memory_format=torch.contiguous_format)
    if batch == 0:
        return hidden, gates
    bias = None if threshold is None else _float32(threshold)
    leading, rest = (projected.contiguous(), _float32(initial)), (bias, lengths, hidden, gates)
    _run(machine, kind, False, leading, _float32(weight), rest, reverse)
    return hidden, gates


def backward(
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
    directions, batch, size = initial.shape
    steps = gates.shape[0]
    initial, weight = _float32(initial), _float32(weight)
    if batch == 0:
        empty = torch.zeros_like(weight), weight.new_zeros(directions, size)
        return torch.empty_like(gates), torch.empty_like(initial), *empty
    d_projected = torch.empty_like(gates)
    operands = gates.new_empty(steps, batch, directions, 2, size)
    d_initial = torch.empty_like(initial)
    d_threshold = hidden.new_empty(batch, directions, size)
    products = _candidate_products(kind, initial, weight, hidden, reverse) if kind.reset == "after" else None
    rest = lengths, hidden, gates, products, d_projected, operands, d_initial, d_threshold
    _run(machine, kind, True, (_float32(grad_hidden), initial), weight, rest, reverse)
    d_weight = _weight_gradient(kind, d_projected, operands)
    return d_projected, d_initial, d_weight, d_threshold.sum(0)


def _run(
    machine: Machine,
    kind: Kind,
    backward: bool,
    leading: tuple[Tensor, Tensor],
    weight: Tensor,
    rest: Sequence[Argument],
    reverse: bool,
) -> None:
    """Launch a pass whose kernel takes `leading` (a sequence and the initial state), its weights, and the `rest`."""
    steps, (directions, batch, size) = leading[0].shape[0], leading[1].shape
    if kind.hidden > small.LARGEST_HIDDEN:
        _run_large(machine, design(kind, machine.limits, backward), leading, weight, rest, (steps, reverse))
        return
    plan = small.plan(kind, machine.limits, batch, directions, backward)
    matrices = weight.view(-1, size, size).mT.contiguous() if backward else weight
    arguments: list[Argument] = [*leading, matrices, *rest, steps, batch, int(reverse)]
    machine.launch("small.cu", plan.defines, plan.name, plan.grid, plan.threads, arguments)


def _run_large(
    machine: Machine,
    plan: large.Design,
    leading: tuple[Tensor, Tensor],
    weight: Tensor,
    rest: Sequence[Argument],
    task: tuple[int, bool],
) -> None:
    """Lay out the weights, and launch as often as the batch needs."""
    directions, batch, _ = leading[1].shape
    launches = plan.launches(batch, directions)
    words = plan.exchange_words(launches)
    fragments = weight.new_empty(directions * plan.fragment_words, dtype=torch.int32)
    exchange = weight.new_empty(words, dtype=torch.int32)
    blocks = min(4 * machine.limits.multiprocessors, -(-max(fragments.numel(), words) // 256))
    prepared: list[Argument] = [weight, fragments, exchange, directions * plan.kind.gates, words, int(plan.backward)]
    machine.launch("large.cu", plan.defines, "large_prepare", (blocks, 1, 1), 256, prepared)
    arguments: list[Argument] = [*leading, fragments, *rest]
    steps, reverse = task
    for launch in launches:
        part = [launch.first_direction, launch.first, launch.tiles]
        whole = [steps, batch, directions, int(reverse)]
        machine.launch(
            "large.cu",
            plan.defines,
            "large_backward" if plan.backward else "large_forward",
            launch.grid,
            plan.threads,
            [*arguments, exchange[launch.exchange :], *whole, *part],
            shared=plan.shared_bytes(launch.tiles * plan.slices_a_block),
            cooperative=True,
        )


def _candidate_products(kind: Kind, initial: Tensor, weight: Tensor, hidden: Tensor, reverse: bool) -> Tensor:
    """W_c h of all steps [T, B, D, H], where h is the state before the step."""
    directions, batch, size = initial.shape
    states = hidden.view(-1, batch, directions, size)
    products = torch.empty_like(states)
    dtype = getattr(torch, kind.storage)
    for d in range(directions):
        backwards = d == 1 if directions == 2 else reverse
        first, state = initial[d : d + 1], states[:, :, d]
        before = torch.cat([state[1:], first] if backwards else [first, state[:-1]]).flatten(0, 1)
        products[:, :, d] = _product(before.to(dtype), weight[d, 2 * size :].t().to(dtype)).view(state.shape)
    return products


def _weight_gradient(kind: Kind, d_projected: Tensor, operands: Tensor) -> Tensor:
    """[D, G*H, H] in float32, from dL/dz and what the matrices acted on (or, for "after", dL/dm)."""
    _, _, directions, _, size = operands.shape
    factors = operands.flatten(0, 1)
    gradients = d_projected.view(len(factors), directions, kind.gates * size)
    found = factors.new_empty(directions, kind.gates * size, size, dtype=torch.float32)
    for d in range(directions):
        before, second = factors[:, d, 0], factors[:, d, 1]
        dz = gradients[:, d]
        if kind.reset == "none":
            found[d] = _product(dz.t(), before)
            continue
        found[d, : 2 * size] = _product(dz[:, : 2 * size].t(), before)
        last = (dz[:, 2 * size :], second) if kind.reset == "before" else (second, before)
        found[d, 2 * size :] = _product(last[0].t(), last[1])
    return found


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, also where the operands have 16 bits."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _float32(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous()
