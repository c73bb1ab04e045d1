"""Measurements: how orthogonal the matrices are, how well their inverses are followed, and how gradients flow.

All functions return tensors (or dictionaries of them by the weight's name) and leave parameters and gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ncgru import _checks
from ncgru.nn.base import long_dtype
from ncgru.nn.goru import GORU, GORUCell
from ncgru.nn.layer import project
from ncgru.nn.ncgru import NCGRU
from ncgru.nn.orthogonal import OrthogonalRecurrent
from ncgru.orthogonal import ScaledCayley, unpack
from ncgru.recurrence import recurrence_with_gates

NORMS = {"spectral": 2, "frobenius": "fro"}


class GradientBound(NamedTuple):
    """Theorem 1 along a sequence: α + β‖U_c‖₂ bounds the norm of one step's Jacobian. Every field is [T, B].

    Attributes:
        alpha: δ_u (max|h| + max|c|) ‖U_u‖₂ + max(1 - u).
        beta: max(u) (δ_r ‖U_r‖₂ max|h| + max(r)).
        bound: α + β‖U_c‖₂.
        norm: ‖∂h_t/∂h_{t-1}‖₂, measured.
    """

    alpha: Tensor
    beta: Tensor
    bound: Tensor
    norm: Tensor


def orthogonality_error(module: nn.Module, norm: str = "spectral") -> dict[str, Tensor]:
    """‖UᵀU - I‖ of every orthogonal matrix in `module`, as the next forward would use it.

    Args:
        module: any module with `NCGRU`, `ScoRNN`, `GORU`, `orthogonal(...)` weights or `ScaledCayley` inside.
        norm: "spectral" or "frobenius".
    """
    _checks.one_of("norm", norm, NORMS)
    with torch.no_grad():
        return {name: torch.linalg.matrix_norm(_defect(matrix), NORMS[norm]) for name, matrix in _matrices(module)}


def series_norm(module: nn.Module) -> dict[str, Tensor]:
    """‖Ã δA‖₂ of the step that has been made but not yet read; the Neumann series needs it below 1.

    Call it between `optimizer.step()` and the next forward; without a pending step it is 0.
    """
    norms: dict[str, Tensor] = {}
    for names, cayley, packed in _sources(module):
        if packed is None:
            continue
        anchor = cayley.anchor.reshape(len(names), -1)
        step = unpack(anchor - packed.detach().to(anchor.dtype).reshape(anchor.shape), cayley.size)
        inverse = cayley.inverse.reshape(step.shape)
        norms.update(zip(names, torch.linalg.matrix_norm(inverse @ step, 2), strict=True))
    return norms


def inverse_residual(module: nn.Module) -> dict[str, Tensor]:
    """‖I - (I+A)Ã‖₂ of every stored inverse, for the A that it belongs to."""
    residuals: dict[str, Tensor] = {}
    for names, cayley, _ in _sources(module):
        eye = torch.eye(cayley.size, dtype=cayley.inverse.dtype, device=cayley.inverse.device)
        skew = unpack(cayley.anchor.reshape(len(names), -1), cayley.size)
        defect = eye - (eye + skew) @ cayley.inverse.reshape(skew.shape)
        residuals.update(zip(names, torch.linalg.matrix_norm(defect, 2), strict=True))
    return residuals


def updates(module: nn.Module) -> dict[str, Tensor]:
    """How often every orthogonal matrix has followed a changed A."""
    return {
        name: count
        for names, cayley, _ in _sources(module)
        for name, count in zip(names, cayley.updates.reshape(-1).clone(), strict=True)
    }


def refreshes(module: nn.Module) -> dict[str, Tensor]:
    """How often the guard has replaced the series by an exact inverse, for every orthogonal matrix."""
    return {
        name: count
        for names, cayley, _ in _sources(module)
        for name, count in zip(names, cayley.refreshes.reshape(-1).clone(), strict=True)
    }


@torch.no_grad()
def gradient_bound(module: NCGRU, input: Tensor, hx: Tensor | None = None, *, absolute: bool = True) -> GradientBound:
    """The paper's Theorem 1 beside the truth, at every step of a sequence.

    The theorem takes max h and max c of signed entries, which bounds nothing where entries are negative; its proof
    needs the magnitudes, and these are the default.

    Args:
        module: an `NCGRU` of one layer and direction; with `nonlinearity="tanh", orthogonal=""` it is the GRU.
        input: [T, B, input_size], or [B, T, input_size] with `batch_first`.
        hx: the initial state [1, B, hidden_size]; zeros if None.
        absolute: take maxima of magnitudes; False takes the signed maxima, as the theorem is printed.
    """
    steps = _Steps.of(module, input, hx)
    previous, gates_r, gates_u, candidates = steps.previous, steps.r, steps.u, steps.c
    magnitude = torch.abs if absolute else torch.Tensor.clone
    largest_h, largest_c = magnitude(previous).amax(-1), magnitude(candidates).amax(-1)
    u_r, u_u, u_c = torch.linalg.matrix_norm(steps.weight, 2)
    delta_r = (gates_r * (1 - gates_r)).amax(-1)
    delta_u = (gates_u * (1 - gates_u)).amax(-1)
    alpha = delta_u * (largest_h + largest_c) * u_u + (1 - gates_u).amax(-1)
    beta = gates_u.amax(-1) * (delta_r * u_r * largest_h + gates_r.amax(-1))
    norm = torch.stack([torch.linalg.matrix_norm(jacobian, 2) for jacobian in steps.jacobians()])
    return GradientBound(alpha, beta, alpha + beta * u_c, norm)


@torch.no_grad()
def state_gradients(module: NCGRU, input: Tensor, hx: Tensor | None = None) -> Tensor:
    """‖∂h_T/∂h_t‖₂ for t = 0 … T along a sequence, [T+1, B]: how much of an early state reaches the end.

    Args:
        module: an `NCGRU` of one layer and direction.
        input: [T, B, input_size], or [B, T, input_size] with `batch_first`.
        hx: the initial state [1, B, hidden_size]; zeros if None.
    """
    steps = _Steps.of(module, input, hx)
    batch, size = steps.previous.shape[1:]
    product = torch.eye(size, dtype=steps.weight.dtype, device=input.device).expand(batch, size, size)
    norms = [torch.linalg.matrix_norm(product, 2)]
    for jacobian in steps.jacobians(backwards=True):
        product = product @ jacobian
        norms.append(torch.linalg.matrix_norm(product, 2))
    return torch.stack(norms[::-1])


class _Steps(NamedTuple):
    """What every step of a sequence saw: states before it [T, B, H], gates, candidates, slopes φ', and U [3, H, H]."""

    previous: Tensor
    r: Tensor
    u: Tensor
    c: Tensor
    slope: Tensor
    weight: Tensor

    @classmethod
    def of(cls, module: NCGRU, input: Tensor, hx: Tensor | None) -> _Steps:
        if not isinstance(module, NCGRU):
            raise TypeError(f"module must be an NCGRU, got {type(module).__name__}; pass the recurrent module itself")
        if module.num_layers != 1 or module.bidirectional:
            raise ValueError(
                f"module must have one layer and one direction, got num_layers={module.num_layers}, "
                f"bidirectional={module.bidirectional}; build a single layer to look at its steps"
            )
        _checks.tensor("input", input, "unpack a packed sequence first")
        module(input, hx)  # checks both arguments as any forward does
        input = input.unsqueeze(1) if input.dim() == 2 else input.transpose(0, 1) if module.batch_first else input
        size = module.hidden_size
        initial = _long(input.new_zeros(input.shape[1], size) if hx is None else hx.reshape(-1, size))
        weight: Tensor = _long(module.weight_hh_l0)
        weights, wiring = module._weights(*module._layers[0]), module._wiring
        threshold = wiring.threshold(weights.biases, weights.inputs)
        threshold = None if threshold is None else _long(threshold)
        projected = _long(project(wiring, input, weights.inputs, weights.biases))
        hidden, gates = recurrence_with_gates(projected, initial, weight, threshold, nonlinearity=module.nonlinearity)
        r, u, c = gates.chunk(3, -1)
        slope = 1 - c.square() if module.nonlinearity == "tanh" else (c != 0).to(c.dtype)
        return cls(torch.cat([initial.unsqueeze(0), hidden[:-1]]), r, u, c, slope, weight.view(3, size, size))

    def jacobians(self, backwards: bool = False) -> Iterator[Tensor]:
        """∂h_t/∂h_{t-1} [B, H, H], one step after the other.

        = diag(1-u) + diag((c-h) u (1-u)) U_u + diag(u φ') U_c (diag(r) + diag(h r (1-r)) U_r)
        """
        u_r, u_u, u_c = self.weight
        order = range(self.previous.shape[0])
        for t in reversed(order) if backwards else order:
            h, r, u, c = self.previous[t], self.r[t], self.u[t], self.c[t]
            inner = torch.diag_embed(r) + (h * r * (1 - r)).unsqueeze(-1) * u_r
            candidate = (u * self.slope[t]).unsqueeze(-1) * (u_c @ inner)
            gate = ((c - h) * u * (1 - u)).unsqueeze(-1) * u_u
            yield torch.diag_embed(1 - u) + gate + candidate


