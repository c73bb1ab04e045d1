"""Forward and backward of the recurrence by kernels: memory, launches, and the products over all steps.

Shapes: T time, B batch, D directions, H hidden size, G gates (r, u, c, or c alone). The tensors are those of
`reference.py` with D added: projected and gates [T, B, D*G*H], hidden [T, B, D*H], initial [D, B, H]. With D = 2 the
second direction runs from the last step to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from . import large, product, small
from .kind import FLOAT32, Kind, Limits, storage_of

Argument = Tensor | tuple[Tensor, int] | int | float | bytes | None
"""Of a kernel; a tensor with an offset in bytes is an address within it."""


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
        dtype = (*free, *biases, None)[0]
        narrow = dtype is not None and kind.storage != FLOAT32 and storage_of(dtype.dtype) == kind.storage
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


class Gradients(NamedTuple):
    """What the backward kernel finds.

    Attributes:
        projected: dL/dz, as projected.
        initial: [D, B, H], if it was wanted.
        biases: one for each row of the batch: [B, D, G*H], or of modReLU's threshold alone [B, D, H]
            (`finds_bias_gradients`).
        factors: beside dL/dz_c or the state before the step, what the gradient of W_c is made of: r*h ("before") or
            dL/dm ("after"), [T, B, D, H].
    """

    projected: Tensor
    initial: Tensor | None
    biases: Tensor
    factors: Tensor | None


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
    products = _candidate_products(machine, kind, initial, parameters, hidden, sizes) if kind.reset == "after" else None
    narrow = kind.storage != FLOAT32 and storage_of(grad_hidden.dtype) == kind.storage
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


def weight_gradients(
    machine: Machine,
    kind: Kind,
    found: Gradients,
    initial: Tensor | None,
    hidden: Tensor,
    reverse: bool,
    into: Sequence[Sequence[Tensor]],
    input: Tensor | None = None,
    input_into: Tensor | None = None,
) -> None:
    """Write the gradient of W_hh to float32 memory: for each direction blocks of rows, which in order make up W_hh.

    And that of W_ih [D*G*H, I], contiguous, from the input [T*B, I], whose rows lie together; where these are given.
    """
    dtype, directions = found.projected.dtype, hidden.shape[-1] // kind.hidden
    states = (hidden if hidden.dtype == dtype else hidden.to(dtype)).contiguous()
    every, rows = states.shape[0] * states.shape[1], kind.gates * kind.hidden
    shapes = [(rows, kind.hidden, every)]
    joined = input is not None and input.shape[1] >= product.LEAST_SIDE
    if joined and input is not None:
        shapes.append((rows, input.shape[1], every))
    together = _by_kernels(machine, kind, *shapes)
    for d, whole in enumerate(into):
        backwards = d == 1 if directions == 2 else reverse
        direction = _Direction(kind, found, states, backwards, _cut(whole, rows - kind.hidden), d, directions)
        if together:
            _gradients_together(machine, direction, input if joined else None, input_into)
        else:
            _gradients_alone(machine, direction)
        if initial is not None:
            _add_first(direction, initial[d])
    if input is not None and input_into is not None and not (joined and together and into):
        _product(machine, kind, found.projected.view(-1, directions * rows).t(), input, input_into)


class _Direction(NamedTuple):
    """What the gradient of a direction's W_hh is made of, and the blocks of rows that it goes to."""

    kind: Kind
    found: Gradients
    states: Tensor
    backwards: bool
    blocks: Sequence[Tensor]
    d: int
    directions: int


