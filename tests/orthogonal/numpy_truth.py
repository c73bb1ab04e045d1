"""Algorithm 1 of the paper and three optimisers in NumPy float64, on the full matrix A: an independent second opinion.

Nothing here uses torch or the library. Matrices are [n, n]; D is given by its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
Optimiser = Callable[[Array], Array]  # gradient -> δA, to be subtracted


def skew_from_packed(packed: Array, n: int) -> Array:
    """A from its strict upper triangle, row by row."""
    skew = np.zeros((n, n))
    place = 0
    for i in range(n):
        for j in range(i + 1, n):
            skew[i, j], skew[j, i] = packed[place], -packed[place]
            place += 1
    return skew


def scaled_cayley(skew: Array, signs: Array) -> Array:
    """U = (I+A)^-1 (I-A) D."""
    identity = np.eye(len(skew))
    result: Array = np.linalg.inv(identity + skew) @ (identity - skew) @ np.diag(signs)
    return result


class Loss:
    """A quadratic fit to a target plus a linear term; `gradient` is its derivative in U."""

    def __init__(self, n: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.target = random.standard_normal((n, n))
        self.linear = random.standard_normal((n, n))

    def gradient(self, u: Array) -> Array:
        """Derivative of ½‖U - target‖² + <linear, U>."""
        gradient: Array = u - self.target + self.linear
        return gradient


def sgd(rate: float) -> Optimiser:
    """Plain gradient descent."""
    return lambda gradient: rate * gradient


def adam(rate: float, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8) -> Optimiser:
    """Adam with bias correction."""
    state = {"t": 0.0}
    first: Array | float = 0.0
    second: Array | float = 0.0

    def step(gradient: Array) -> Array:
        nonlocal first, second
        state["t"] += 1
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        mean = first / (1 - beta1 ** state["t"])
        spread = np.sqrt(second / (1 - beta2 ** state["t"]))
        delta: Array = rate * np.asarray(mean) / (spread + epsilon)
        return delta

    return step


def rmsprop(rate: float, alpha: float = 0.99, epsilon: float = 1e-8) -> Optimiser:
    """RMSprop without momentum."""
    square: Array | float = 0.0

    def step(gradient: Array) -> Array:
        nonlocal square
        square = alpha * square + (1 - alpha) * gradient**2
        return rate * gradient / (np.sqrt(np.asarray(square)) + epsilon)

    return step


class Algorithm1:
    """The paper's update rule, one call of `step` an iteration; a step is exact every `reset_every` of them."""

    def __init__(self, skew: Array, signs: Array, order: int, reset_every: int | None) -> None:
        self.skew = skew
        self.d = np.diag(signs)
        self.order = order
        self.reset_every = reset_every
        self.identity = np.eye(len(skew))
        self.inverse: Array = np.linalg.inv(self.identity + skew)
        self.u: Array = self.inverse @ (self.identity - skew) @ self.d
        self.k = 0

    def step(self, loss: Loss, optimiser: Optimiser) -> None:
        """One iteration: V, δA, A, Ã, U, in the order of the paper."""
        self.k += 1
        v = self.inverse.T @ loss.gradient(self.u) @ (self.d + self.u.T)
        delta = optimiser(v.T - v)
        self.skew = self.skew - delta
        if self.reset_every is not None and self.k % self.reset_every == 0:
            self.inverse = np.linalg.inv(self.identity + self.skew)
        else:
            ratio = self.inverse @ delta
            series, power = self.identity.copy(), self.identity.copy()
            for _ in range(self.order):
                power = power @ ratio
                series = series + power
            self.inverse = series @ self.inverse
        self.u = self.inverse @ (self.identity - self.skew) @ self.d
