"""One recurrent layer of any kind, with the same calling convention for all.

Shapes: T time, B batch, I input size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ncgru.lab.models.initial import initialise
from ncgru.lab.recipes.recipe import ModelSpec
from ncgru.lab.released import follow_as_released
from ncgru.nn import GORU, NCGRU, ScoRNN


class RecurrentLayer(nn.Module):
    """A layer of `hidden_size` units of the model's kind, initialised.

    Args:
        spec: the model.
        input_size: I.
        hidden_size: H.
        skew_lr: learning rate of the A's, which the released code's update needs.
    """

    def __init__(self, spec: ModelSpec, input_size: int, hidden_size: int, skew_lr: float) -> None:
        super().__init__()
        self.cell = _BUILDERS[spec.kind](spec, input_size, hidden_size)
        self.state_size = 2 if spec.kind == "lstm" else 1
        initialise(self.cell, spec)
        if isinstance(self.cell, NCGRU) and spec.released:
            follow_as_released(self.cell, skew_lr, weight_decay=spec.weight_decay_recurrent)

    def forward(self, input: Tensor, state: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run over [T, B, I]; `state` holds `state_size` tensors [1, B, H]. Returns [T, B, H] and the last state."""
        if isinstance(self.cell, nn.LSTM):
            output, (hidden, memory) = self.cell(input, state)
            return output, (hidden, memory)
        output, hidden = self.cell(input, None if state is None else state[0])
        return output, (hidden,)

    def gate_matrices(self) -> Tensor | None:
        """The recurrent matrices that are trained freely [k·H, H], where the layer keeps them apart."""
        return getattr(self.cell, "weight_hh_free_l0", None)


def _torch_layer(cls: type[nn.LSTM] | type[nn.GRU]) -> Callable[[ModelSpec, int, int], nn.Module]:
    def build(spec: ModelSpec, input_size: int, hidden_size: int) -> nn.Module:
        cell = cls(input_size, hidden_size)
        if spec.init == "tensorflow":
            # TensorFlow's cells have one bias a gate, PyTorch's two: the second stays zero and is not trained.
            second = dict(cell.named_parameters())["bias_hh_l0"]
            nn.init.zeros_(second).requires_grad_(False)
        return cell

    return build


def _cho_gru(spec: ModelSpec, input_size: int, hidden_size: int) -> nn.Module:
    return NCGRU(input_size, hidden_size, orthogonal="", nonlinearity="tanh")


def _nc_gru(spec: ModelSpec, input_size: int, hidden_size: int) -> nn.Module:
    return NCGRU(
        input_size,
        hidden_size,
        orthogonal=spec.orthogonal,
        negatives=spec.negatives,
        inverse=spec.inverse,
        order=spec.order,
        reset_every=spec.reset_every,
    )


def _scornn(spec: ModelSpec, input_size: int, hidden_size: int) -> nn.Module:
    return ScoRNN(
        input_size,
        hidden_size,
        negatives=spec.negatives,
        inverse=spec.inverse,
        order=spec.order,
        reset_every=spec.reset_every,
    )


def _goru(spec: ModelSpec, input_size: int, hidden_size: int) -> nn.Module:
    return GORU(input_size, hidden_size, capacity=spec.capacity)


_BUILDERS: dict[str, Callable[[ModelSpec, int, int], nn.Module]] = {
    "lstm": _torch_layer(nn.LSTM),
    "gru": _torch_layer(nn.GRU),
    "cho-gru": _cho_gru,
    "scornn": _scornn,
    "goru": _goru,
    "nc-gru": _nc_gru,
}