def _gradients_alone(machine: Machine, direction: _Direction) -> None:
    """The gradient of W_hh, a product after the other; without the states before the first step."""
    kind, found, states, backwards, blocks, d, directions = direction
    steps, batch, _ = states.shape
    size, of, factors, width = kind.hidden, found.projected, found.factors, directions * kind.gates * kind.hidden
    later, earlier, _ = _neighbours(steps, batch, backwards)
    column = d * kind.gates * size
    for rows in blocks:
        count = rows.shape[0]  # len() of a tensor takes ten times as long
        begin, column = column, column + count
        before = _rows(states, earlier, directions, d, size)
        if factors is None or column < (d + 1) * kind.gates * size:
            _product(machine, kind, _upright(of, later, width, begin, count), before, rows)
        elif kind.reset == "before":
            every = (0, steps * batch)
            operand = _rows(factors, every, directions, d, size)
            _product(machine, kind, _upright(of, every, width, begin, count), operand, rows)
        else:
            _product(machine, kind, _upright(factors, later, directions * size, d * size, count), before, rows)


def _gradients_together(
    machine: Machine, direction: _Direction, input: Tensor | None, input_into: Tensor | None
) -> None:
    """What `_gradients_alone` does, and the gradient of W_ih, by one launch.

    All products go over all steps, the states having zeros for the step that has none before it.
    """
    kind, found, states, backwards, blocks, d, directions = direction
    steps, batch, _ = states.shape
    size, every, apart, others = kind.hidden, steps * batch, directions * kind.hidden, (steps - 1) * batch
    first, zeros = (batch * apart, 0) if backwards else (0, batch)
    before = product.Operand(states, first + d * size, size, others, apart, False, zeros)
    columns = 0 if input is None else input.shape[1]
    inputs = None if input is None else product.Operand(input, 0, columns, every, input.stride(0), False)
    column = d * kind.gates * size
    problems: list[tuple[product.Operand, product.Operand, product.Result]] = []
    for rows in blocks:
        count, begin = rows.shape[0], column
        block = product.Operand(found.projected, begin, count, every, directions * kind.gates * size, False)
        column += count
        if inputs is not None and input_into is not None:
            problems.append((block, inputs, product.Result(input_into, begin * columns, columns)))
        a, b = block, before
        if found.factors is not None and column == (d + 1) * kind.gates * size:  # those of W_c, the last ones
            factors = product.Operand(found.factors, d * size, size, every, apart, False)
            a, b = (block, factors) if kind.reset == "before" else (factors, before)
        problems.append((a, b, product.Result(rows, 0, size)))
    product.products(machine, every, problems)


def _add_first(direction: _Direction, initial: Tensor) -> None:
    """What the states before the first step [B, H] add to the gradient of W_hh."""
    kind, found, states, backwards, blocks, d, directions = direction
    steps, batch, _ = states.shape
    size, of, factors, width = kind.hidden, found.projected, found.factors, directions * kind.gates * kind.hidden
    _, _, first = _neighbours(steps, batch, backwards)
    column = d * kind.gates * size
    for rows in blocks:
        count = rows.shape[0]
        begin, column = column, column + count
        dz = _upright(of, first, width, begin, count)
        if factors is not None and column == (d + 1) * kind.gates * size:
            if kind.reset == "before":
                continue  # it is in `factors`
            dz = _upright(factors, first, directions * size, d * size, count)
        rows.addmm_(dz.float(), initial.to(states.dtype).float())


Stretch = tuple[int, int]
"""Of [T*B, ...]: the first row, and how many."""


def _neighbours(steps: int, batch: int, backwards: bool) -> tuple[Stretch, Stretch, Stretch]:
    """All steps but the first, the steps before them, and the first."""
    others = (steps - 1) * batch
    if backwards:
        return (0, others), (batch, others), (others, batch)
    return (batch, others), (0, others), (0, batch)


def _rows(x: Tensor, rows: Stretch, directions: int, d: int, size: int) -> Tensor:
    """Rows of direction d of a contiguous [T, B, D*H], by one call of torch where slices would take three."""
    first, count = rows
    return x.as_strided((count, size), (directions * size, 1), x.storage_offset() + (first * directions + d) * size)


def _upright(x: Tensor, rows: Stretch, width: int, column: int, count: int) -> Tensor:
    """`count` columns of these rows of a contiguous [T, B, width], transposed."""
    first, number = rows
    return x.as_strided((count, number), (1, width), x.storage_offset() + first * width + column)


