"""Orthogonal matrices as products of layers of plane rotations (the efficient unitary network's, with real entries).

A layer rotates disjoint pairs of coordinates, x_i' = x_i cos θ - x_j sin θ and x_j' = x_j cos θ + x_i sin θ, in one of
two styles:

- *tunable*: layers A, B, A, B, …, `capacity` of them. A rotates the pairs (0,1), (2,3), …; B the pairs (1,2), (3,4), ….
  Coordinates without a partner stay. A few layers reach a small subset of the orthogonal matrices, cheaply.
- *fft*: log₂ n layers, the k-th pairs coordinates at the distance 2^k, as the fast Fourier transform does; n is a power
  of 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ncgru import _checks

STYLES = ("tunable", "fft")


class RotationLayout:
    """Which pairs of coordinates each layer rotates.

    Args:
        size: n, the size of the matrix.
        capacity: the number of layers; 4 if None in the tunable style. log₂ n, and no other, in the fft style.
        style: "tunable" or "fft".
    """

    def __init__(self, size: int, capacity: int | None = None, style: str = "tunable") -> None:
        self.size = size
        self.style = _checks.one_of("style", style, STYLES)
        self.capacity = _capacity(size, capacity, style)
        self.layers = [self._pairs(index) for index in range(self.capacity)]
        self.counts = [len(pairs) for pairs in self.layers]

    def _pairs(self, layer: int) -> list[tuple[int, int]]:
        if self.style == "tunable":
            first = layer % 2
            return [(i, i + 1) for i in range(first, self.size - 1, 2)]
        distance = 2**layer
        return [(i, i + distance) for i in range(self.size) if not i & distance]

    def partners(self) -> dict[str, Tensor]:
        """Tensors [capacity, n] named as `rotation_product` takes them.

        Each coordinate's `partner`, the `place` of its angle in the packed angles, and its `sign`: -1 for the first of
        a pair, +1 for the second, 0 for a coordinate that stays.
        """
        partner = torch.arange(self.size, device="cpu").repeat(self.capacity, 1)
        place = torch.zeros_like(partner)
        sign = torch.zeros(partner.shape, device="cpu")
        angle = 0
        for layer, pairs in enumerate(self.layers):
            for first, second in pairs:
                partner[layer, first], partner[layer, second] = second, first
                place[layer, first] = place[layer, second] = angle
                sign[layer, first], sign[layer, second] = -1, 1
                angle += 1
        return {"partner": partner, "place": place, "sign": sign}


def rotation_product(angles: Tensor, partner: Tensor, place: Tensor, sign: Tensor) -> Tensor:
    """The matrix F_L ··· F_1 of the rotation layers; F_1 acts first.

    Args:
        angles: [..., total], the packed angles.
        partner: [L, n], with `place` and `sign` from `RotationLayout.partners`.
        place: [L, n].
        sign: [L, n].

    Returns:
        [..., n, n], differentiable in the angles.
    """
    size = partner.shape[1]
    if angles.shape[-1] == 0:  # n = 1, or layers without pairs
        return torch.eye(size, dtype=angles.dtype, device=angles.device).expand(*angles.shape[:-1], size, size)
    spread = angles[..., place]  # [..., L, n]
    moving = sign.abs().to(angles.dtype)
    cosine = (spread.cos() * moving + (1 - moving)).unsqueeze(-1)
    sine = (spread.sin() * sign.to(angles.dtype)).unsqueeze(-1)
    product = torch.eye(size, dtype=angles.dtype, device=angles.device)
    for layer in range(partner.shape[0]):
        product = cosine[..., layer, :, :] * product + sine[..., layer, :, :] * product[..., partner[layer], :]
    return product


def _capacity(size: int, capacity: int | None, style: str) -> int:
    if capacity is not None:
        _checks.positive_int("capacity", capacity, "pass the number of rotation layers")
    if style == "tunable":
        return 4 if capacity is None else capacity
    if size & (size - 1) or size < 2:
        raise ValueError(
            f"hidden_size must be a power of 2, at least 2, for style='fft', got {size}; use another size or "
            "style='tunable'"
        )
    layers = int(math.log2(size))
    if capacity not in (None, layers):
        raise ValueError(f"capacity must be log2(hidden_size)={layers} for style='fft', got {capacity}; leave it out")
    return layers
