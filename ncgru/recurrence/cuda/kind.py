"""What distinguishes the programs of a recurrence, and what of a GPU their launches depend on."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

FLOAT32 = "float32"
GATES = {"before": 3, "after": 3, "none": 1}

_STORAGE = {FLOAT32: 0, "bfloat16": 1, "float16": 2}
_RESET = {"before": 0, "after": 1, "none": 2}
_PHI = {"modrelu": 0, "tanh": 1, "relu": 2}


@dataclass(frozen=True)
class Kind:
    """A kind of recurrence: one compiled program each, for any T, B and number of directions.

    Attributes:
        hidden: H.
        storage: the dtype of the projected input: "float32", "bfloat16" or "float16".
        reset: "before", "after" or "none".
        nonlinearity: "modrelu", "tanh" or "relu".
        tf32: whether float32 products may be taken with tf32 operands.
    """

    hidden: int
    storage: str
    reset: str
    nonlinearity: str
    tf32: bool = False

    @property
    def defines(self) -> Mapping[str, int]:
        """The macros that all programs have."""
        return {
            "HIDDEN": self.hidden,
            "STORAGE": _STORAGE[self.storage],
            "RESET": _RESET[self.reset],
            "PHI": _PHI[self.nonlinearity],
        }

    @property
    def gates(self) -> int:
        return GATES[self.reset]


@functools.lru_cache(maxsize=1024)
def kind_of(hidden: int, dtype: torch.dtype, reset: str, nonlinearity: str, tf32: bool) -> Kind:
    """The kind whose projected input has this dtype."""
    return Kind(hidden, storage_of(dtype), reset, nonlinearity, tf32)


@dataclass(frozen=True)
class Limits:
    """What a GPU offers.

    Attributes:
        multiprocessors: how many it has.
        shared: bytes of shared memory that a block may ask for.
        fast_halves: whether its tensor cores add up products of float16 in float32 many times as fast as its other
            cores multiply float32.
    """

    multiprocessors: int
    shared: int
    fast_halves: bool = True


def storage_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