def _matrices(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every orthogonal matrix in `module`, by name."""
    for names, cayley, packed in _sources(module):
        matrices = cayley.matrix if packed is None else cayley(packed)
        yield from zip(names, matrices.reshape(-1, cayley.size, cayley.size), strict=True)
    for path, part in module.named_modules():
        if isinstance(part, (GORU, GORUCell)):
            prefix = f"{path}." if path else ""
            for direction in (direction for _, directions in part._layers for direction in directions):
                yield f"{prefix}weight_hh{direction}.c", getattr(part, f"weight_hh{direction}")[-part.hidden_size :]


def _defect(matrix: Tensor) -> Tensor:
    """UᵀU - I."""
    matrix = _long(matrix)
    return matrix.mT @ matrix - torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


def _long(value: Tensor) -> Tensor:
    """In float32 where it has 16 bits: norms need digits."""
    return value.to(long_dtype(value.dtype))


def _sources(module: nn.Module) -> Iterator[tuple[list[str], ScaledCayley, Tensor | None]]:
    """Every `ScaledCayley` in `module`: names for its matrices, itself, and the packed parameter it reads if known."""
    _check_module(module)
    known: set[ScaledCayley] = set()
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, OrthogonalRecurrent) and part.orthogonal:
            for suffix, directions in part._layers:
                cayley = getattr(part, f"cayley{suffix}")
                known.add(cayley)
                names = [f"{prefix}weight_hh{direction}.{row}" for direction in directions for row in part.orthogonal]
                yield names, cayley, getattr(part, f"skew{suffix}")
        elif isinstance(part, ParametrizationList) and isinstance(part[0], ScaledCayley):
            known.add(part[0])
            yield _numbered(path.replace("parametrizations.", ""), part[0]), part[0], part.original
        elif isinstance(part, ScaledCayley) and part not in known:
            yield _numbered(path or "matrix", part), part, None


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}; pass the model")


def _numbered(name: str, cayley: ScaledCayley) -> list[str]:
    count = cayley.updates.numel()
    return [name] if count == 1 else [f"{name}.{index}" for index in range(count)]
