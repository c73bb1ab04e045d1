"""Recurrent layers of which chosen matrices are orthogonal: the storage that NC-GRU and scoRNN share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ncgru import _checks
from ncgru.nn.base import Recurrent, long_dtype
from ncgru.orthogonal import METHODS, ScaledCayley, packed_size
from ncgru.orthogonal.reading import Reading


class OrthogonalRecurrent(Recurrent):
    """Recurrent layers whose matrices named in `orthogonal` (letters out of `rows`) are orthogonal.

    A layer keeps, beside its input weights and biases:

    - `skew{layer}` [directions·letters, H(H-1)/2]: the trainable numbers, a packed skew-symmetric A for each orthogonal
      matrix, directions outermost;
    - `cayley{layer}`: the `ScaledCayley` that turns them into matrices, all of the layer at once;
    - `weight_hh_free{direction}` [free·H, H]: the rows of the matrices that are not orthogonal, if there are any.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool,
        *,
        orthogonal: str,
        nonlinearity: str,
        negatives: int | Sequence[int] | None,
        inverse: str,
        order: int,
        reset_every: int | None,
        backend: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, nonlinearity, backend, device, dtype)
        _checks.one_of("inverse", inverse, METHODS)
        _checks.positive_int("order", order, "pass 1, 2 (the paper's), 3, ...")
        if reset_every is not None:
            _checks.positive_int("reset_every", reset_every, "pass None for never")
        self.orthogonal = _letters(orthogonal, self.rows)
        self.negatives = _negatives(negatives, self.orthogonal, hidden_size)
        self.inverse = inverse
        self.order = order
        self.reset_every = reset_every

    def _add_recurrent(self, suffix: str, directions: tuple[str, ...]) -> None:
        size = self.hidden_size
        free = len(self.rows) - len(self.orthogonal)
        if free:
            for direction in directions:
                self._add_parameter(f"weight_hh_free{direction}", free * size, size)
        if self.orthogonal:
            count = len(directions) * len(self.orthogonal)
            dtype = long_dtype(self._dtype)
            cayley = ScaledCayley(
                size,
                (count,),
                negatives=list(self.negatives) * len(directions),
                inverse=self.inverse,
                order=self.order,
                reset_every=self.reset_every,
                device=self._device,
                dtype=dtype,
            )
            self._add_parameter(f"skew{suffix}", count, packed_size(size), dtype=dtype)
            self.add_module(f"cayley{suffix}", cayley)

    @property
    def _structured(self) -> str:
        return self.orthogonal

    def _reading(self, suffix: str) -> Reading | None:
        cayley = self._modules.get(f"cayley{suffix}")
        # A subclass, or whatever else somebody may have put there, is called as the module that it is.
        return cayley.reading(self._parameter(f"skew{suffix}")) if type(cayley) is ScaledCayley else None

    def _matrices(self, suffix: str, directions: tuple[str, ...]) -> Tensor | None:
        if not self.orthogonal:
            return None
        matrices: Tensor = getattr(self, f"cayley{suffix}")(self._parameter(f"skew{suffix}"))
        return matrices

    def _free_letters(self) -> str:
        return "".join(letter for letter in self.rows if letter not in self.orthogonal)

    @torch.no_grad()
    def reset_recurrent(self, init: str = "cayley", generator: torch.Generator | None = None) -> None:
        """Draw every orthogonal matrix anew; D is the one asked for, or another where the drawn matrix needs it.

        Args:
            init: "cayley" (2×2 rotations by angles from (0, π/2), as scoRNN), "henaff" (angles from (-π, π)) or "haar"
                (uniform over all orthogonal matrices).
            generator: where the random numbers come from; PyTorch's global one if None.
        """
        for suffix, _ in self._layers:
            if self.orthogonal:
                packed = getattr(self, f"cayley{suffix}").sample(init, generator=generator)
                getattr(self, f"skew{suffix}").copy_(packed)

    @torch.no_grad()
    def set_weight_hh(self, weight: Tensor, layer: int = 0, reverse: bool = False) -> dict[str, float]:
        """Set the recurrent matrices of one layer and direction from given ones.

        Free matrices are copied. An orthogonal one becomes the orthogonal matrix nearest to the given one; where that
        needs another D than the present, D is found and kept in the state.

        Args:
            weight: [G·H, H], in the row order of `rows` (r, u, c).
            layer: which layer.
            reverse: the reverse direction of a bidirectional module.

        Returns:
            For each orthogonal letter, the Frobenius distance from the given matrix to the one now set.
        """
        size = self.hidden_size
        suffix, directions = self._layer_at(layer)
        if reverse and len(directions) == 1:
            raise ValueError("reverse must be False for a module with one direction, was True; leave it out")
        _checks.shape(
            "weight", _checks.tensor("weight", weight, "pass the stacked matrices"),
            (len(self.rows) * size, size), f"[{len(self.rows)}*hidden_size, hidden_size]",
        )  # fmt: skip
        if weight.is_meta or not weight.is_floating_point():
            raise TypeError(f"weight must hold real numbers, got {weight.dtype} on {weight.device}; convert it")
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("weight must be finite, it has NaN or infinite entries; check where it came from")
        blocks = dict(zip(self.rows, weight.split(size), strict=True))
        if self._free_letters():
            free = getattr(self, f"weight_hh_free{directions[reverse]}")
            free.copy_(torch.cat([blocks[letter] for letter in self._free_letters()]))
        if not self.orthogonal:
            return {}
        first = int(reverse) * len(self.orthogonal)
        chosen = list(range(first, first + len(self.orthogonal)))
        skew: Tensor = getattr(self, f"skew{suffix}")
        given = torch.stack([blocks[letter] for letter in self.orthogonal]).to(skew)
        packed, distance = getattr(self, f"cayley{suffix}").assign(given, which=chosen)
        skew[chosen] = packed
        return dict(zip(self.orthogonal, distance.tolist(), strict=True))

    def _layer_at(self, layer: int) -> tuple[str, tuple[str, ...]]:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise TypeError(f"layer must be an int, got {layer!r}; count layers from 0")
        if not 0 <= layer < len(self._layers):
            raise ValueError(f"layer must be from 0 to {len(self._layers) - 1}, got {layer}; count layers from 0")
        return self._layers[layer]

    def skew_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters behind the orthogonal matrices, for an optimiser group with a learning rate of its own."""
        return (param for name, param in self.named_parameters(recurse=False) if name.startswith("skew"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OrthogonalRecurrent:
        """Move and convert as usual, but keep A in float32 under `.half()` and `.bfloat16()`: 16 bits are too few."""
        kept = {id(tensor) for param in self.skew_parameters() for tensor in (param, param.grad)}

        def convert(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            if id(tensor) in kept and long_dtype(converted.dtype) != converted.dtype:
                return tensor.to(converted.device)
            return converted

        super()._apply(convert, recurse)  # type: ignore[no-untyped-call]
        return self


def _letters(orthogonal: object, rows: str) -> str:
    """`orthogonal` in the order of `rows`, checked to be a subset of them."""
    if not isinstance(orthogonal, str):
        raise TypeError(
            f"orthogonal must be a str of letters out of {rows!r}, got {orthogonal!r}; for example 'c' or 'rc'"
        )
    if set(orthogonal) - set(rows) or len(set(orthogonal)) < len(orthogonal):
        raise ValueError(
            f"orthogonal must be letters out of {rows!r}, each at most once, got {orthogonal!r}; "
            "for example 'c', 'rc' or '' for none"
        )
    return "".join(letter for letter in rows if letter in orthogonal)


def _negatives(negatives: object, letters: str, size: int) -> tuple[int, ...]:
    """The number of -1's in D for each letter, checked."""
    if negatives is None:
        negatives = size // 2
    counts = [negatives] * len(letters) if isinstance(negatives, int) else negatives
    if not isinstance(counts, Sequence) or isinstance(counts, str):
        raise TypeError(
            f"negatives must be an int or a sequence of ints, got {negatives!r}; pass the number of -1's in D"
        )
    if len(counts) != len(letters):
        raise ValueError(
            f"negatives must be one int, or one for each of the letters {letters!r} (in this order), "
            f"got {negatives!r}; pass {len(letters)} of them"
        )
    for count in [negatives] if isinstance(negatives, int) else counts:
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(
                f"negatives must be an int or a sequence of ints, got {count!r}; pass the number of -1's in D"
            )
        if not 0 <= count <= size:
            raise ValueError(
                f"negatives must be between 0 and hidden_size={size}, got {count}; pass the number of -1's in D"
            )
    return tuple(counts)
