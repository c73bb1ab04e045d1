"""Orthogonal matrices that any optimiser can train: the scaled Cayley map and the following of its inverse."""

from ncgru.orthogonal.cayley import cayley, inverse_cayley, nearest_orthogonal
from ncgru.orthogonal.inverse import METHODS
from ncgru.orthogonal.parametrization import ScaledCayley, orthogonal
from ncgru.orthogonal.skew import INITS, pack, packed_size, unpack

__all__ = [
    "INITS",
    "METHODS",
    "ScaledCayley",
    "cayley",
    "inverse_cayley",
    "nearest_orthogonal",
    "orthogonal",
    "pack",
    "packed_size",
    "unpack",
]
