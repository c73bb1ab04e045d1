"""Forward and backward of the recurrence by kernels: memory and launches.

Shapes: T time, B batch, D directions, H hidden size, G gates (r, u, c, or c alone). The tensors are those of
`reference.py` with D added: projected and gates [T, B, D*G*H], hidden [T, B, D*H], initial [D, B, H]. With D = 2 the
second direction runs from the last step to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import large, small
from .kind import FLOAT32, Kind, Limits, storage_of
from .machine import Argument, Machine
from .over_steps import Gradients, candidate_products


@functools.lru_cache(maxsize=256)
def design(kind: Kind, limits: Limits, backward: bool) -> large.Design:
    return large.Design(kind, limits, backward)


@functools.lru_cache(maxsize=1024)
def large_launches(plan: large.Design, batch: int, directions: int) -> list[large.Launch]:
    return plan.launches(batch, directions)


@functools.lru_cache(maxsize=1024)
def small_plan(kind: Kind, limits: Limits, batch: int, directions: int, backward: bool) -> small.Plan:
    return small.plan(kind, limits, batch, directions, backward)


class Parameters(NamedTuple):
    """What a layer has learnt, apart from the input weights.

    Attributes:
        matrices: the matrices of the gates whose bit is set in `made`, [D*S, H, H], directions outermost; float32.
        free: the rows of the others, [F*H, H] for each direction, or nothing.
        made: bit g stands for the g-th gate.
        biases: [G*H] for each direction, or nothing. The block of c is modReLU's threshold, where it has one.
        threshold: modReLU's [D*H], where `biases` do not say it; float32.
        threshold_offset: what is added to either.
        narrow: whether `free` and `biases` are of the kind's storage, rather than float32.
    """

    matrices: Tensor | None
    free: Sequence[Tensor]
    made: int
    biases: Sequence[Tensor] = ()
    threshold: Tensor | None = None
    threshold_offset: float = 0.0
    narrow: bool = False

    @classmethod
    def of_whole(cls, kind: Kind, weight: Tensor, threshold: Tensor | None) -> Parameters:
        """Those of a W_hh in one piece, all directions' rows in order; its additive biases have been added already."""
        every = (1 << kind.gates) - 1
        return cls(float32(weight), (), every, (), None if threshold is None else float32(threshold))

    @classmethod
    def of_layer(
        cls,
        kind: Kind,
        matrices: Tensor | None,
        free: Sequence[Tensor],
        made: int,
        biases: Sequence[Tensor],
        threshold_offset: float,
    ) -> Parameters:
        """Those of a layer as they are, but for a dtype that the kernels do not read."""
        narrow = any(_is_narrow(kind, x) for x in (*free, *biases)[:1])  # one dtype for all
        if not narrow:
            free, biases = [float32(x) for x in free], [float32(x) for x in biases]
        made_matrices = None if matrices is None else float32(matrices)
        return cls(made_matrices, free, made, biases, None, threshold_offset, narrow)

    @property
    def weights(self) -> tuple[Argument, ...]:
        """The recurrent weights as kernels take them."""
        return (self.matrices, *_two(self.free), self.made, int(self.narrow))

    @property
    def added(self) -> tuple[Argument, ...]:
        """What is added, as kernels take it."""
        return (*_two(self.biases), self.threshold, self.threshold_offset)


def _is_narrow(kind: Kind, x: Tensor) -> bool:
    """Whether these are 16-bit numbers that the kernels read as they are."""
    return kind.storage != FLOAT32 and storage_of(x.dtype) == kind.storage


def _two(of_directions: Sequence[Tensor]) -> tuple[Argument, Argument]:
    first = of_directions[0] if of_directions else None
    return first, of_directions[1] if len(of_directions) > 1 else None


def finds_bias_gradients(kind: Kind) -> bool:
    """Whether the kernels find the gradients of all biases; else torch adds up those of the projected input."""
    return kind.hidden <= small.LARGEST_HIDDEN


class States(NamedTuple):
    """What the forward kernel makes.

    Attributes:
        hidden: [T, B, D*H], float32.
        gates: as projected.
        output: `hidden` in the dtype of projected; the same tensor where that is float32, or where it is not wanted.
        last: the states after the last step of each direction [D, B, H], in the dtype of projected, if wanted.
    """

    hidden: Tensor
    gates: Tensor
    output: Tensor
    last: Tensor | None


def forward(
    machine: Machine,
    kind: Kind,
    projected: Tensor,
    initial: Tensor | None,
    parameters: Parameters,
    lengths: Tensor | None,
    reverse: bool,
    *,
    wants_output: bool,
) -> States:
    """Run the recurrence, and write what a layer returns where that is wanted, beside what its backward needs."""
    steps, batch, width = projected.shape
    directions = width // (kind.gates * kind.hidden)
    shape = steps, batch, directions * kind.hidden
    hidden = projected.new_empty(shape, dtype=torch.float32)
    gates = torch.empty_like(projected, memory_format=torch.contiguous_format)
    rounded = projected.new_empty(shape) if wants_output and kind.storage != FLOAT32 else None
    last = projected.new_empty((directions, batch, kind.hidden)) if wants_output else None
    made = States(hidden, gates, hidden if rounded is None else rounded, last)
    if batch == 0:
        return made
    leading = (projected.contiguous(), None if initial is None else float32(initial))
    lengths = None if lengths is None else lengths.contiguous()
    written = (lengths, hidden, gates, rounded, last)
    sizes = (steps, batch, directions, reverse)
    if kind.hidden <= small.LARGEST_HIDDEN:
        _run_small(machine, kind, False, (*leading, *parameters.weights, *parameters.added, *written), sizes)
    else:
        rest = (*parameters.added, int(parameters.narrow), *written)
        _run_large(machine, design(kind, machine.limits, False), leading, parameters, rest, sizes)
    return made


