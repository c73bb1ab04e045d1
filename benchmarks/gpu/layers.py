"""Who is measured: layers of one direction, as calls of a forward pass and of a training step.

A training step is forward, backward, and the gradients of the input and of all weights. NCGRU has one orthogonal
matrix; its step also moves A, as an optimiser would, so that each step has an orthogonal update to make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import peers
from benchmarks.gpu.shapes import GRU, LOOP, LSTM, OURS, PAPER, REFERENCE, TF32, Shape
from ncgru import NCGRU
from ncgru.recurrence import unrolled

STILL, FREE, UPDATE = "NCGRU, A not moved", "NCGRU, no orthogonal matrix", "orthogonal update alone"
MOVE = 1e-3
"""Size of A's entries' steps times √n: that of Adam at its usual learning rate."""
REFERENCE_STEPS = 64
"""Steps of time that plain PyTorch runs, of more; the time of all is inferred."""


@dataclass(frozen=True)
class Layer:
    """What can be timed.

    Attributes:
        steps: steps of time that a call runs.
        forward: inference, if it can be run alone.
        training: forward, backward and A's move.
        module: whose counters can be looked at afterwards.
    """

    steps: int
    forward: Callable[[], object] | None
    training: Callable[[], object]
    module: nn.Module | None = None


def set_precision(dtype: str) -> None:
    """Allow tf32 to products and to cuDNN where `dtype` is "tf32", and to nobody elsewhere."""
    torch.backends.cuda.matmul.allow_tf32 = dtype == TF32
    torch.backends.cudnn.allow_tf32 = dtype == TF32


def torch_dtype(dtype: str) -> torch.dtype:
    found = torch.float32 if dtype == TF32 else getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found


class PlainLoop(nn.Module):
    """NC-GRU's cell as a loop over time, with free matrices, so that no update of them is counted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.randn(3 * size, size) / math.sqrt(size))
        self.bias = nn.Parameter(torch.zeros(3 * size))
        self.weight_hh = nn.Parameter(torch.linalg.qr(torch.randn(3, size, size))[0].reshape(3 * size, size))
        self.threshold = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """All states."""
        projected = nn.functional.linear(x, self.weight_ih, self.bias)
        initial = x.new_zeros(x.shape[1], self.weight_hh.shape[1])
        return (unrolled(projected, initial, self.weight_hh, self.threshold, None, "before", "modrelu", False),)


Builder = Callable[[], Layer]


def contestants(shape: Shape, dtype: str, device: str = "cuda") -> Iterator[tuple[str, Builder]]:
    """Names of those who can run this, and what builds them."""
    size, kind = shape.n, torch_dtype(dtype)

    def ours(**settings: Any) -> NCGRU:
        return NCGRU(size, size, device=device, dtype=kind, **settings)

    yield OURS, lambda: of_module(ours, shape, moving=True)
    for name, made in ((GRU, nn.GRU), (LSTM, nn.LSTM)):
        yield name, partial(of_module, partial(made, size, size, device=device, dtype=kind), shape)
    if shape in PAPER:
        short = shape._replace(T=min(shape.T, REFERENCE_STEPS))
        yield LOOP, lambda: of_module(lambda: PlainLoop(size).to(device), short)
        yield REFERENCE, lambda: of_module(lambda: ours(backend="reference"), short, moving=True)
        yield STILL, lambda: of_module(ours, shape)
        yield FREE, lambda: of_module(lambda: ours(orthogonal=""), shape)
        yield UPDATE, lambda: update_alone(ours())
    for name, build in peers.available(dtype).items():
        yield name, partial(of_module, partial(build, size, kind), shape)


def of_module(make: Callable[[], nn.Module], shape: Shape, *, moving: bool = False) -> Layer:
    """Two recurrent modules, for training and for inference, that take [T, B, n] and return their output first."""
    module, other = make(), make().eval()
    parameters = list(module.parameters())
    weight = parameters[0]
    random = torch.Generator(weight.device).manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(shape, generator=random, device=weight.device).to(weight.dtype)

    x, gradient = normal().requires_grad_(), normal()
    moves = _moves(module) if moving else []

    def forward() -> object:
        with torch.no_grad():
            return other(x)[0]

    def training() -> object:
        gradients = torch.autograd.grad(module(x)[0], [x, *parameters], gradient)
        _move(moves)
        return gradients

    return Layer(shape.T, forward, training, module)


def update_alone(module: NCGRU) -> Layer:
    """Reading the orthogonal matrix of `module` after a move, and ∇A from a gradient of it."""
    (packed,) = module.skew_parameters()
    (cayley,) = (part for part in module.modules() if type(part).__name__ == "ScaledCayley")
    moves = _moves(module)
    gradient = torch.ones_like(cayley(packed).detach())

    def training() -> object:
        found = torch.autograd.grad(cayley(packed), packed, gradient)
        _move(moves)
        return found

    return Layer(1, None, training, module)


def _moves(module: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """A's and small steps of them. They add up, over thousands of calls, to a few times the size of A at most."""
    if not isinstance(module, NCGRU):
        return []
    scale = MOVE / math.sqrt(module.hidden_size)
    return [(packed, torch.randn_like(packed).sign_().mul_(scale)) for packed in module.skew_parameters()]


@torch.no_grad()
def _move(moves: list[tuple[nn.Parameter, Tensor]]) -> None:
    for packed, step in moves:
        packed.add_(step)
