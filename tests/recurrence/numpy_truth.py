"""The recurrence as plain NumPy loops over time, rows and units' gates: written from the equations, in float64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def logistic(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def phi(z: Array, threshold: Array | None, nonlinearity: str) -> Array:
    if nonlinearity == "tanh":
        return np.tanh(z)
    if nonlinearity == "relu":
        return np.maximum(z, 0)
    b = np.zeros_like(z) if threshold is None else threshold
    return np.sign(z) * np.maximum(np.abs(z) + b, 0)


def step(p: Array, h: Array, weight: Array, threshold: Array | None, reset: str, nonlinearity: str) -> Array:
    """The next state of one row."""
    if reset == "none":
        return phi(p + weight @ h, threshold, nonlinearity)
    (p_r, p_u, p_c), (w_r, w_u, w_c) = np.split(p, 3), np.split(weight, 3)
    r, u = logistic(p_r + w_r @ h), logistic(p_u + w_u @ h)
    recurrent = w_c @ (r * h) if reset == "before" else r * (w_c @ h)
    return (1 - u) * h + u * phi(p_c + recurrent, threshold, nonlinearity)


def run(
    projected: Array,
    initial: Array,
    weight: Array,
    threshold: Array | None,
    lengths: NDArray[np.int64] | None,
    reset: str,
    nonlinearity: str,
    reverse: bool,
) -> Array:
    """All states [T, B, H]."""
    total, batch, _ = projected.shape
    hidden = np.empty((total, batch, weight.shape[1]))
    for row in range(batch):
        h = initial[row]
        for t in reversed(range(total)) if reverse else range(total):
            if lengths is None or t < lengths[row]:
                h = step(projected[t, row], h, weight, threshold, reset, nonlinearity)
            hidden[t, row] = h
    return hidden
