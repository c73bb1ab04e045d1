"""NC-GRU: a gated recurrent unit with orthogonal recurrent matrices and the reset gate before the product.

    r = σ(W_r x + U_r h + b_r)      u = σ(W_u x + U_u h + b_u)
    c = φ(W_c x + U_c (r ⊙ h))      h' = (1 - u) ⊙ h + u ⊙ c

φ is modReLU with a trained threshold; with tanh or relu it has an additive bias instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ncgru.nn.base import he_uniform_
from ncgru.nn.orthogonal import OrthogonalRecurrent
from ncgru.nn.sequence import CellModule, SequenceModule


class _NCGRUParameters(OrthogonalRecurrent):
    rows = "ruc"
    reset = "before"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters anew.

        Gate blocks are He-uniform over the fan-in of what is trained freely: I + H where the recurrent matrix is free,
        I where it is orthogonal; W_c is He-uniform over I, a free U_c over H. Gate biases and additive biases are 0,
        modReLU's threshold is uniform in ±0.1. Orthogonal matrices start as `reset_recurrent` says.
        """
        for _, directions in self._layers:
            for direction in directions:
                self._reset_direction(direction)
        self.reset_recurrent()

    def _reset_direction(self, direction: str) -> None:
        weight: Tensor = getattr(self, f"weight_ih{direction}")
        size, inputs = self.hidden_size, weight.shape[1]
        free = self._free_letters()
        fan_in = {letter: inputs + size if letter in free and letter != "c" else inputs for letter in self.rows}
        for letter, block in zip(self.rows, weight.split(size), strict=True):
            he_uniform_(block, fan_in[letter])
        if free:
            for letter, block in zip(free, getattr(self, f"weight_hh_free{direction}").split(size), strict=True):
                he_uniform_(block, size if letter == "c" else fan_in[letter])
        if self._biased:
            bias: Tensor = getattr(self, f"bias{direction}")
            bias.zero_()
            if self.nonlinearity == "modrelu":
                nn.init.uniform_(bias[-size:], -0.1, 0.1)

    def _repr_options(self) -> Iterator[str]:
        yield f"orthogonal={self.orthogonal!r}"
        if self.nonlinearity != "modrelu":
            yield f"nonlinearity={self.nonlinearity!r}"
        yield from super()._repr_options()


