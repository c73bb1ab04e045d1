"""scoRNN: an ungated recurrent network with one orthogonal matrix, h' = modReLU(W x + U h; b)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ncgru.nn.orthogonal import OrthogonalRecurrent
from ncgru.nn.sequence import CellModule, SequenceModule


class _ScoRNNParameters(OrthogonalRecurrent):
    rows = "c"
    reset = "none"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters anew: W uniform in ±0.01, b = 0, U by rotations with angles from (0, π/2)."""
        for _, directions in self._layers:
            for direction in directions:
                nn.init.uniform_(getattr(self, f"weight_ih{direction}"), -0.01, 0.01)
                if self._biased:
                    nn.init.zeros_(getattr(self, f"bias{direction}"))
        self.reset_recurrent()

    def _repr_options(self) -> Iterator[str]:
        if self.nonlinearity != "modrelu":
            yield f"nonlinearity={self.nonlinearity!r}"
        yield from super()._repr_options()


class ScoRNN(SequenceModule, _ScoRNNParameters):
    """scoRNN over whole sequences, with the calling convention of `nn.RNN`.

    Args:
        input_size: the number of input features.
        hidden_size: the number of hidden units H.
        num_layers: how many layers are stacked.
        bias: whether to train modReLU's threshold.
        batch_first: whether input and output are [B, T, features] rather than [T, B, features].
        dropout: the share of outputs dropped between layers while training.
        bidirectional: whether each layer also runs backwards in time.
        nonlinearity: "modrelu", "tanh" or "relu".
        negatives: the number of -1's in D; H // 2 if None.
        inverse: how (I+A)⁻¹ is followed: "exact" as scoRNN's authors do, "hyperpower" or "neumann".
        order: the order of the series.
        reset_every: make every k-th update exact; never if None.
        backend: which implementation runs the time loop; see `resolve_backend`.
        recompute: whether to find the gates once more for the backward rather than keep them, which saves memory.
        device: where the parameters live.
        dtype: the parameters' dtype.

    Examples:
        >>> output, h_n = ScoRNN(10, 20)(torch.randn(5, 3, 10))
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
        nonlinearity: str = "modrelu",
        negatives: int | None = None,
        inverse: str = "exact",
        order: int = 2,
        reset_every: int | None = None,
        backend: str = "auto",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, hidden_size, bias, orthogonal="c", nonlinearity=nonlinearity, negatives=negatives,
            inverse=inverse, order=order, reset_every=reset_every, backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self._build_layers(num_layers, batch_first, dropout, bidirectional, recompute)
        self.reset_parameters()


class ScoRNNCell(CellModule, _ScoRNNParameters):
    """One step of scoRNN, with the calling convention of `nn.RNNCell`.

    Args:
        input_size: the number of input features.
        hidden_size: the number of hidden units.
        bias: whether to train modReLU's threshold.
        nonlinearity: "modrelu", "tanh" or "relu".
        negatives: the number of -1's in D.
        inverse: how (I+A)⁻¹ is followed.
        order: the order of the series.
        reset_every: make every k-th update exact.
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
        nonlinearity: str = "modrelu",
        negatives: int | None = None,
        inverse: str = "exact",
        order: int = 2,
        reset_every: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, hidden_size, bias, orthogonal="c", nonlinearity=nonlinearity, negatives=negatives,
            inverse=inverse, order=order, reset_every=reset_every, backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self._add_layer("", input_size, bidirectional=False)
        self.reset_parameters()