def _cut(blocks: Sequence[Tensor], at: int) -> list[Tensor]:
    """The blocks of rows with none that begins before row `at` and ends behind it."""
    found: list[Tensor] = []
    first = 0
    for rows in blocks:
        end = first + rows.shape[0]
        found += rows.split([at - first, end - at]) if first < at < end else [rows]
        first = end
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


def _candidate_products(
    machine: Machine,
    kind: Kind,
    initial: Tensor | None,
    parameters: Parameters,
    hidden: Tensor,
    sizes: tuple[int, int, int, bool],
) -> Tensor:
    """W_c h of all steps [T, B, D, H], where h is the state before the step."""
    steps, batch, directions, reverse = sizes
    size, dtype = kind.hidden, getattr(torch, kind.storage)
    matrices = parameters.matrices
    assert matrices is not None, "of a reset after the product, no layer has W_c free"
    last = matrices.view(directions, -1, size)[:, -size:].to(dtype)
    states = hidden.to(dtype)
    products = hidden.new_zeros((steps, batch, directions, size))
    for d in range(directions):
        later, earlier, first = _neighbours(steps, batch, d == 1 if directions == 2 else reverse)
        if steps > 1:
            operand = _rows(states, earlier, directions, d, size)
            _product(machine, kind, operand, last[d].t(), _rows(products, later, directions, d, size))
        if initial is not None:
            _product(machine, kind, initial[d].to(dtype), last[d].t(), _rows(products, first, directions, d, size))
    return products


def project(machine: Machine, kind: Kind, input: Tensor, weight: Tensor) -> Tensor:
    """W x for all steps: [T, B, I] -> [T, B, D*G*H]."""
    steps, batch, columns = input.shape
    if not _by_kernels(machine, kind, (steps * batch, weight.shape[0], columns)):
        return F.linear(input, weight)
    out = input.new_empty(steps, batch, weight.shape[0])
    product.product(machine, in_rows(input), _in_rows_or_columns(weight).t(), out.view(-1, weight.shape[0]))
    return out


def input_gradient(machine: Machine, kind: Kind, d_projected: Tensor, weight: Tensor) -> Tensor:
    """dL/dx [T*B, I] from dL/dz [T*B, D*G*H]."""
    if not _by_kernels(machine, kind, (*d_projected.shape, weight.shape[1])):
        return torch.mm(d_projected, weight)
    out = d_projected.new_empty(d_projected.shape[0], weight.shape[1])
    product.product(machine, d_projected, _in_rows_or_columns(weight), out)
    return out


def in_rows(input: Tensor) -> Tensor:
    """[T, B, I] as [T*B, I], where a row's numbers lie together."""
    rows = input.reshape(-1, input.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _in_rows_or_columns(x: Tensor) -> Tensor:
    return x if 1 in x.stride() else x.contiguous()


def _by_kernels(machine: Machine, kind: Kind, *shapes: tuple[int, int, int]) -> bool:
    """Whether our own products are right for these, and faster than torch's."""
    return kind.storage == FLOAT32 and not kind.tf32 and product.worth(machine.limits, *shapes)


def _product(machine: Machine, kind: Kind, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a b to `out`, which is float32 also where the operands have 16 bits."""
    if a.dtype == torch.float32:
        if _by_kernels(machine, kind, (*a.shape, b.shape[1])):
            product.product(machine, a, b, out)
        else:
            torch.mm(a, b, out=out)
    elif out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda and a.numel() and hasattr(torch.ops.aten.mm, "dtype_out"):
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a.float(), b.float(), out=out)


def float32(x: Tensor) -> Tensor:
    """`x` in float32 and contiguous; calls of torch that change nothing are left out, as the host is slow at them."""
    if x.dtype != torch.float32:
        x = x.to(torch.float32)
    return x if x.is_contiguous() else x.contiguous()


def _aligned(x: Tensor | None) -> Tensor | None:
    """`x` where two neighbouring numbers can be read at once."""
    return x if x is None or x.data_ptr() % (2 * x.element_size()) == 0 else x.clone()
