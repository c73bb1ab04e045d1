"""GORU: a gated unit whose candidate uses an orthogonal matrix O made of plane rotations, reset after the product.

    r = σ(W_r x + U_r h + b_r)      u = σ(W_u x + U_u h + b_u)
    c = modReLU(W_c x + r ⊙ (O h); b_c)      h' = (1 - u) ⊙ h + u ⊙ c

Its authors call g what is 1 - u here, which negates the parameters of that gate and changes nothing else: their initial
values are symmetric about zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ncgru.nn.base import Recurrent
from ncgru.nn.rotations import RotationLayout, rotation_product
from ncgru.nn.sequence import CellModule, SequenceModule

# GORU's modReLU takes the magnitude as |z| + 0.001.
MAGNITUDE_OFFSET = 0.001


class _GORUParameters(Recurrent):
    rows = "ruc"
    reset = "after"
    threshold_offset = MAGNITUDE_OFFSET
    _structured = "c"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        *,
        capacity: int | None,
        style: str,
        nonlinearity: str,
        backend: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, nonlinearity, backend, device, dtype)
        self.layout = RotationLayout(hidden_size, capacity, style)
        self._place_layout(self._device)

    def _add_recurrent(self, suffix: str, directions: tuple[str, ...]) -> None:
        size = self.hidden_size
        for direction in directions:
            self._add_parameter(f"weight_hh_free{direction}", 2 * size, size)
            self._add_parameter(f"angles{direction}", sum(self.layout.counts))

    def _matrices(self, suffix: str, directions: tuple[str, ...]) -> Tensor:
        angles = torch.stack([self._long(f"angles{direction}") for direction in directions])
        return rotation_product(angles, self.partner, self.place, self.sign)

    def _place_layout(self, device: torch.device) -> None:
        """Put the rotations' index tensors, which follow from the sizes, on a device."""
        for name, index in self.layout.partners().items():
            self.register_buffer(name, index.to(device), persistent=False)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As usual; a module made without memory gets its index tensors with the parameters."""
        super()._load_from_state_dict(*args, **kwargs)
        self._place_layout(next(self.parameters()).device)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters anew, as GORU's authors do.

        Weights are uniform in ±0.01 and angles in ±π; b_r is 2, b_u uniform in ±√(3/H), b_c 0.01 (0 where additive).
        """
        size = self.hidden_size
        self._place_layout(next(self.parameters()).device)
        for _, directions in self._layers:
            for direction in directions:
                nn.init.uniform_(getattr(self, f"weight_ih{direction}"), -0.01, 0.01)
                nn.init.uniform_(getattr(self, f"weight_hh_free{direction}"), -0.01, 0.01)
                nn.init.uniform_(getattr(self, f"angles{direction}"), -math.pi, math.pi)
                if self._biased:
                    reset, update, candidate = getattr(self, f"bias{direction}").split(size)
                    nn.init.constant_(reset, 2.0)
                    nn.init.uniform_(update, -math.sqrt(3 / size), math.sqrt(3 / size))
                    nn.init.constant_(candidate, 0.01 if self.nonlinearity == "modrelu" else 0.0)

    def _repr_options(self) -> Iterator[str]:
        yield f"capacity={self.layout.capacity}, style={self.layout.style!r}"
        if self.nonlinearity != "modrelu":
            yield f"nonlinearity={self.nonlinearity!r}"
        yield from super()._repr_options()


class GORU(SequenceModule, _GORUParameters):
    """GORU over whole sequences, with the calling convention of `nn.GRU`.

    Args:
        input_size: the number of input features.
        hidden_size: the number of hidden units H.
        num_layers: how many layers are stacked.
        bias: whether to train gate biases and modReLU's threshold.
        batch_first: whether input and output are [B, T, features] rather than [T, B, features].
        dropout: the share of outputs dropped between layers while training.
        bidirectional: whether each layer also runs backwards in time.
        capacity: how many layers of rotations make up O; 4 if None (log₂ H in the fft style).
        style: "tunable" (neighbours, any H) or "fft" (butterflies, H a power of 2).
        nonlinearity: "modrelu", "tanh" or "relu".
        backend: which implementation runs the time loop; see `resolve_backend`.
        recompute: whether to find the gates once more for the backward rather than keep them, which saves memory.
        device: where the parameters live.
        dtype: the parameters' dtype.

    Examples:
        >>> output, h_n = GORU(10, 20)(torch.randn(5, 3, 10))
        >>> output.shape, h_n.shape
        (torch.Size([5, 3, 20]), torch.Size([1, 3, 20]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        capacity: int | None = None,
        style: str = "tunable",
        nonlinearity: str = "modrelu",
        backend: str = "auto",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, hidden_size, bias, capacity=capacity, style=style, nonlinearity=nonlinearity,
            backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self._build_layers(num_layers, batch_first, dropout, bidirectional, recompute)
        self.reset_parameters()


class GORUCell(CellModule, _GORUParameters):
    """One step of GORU, with the calling convention of `nn.GRUCell`.

    Args:
        input_size: the number of input features.
        hidden_size: the number of hidden units.
        bias: whether to train gate biases and modReLU's threshold.
        capacity: how many layers of rotations make up O.
        style: "tunable" or "fft".
        nonlinearity: "modrelu", "tanh" or "relu".
        backend: which implementation runs the step.
        device: where the parameters live.
        dtype: the parameters' dtype.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        capacity: int | None = None,
        style: str = "tunable",
        nonlinearity: str = "modrelu",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, hidden_size, bias, capacity=capacity, style=style, nonlinearity=nonlinearity,
            backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self._add_layer("", input_size, bidirectional=False)
        self.reset_parameters()
