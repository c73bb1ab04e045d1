"""Forward and backward of the recurrence by kernels: memory, launches, and the products that are left to torch.

Shapes: T time, B batch, D directions, H hidden size, G gates (r, u, c, or c alone). The tensors are those of
`reference.py` with D added: projected and gates [T, B, D*G*H], hidden [T, B, D*H], initial [D, B, H], weight
[D, G*H, H], threshold [D, H] (the passes also take these two with all rows in one dimension). With D = 2 the second
direction runs from the last step to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

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


@functools.lru_cache(maxsize=1024)
def small_plan(kind: Kind, limits: Limits, batch: int, directions: int, backward: bool) -> small.Plan:
    return small.plan(kind, limits, batch, directions, backward)


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
    if not projected.is_contiguous():
        projected = projected.contiguous()
    leading, rest = (projected, _float32(initial)), (bias, lengths, hidden, gates)
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
    found = backward_in_time(machine, kind, grad_hidden, initial, weight, lengths, hidden, gates, reverse)
    d_weight = torch.empty_like(weight, dtype=torch.float32, memory_format=torch.contiguous_format)
    weight_gradient(kind, found.projected, found.operands, [[rows] for rows in d_weight])
    return found.projected, found.initial, d_weight, found.threshold.sum(0)


class Gradients(NamedTuple):
    """What the backward kernel finds.

    Attributes:
        projected: dL/dz, as projected.
        initial: [D, B, H].
        threshold: one for each row of the batch, [B, D, H].
        operands: what the matrices acted on (or for "after" dL/dm in the second place), [T, B, D, 2, H].
    """

    projected: Tensor
    initial: Tensor
    threshold: Tensor
    operands: Tensor


def backward_in_time(
    machine: Machine,
    kind: Kind,
    grad_hidden: Tensor,
    initial: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    hidden: Tensor,
    gates: Tensor,
    reverse: bool,
) -> Gradients:
    """Run the recurrence backwards; the gradient of the weight is yet to be taken from what it finds."""
    directions, batch, size = initial.shape
    steps = gates.shape[0]
    initial, weight = _float32(initial), _float32(weight)
    d_projected = torch.empty_like(gates)
    operands = gates.new_empty(steps, batch, directions, 2, size)
    d_initial = torch.empty_like(initial)
    d_threshold = hidden.new_empty(batch, directions, size)
    if batch:
        products = _candidate_products(kind, initial, weight, hidden, reverse) if kind.reset == "after" else None
        rest = lengths, hidden, gates, products, d_projected, operands, d_initial, d_threshold
        _run(machine, kind, True, (_float32(grad_hidden), initial), weight, rest, reverse)
    return Gradients(d_projected, d_initial, d_threshold, operands)


def weight_gradient(kind: Kind, d_projected: Tensor, operands: Tensor, into: Sequence[Sequence[Tensor]]) -> None:
    """Write the gradient of W_hh to float32 memory: for each direction blocks of rows, which in order make up W_hh."""
    directions, size = operands.shape[2], kind.hidden
    total = operands.shape[0] * operands.shape[1]
    factors = operands.view(total, 2 * directions, size).unbind(1)
    parts = [_cut(blocks, (kind.gates - 1) * size) for blocks in into]
    columns = iter(
        d_projected.view(total, d_projected.shape[-1]).split([len(rows) for blocks in parts for rows in blocks], 1)
    )
    for d, blocks in enumerate(parts):
        before, second = factors[2 * d : 2 * d + 2]
        first = 0
        for rows in blocks:
            dz, last = next(columns), kind.gates > 1 and first == (kind.gates - 1) * size
            first += len(rows)
            if last and kind.reset == "after":
                dz = second
            _product(dz.t(), second if last and kind.reset == "before" else before, rows)


def _cut(blocks: Sequence[Tensor], at: int) -> list[Tensor]:
    """The blocks of rows with none that begins before row `at` and ends behind it."""
    found: list[Tensor] = []
    first = 0
    for rows in blocks:
        end = first + len(rows)
        found += rows.split([at - first, end - at]) if first < at < end else [rows]
        first = end
    return found


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
    plan = small_plan(kind, machine.limits, batch, directions, backward)
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
    width = launches[0].width
    fragments = weight.new_empty(directions * plan.fragment_words(width), dtype=torch.int32)
    exchange = weight.new_empty(words, dtype=torch.int32)
    blocks = min(4 * machine.limits.multiprocessors, -(-max(fragments.numel(), words) // 256))
    prepared: list[Argument] = [
        weight,
        fragments,
        exchange,
        directions * plan.kind.gates,
        plan.blocks(width) * width,
        words,
        int(plan.backward),
    ]
    machine.launch("large.cu", plan.defines, "large_prepare", (blocks, 1, 1), 256, prepared)
    arguments: list[Argument] = [*leading, fragments, *rest]
    steps, reverse = task
    for launch in launches:
        part = [launch.first_direction, launch.first, launch.tiles]
        whole = [steps, batch, directions, int(reverse)]
        machine.launch(
            "large.cu",
            plan.defines,
            f"large_{'backward' if plan.backward else 'forward'}_{'narrow' if width == plan.narrow else 'wide'}",
            launch.grid,
            plan.threads(width),
            [*arguments, exchange[launch.exchange :], *whole, *part],
            shared=plan.shared_bytes(width, launch.tiles),
            cooperative=True,
        )


def _candidate_products(kind: Kind, initial: Tensor, weight: Tensor, hidden: Tensor, reverse: bool) -> Tensor:
    """W_c h of all steps [T, B, D, H], where h is the state before the step."""
    directions, batch, size = initial.shape
    states = hidden.view(-1, batch, directions, size)
    products = torch.empty_like(states)
    columns = products.view(-1, directions * size).split(size, 1)
    dtype = getattr(torch, kind.storage)
    matrices = weight.view(directions, -1, size)[:, 2 * size :].to(dtype)
    for d in range(directions):
        backwards = d == 1 if directions == 2 else reverse
        first, state = initial[d : d + 1], states[:, :, d]
        before = torch.cat([state[1:], first] if backwards else [first, state[:-1]]).flatten(0, 1)
        _product(before.to(dtype), matrices[d].t(), columns[d])
    return products


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a b to `out`, in float32 also where the operands have 16 bits."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    elif a.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a.float(), b.float(), out=out)


def _float32(x: Tensor) -> Tensor:
    """`x` in float32 and contiguous; every call of torch that can be left out saves its 10 µs."""
    if x.dtype != torch.float32:
        x = x.to(torch.float32)
    return x if x.is_contiguous() else x.contiguous()
