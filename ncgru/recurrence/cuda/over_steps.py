"""The products over all steps at once, which a recurrence needs no loop for: by our own kernels, or by torch.

Shapes: those of `passes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import product
from .kind import FLOAT32, Kind
from .machine import Machine


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


def candidate_products(
    machine: Machine, kind: Kind, initial: Tensor | None, matrices: Tensor, hidden: Tensor, reverse: bool
) -> Tensor:
    """W_c h of all steps [T, B, D, H], where h is the state before the step and W_c the last of `matrices`."""
    steps, batch, width = hidden.shape
    size, dtype, directions = kind.hidden, getattr(torch, kind.storage), width // kind.hidden
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
        direction = _Direction(kind, found, states, backwards, _cut(whole, rows - kind.hidden), d)
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

    @property
    def directions(self) -> int:
        return int(self.states.shape[-1]) // self.kind.hidden

    def terms(self) -> Iterator[_Term]:
        """The products that the blocks are, in their order; W_c's block is the last."""
        kind, found, size = self.kind, self.found, self.kind.hidden
        width = self.directions * kind.gates * size
        column = self.d * kind.gates * size
        for rows in self.blocks:
            begin, column = column, column + rows.shape[0]  # len() of a tensor takes ten times as long
            term = _Term(rows, begin, found.projected, begin, width, None)
            if found.factors is not None and column == (self.d + 1) * kind.gates * size:
                if kind.reset == "before":
                    term = term._replace(right=found.factors)
                else:
                    term = term._replace(left=found.factors, column=self.d * size, width=self.directions * size)
            yield term


class _Term(NamedTuple):
    """A block of rows of dL/dW_hh as a product over all steps.

    Attributes:
        rows: where it goes.
        begin: its first row, counted over all directions' W_hh.
        left: [T, B, width], of which the columns from `column` on, as many as there are rows, are the first factor.
        column, width: see `left`.
        right: the other factor [T, B, D, H]; None stands for the states before each step.
    """

    rows: Tensor
    begin: int
    left: Tensor
    column: int
    width: int
    right: Tensor | None

    def first_factor(self, steps: Stretch) -> Tensor:
        """The first factor of these rows of [T*B], transposed."""
        return _upright(self.left, steps, self.width, self.column, self.rows.shape[0])


def _gradients_alone(machine: Machine, direction: _Direction) -> None:
    """The gradient of W_hh, a product after the other; without the states before the first step."""
    steps, batch, _ = direction.states.shape
    d, directions, size = direction.d, direction.directions, direction.kind.hidden
    later, earlier, _ = _neighbours(steps, batch, direction.backwards)
    for term in direction.terms():
        left, right, other = later, earlier, direction.states
        if term.right is not None:
            left = right = (0, steps * batch)
            other = term.right
        factor = _rows(other, right, directions, d, size)
        _product(machine, direction.kind, term.first_factor(left), factor, term.rows)


def _gradients_together(
    machine: Machine, direction: _Direction, input: Tensor | None, input_into: Tensor | None
) -> None:
    """What `_gradients_alone` does, and the gradient of W_ih, by one launch.

    All products go over all steps, the states having zeros for the step that has none before it.
    """
    steps, batch, apart = direction.states.shape
    size, d, every, others = direction.kind.hidden, direction.d, steps * batch, (steps - 1) * batch
    first, zeros = (batch * apart, 0) if direction.backwards else (0, batch)
    before = product.Operand(direction.states, first + d * size, size, others, apart, False, zeros)
    columns = 0 if input is None else input.shape[1]
    inputs = None if input is None else product.Operand(input, 0, columns, every, input.stride(0), False)
    gates = direction.directions * direction.kind.gates * size
    problems: list[tuple[product.Operand, product.Operand, product.Result]] = []
    for term in direction.terms():
        count = term.rows.shape[0]
        block = product.Operand(direction.found.projected, term.begin, count, every, gates, False)
        if inputs is not None and input_into is not None:
            problems.append((block, inputs, product.Result(input_into, term.begin * columns, columns)))
        left, right = block, before
        if term.left is not direction.found.projected:
            left = product.Operand(term.left, term.column, count, every, term.width, False)
        if term.right is not None:
            right = product.Operand(term.right, d * size, size, every, apart, False)
        problems.append((left, right, product.Result(term.rows, 0, size)))
    product.products(machine, every, problems)


def _add_first(direction: _Direction, initial: Tensor) -> None:
    """What the states before the first step [B, H] add to the gradient of W_hh."""
    steps, batch, _ = direction.states.shape
    _, _, first = _neighbours(steps, batch, direction.backwards)
    for term in direction.terms():
        if term.right is None:  # the other factor has them already
            term.rows.addmm_(term.first_factor(first).float(), initial.to(direction.states.dtype).float())


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