class NCGRU(SequenceModule, _NCGRUParameters):
    """NC-GRU over whole sequences, in the place of `nn.GRU`.

    The matrices named in `orthogonal` stay orthogonal under any optimiser: `loss.backward(); optimizer.step()` is all.
    The update gate is 1 - z of `nn.GRU`, and the reset gate acts before the recurrent product.

    Args:
        input_size: the number of input features.
        hidden_size: the number of hidden units H.
        num_layers: how many layers are stacked.
        bias: whether to train gate biases and modReLU's threshold (without one modReLU is the identity).
        batch_first: whether input and output are [B, T, features] rather than [T, B, features].
        dropout: the share of outputs dropped between layers while training.
        bidirectional: whether each layer also runs backwards in time.
        orthogonal: which recurrent matrices are orthogonal, any subset of the letters r, u, c; "" for none.
        nonlinearity: "modrelu", "tanh" or "relu"; `nonlinearity="tanh", orthogonal=""` is Cho's GRU.
        negatives: the number of -1's in D, one for all or one for each letter; H // 2 if None.
        inverse: how (I+A)⁻¹ is followed: "hyperpower", "neumann" (the paper's Algorithm 1) or "exact".
        order: the order of the series.
        reset_every: make every k-th update exact; never if None (the guard still acts).
        backend: which implementation runs the time loop; see `resolve_backend`.
        recompute: whether to find the gates once more for the backward rather than keep them, which saves memory.
        device: where the parameters live.
        dtype: the parameters' dtype.

    Examples:
        >>> rnn = NCGRU(10, 20, num_layers=2)
        >>> output, h_n = rnn(torch.randn(5, 3, 10))
        >>> output.shape, h_n.shape
        (torch.Size([5, 3, 20]), torch.Size([2, 3, 20]))
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
        orthogonal: str = "c",
        nonlinearity: str = "modrelu",
        negatives: int | Sequence[int] | None = None,
        inverse: str = "hyperpower",
        order: int = 2,
        reset_every: int | None = None,
        backend: str = "auto",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, hidden_size, bias, orthogonal=orthogonal, nonlinearity=nonlinearity, negatives=negatives,
            inverse=inverse, order=order, reset_every=reset_every, backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self._build_layers(num_layers, batch_first, dropout, bidirectional, recompute)
        self.reset_parameters()

    @classmethod
    def from_gru(cls, gru: nn.GRU, **settings: object) -> NCGRU:
        """A module with the weights of an `nn.GRU`, as far as they can be carried over.

        What changes, and is said in a warning: the reset gate moves before the product, so outputs differ; u is
        1 - z, so that gate's rows change sign; the two biases become one (that of the candidate's recurrent product
        was inside the reset gate); matrices named in `orthogonal` become the nearest orthogonal ones. With modReLU
        the candidate's bias has no place and its threshold starts at zero.

        Args:
            gru: the module to take weights from.
            settings: keyword arguments of `NCGRU` beyond those that `nn.GRU` has.
        """
        if not isinstance(gru, nn.GRU):
            raise TypeError(f"gru must be a torch.nn.GRU, got {type(gru).__name__}; build NCGRU from sizes instead")
        module = cls(
            gru.input_size, gru.hidden_size, gru.num_layers, gru.bias, gru.batch_first, gru.dropout, gru.bidirectional,
            **{"device": gru.weight_ih_l0.device, "dtype": gru.weight_ih_l0.dtype, **settings},  # type: ignore[arg-type]
        )  # fmt: skip
        distances = [
            module._take_gru_direction(gru, layer, reverse)
            for layer in range(gru.num_layers)
            for reverse in ([False, True] if gru.bidirectional else [False])
        ]
        module.train(gru.training)
        far = max((distance for found in distances for distance in found.values()), default=0.0)
        warnings.warn(
            "NCGRU resets before the recurrent product and nn.GRU after it, so outputs differ from the nn.GRU's; "
            f"the orthogonal matrices lie up to {far:.3g} (Frobenius) from the given ones",
            stacklevel=2,
        )
        return module

    @torch.no_grad()
    def _take_gru_direction(self, gru: nn.GRU, layer: int, reverse: bool) -> dict[str, float]:
        name = f"l{layer}_reverse" if reverse else f"l{layer}"
        size = self.hidden_size
        sign = torch.tensor([1.0, -1.0, 1.0]).view(3, 1, 1)  # u = 1 - z, and 1 - σ(a) = σ(-a)

        def flipped(rows: Tensor) -> Tensor:
            return (rows.view(3, size, -1) * sign.to(rows)).reshape(rows.shape)

        getattr(self, f"weight_ih_{name}").copy_(flipped(getattr(gru, f"weight_ih_{name}")))
        if self._biased:
            bias = flipped(getattr(gru, f"bias_ih_{name}") + getattr(gru, f"bias_hh_{name}"))
            if self.nonlinearity == "modrelu":
                bias[-size:] = 0
            getattr(self, f"bias_{name}").copy_(bias)
        return self.set_weight_hh(flipped(getattr(gru, f"weight_hh_{name}")), layer, reverse)


class NCGRUCell(CellModule, _NCGRUParameters):
    """One step of NC-GRU, in the place of `nn.GRUCell`.

    Args:
        input_size: the number of input features.
        hidden_size: the number of hidden units.
        bias: whether to train gate biases and modReLU's threshold.
        orthogonal: as in `NCGRU`, and so are all further arguments.
        nonlinearity: "modrelu", "tanh" or "relu".
        negatives: the number of -1's in D.
        inverse: how (I+A)⁻¹ is followed.
        order: the order of the series.
        reset_every: make every k-th update exact.
        backend: which implementation runs the step.
        device: where the parameters live.
        dtype: the parameters' dtype.

    Examples:
        >>> cell = NCGRUCell(10, 20)
        >>> cell(torch.randn(3, 10), torch.zeros(3, 20)).shape
        torch.Size([3, 20])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        orthogonal: str = "c",
        nonlinearity: str = "modrelu",
        negatives: int | Sequence[int] | None = None,
        inverse: str = "hyperpower",
        order: int = 2,
        reset_every: int | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size, hidden_size, bias, orthogonal=orthogonal, nonlinearity=nonlinearity, negatives=negatives,
            inverse=inverse, order=order, reset_every=reset_every, backend=backend, device=device, dtype=dtype,
        )  # fmt: skip
        self._add_layer("", input_size, bidirectional=False)
        self.reset_parameters()