def backward(
    machine: Machine,
    kind: Kind,
    grad_hidden: Tensor,
    initial: Tensor | None,
    parameters: Parameters,
    lengths: Tensor | None,
    hidden: Tensor,
    gates: Tensor,
    reverse: bool,
    *,
    wants_initial: bool,
) -> Gradients:
    """Run the recurrence backwards; the gradient of the weight is yet to be taken from what it finds."""
    steps, batch, width = gates.shape
    directions = width // (kind.gates * kind.hidden)
    initial = None if initial is None else float32(initial)
    found = Gradients(
        torch.empty_like(gates, memory_format=torch.contiguous_format),
        hidden.new_empty((directions, batch, kind.hidden)) if wants_initial else None,
        hidden.new_empty((batch, directions, (kind.gates if finds_bias_gradients(kind) else 1) * kind.hidden)),
        gates.new_empty((steps, batch, directions, kind.hidden)) if kind.gates > 1 else None,
    )
    if batch == 0:
        return found
    sizes = (steps, batch, directions, reverse)
    products = None
    if kind.reset == "after":
        assert parameters.matrices is not None, "of a reset after the product, no layer has W_c free"
        products = candidate_products(machine, kind, initial, parameters.matrices, hidden, reverse)
    narrow = _is_narrow(kind, grad_hidden)
    grad = grad_hidden.contiguous() if narrow else float32(grad_hidden)
    leading = (None, grad, initial) if narrow else (grad, None, initial)
    lengths = None if lengths is None else lengths.contiguous()
    saved = (_aligned(hidden.contiguous()), _aligned(gates.contiguous()))
    rest = (lengths, *saved, products, found.projected, found.factors, found.initial, found.biases)
    if kind.hidden <= small.LARGEST_HIDDEN:
        _run_small(machine, kind, True, (*leading, *parameters.weights, *rest), sizes)
    else:
        _run_large(machine, design(kind, machine.limits, True), leading, parameters, rest, sizes)
    return found


def _run_small(
    machine: Machine, kind: Kind, backward: bool, arguments: Sequence[Argument], sizes: tuple[int, int, int, bool]
) -> None:
    steps, batch, directions, reverse = sizes
    plan = small_plan(kind, machine.limits, batch, directions, backward)
    machine.launch(
        "small.cu", plan.defines, plan.name, plan.grid, plan.threads, [*arguments, steps, batch, int(reverse)]
    )


def _run_large(
    machine: Machine,
    plan: large.Design,
    leading: Sequence[Tensor | None],
    parameters: Parameters,
    rest: Sequence[Argument],
    sizes: tuple[int, int, int, bool],
) -> None:
    """Lay out the weights, and launch as often as the batch needs."""
    steps, batch, directions, reverse = sizes
    launches = large_launches(plan, batch, directions)
    like = next(x for x in leading if x is not None)
    width, words = launches[0].width, plan.exchange_words(launches)
    fragments = directions * plan.fragment_words(width)
    room = like.new_empty(fragments + words, dtype=torch.int32)
    blocks = min(4 * machine.limits.multiprocessors, -(-max(fragments, words) // 256))
    slices = plan.blocks(width) * width
    prepared = (*parameters.weights, room, (room, 4 * fragments), directions, slices, words, int(plan.backward))
    machine.launch("large.cu", plan.defines, "large_prepare", (blocks, 1, 1), 256, prepared)
    arguments: list[Argument] = [*map(_aligned, leading), room, *rest]
    for launch in launches:
        part = [launch.first_direction, launch.first, launch.tiles]
        whole = [steps, batch, directions, int(reverse)]
        machine.launch(
            "large.cu",
            plan.defines,
            f"large_{'backward' if plan.backward else 'forward'}_{launch.kernel}",
            launch.grid,
            plan.threads(width, launch.stack),
            [*arguments, (room, 4 * (fragments + launch.exchange)), *whole, *part],
            shared=plan.shared_bytes(width, launch.stack, launch.tiles),
            cooperative=True,
        )


def float32(x: Tensor) -> Tensor:
    """`x` in float32 and contiguous; calls of torch that change nothing are left out, as the host is slow at them."""
    if x.dtype != torch.float32:
        x = x.to(torch.float32)
    return x if x.is_contiguous() else x.contiguous()


def _aligned(x: Tensor | None) -> Tensor | None:
    """`x` where two neighbouring numbers can be read at once."""
    return x if x is None or x.data_ptr() % (2 * x.element_size()) == 0 else x.clone()
