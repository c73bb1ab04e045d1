"""Recurrent layers in NumPy, float64, one sequence and one step at a time: what the modules are held against."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Weights = dict[str, Array]


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def activate(name: str, z: Array, bias: Array) -> Array:
    """The candidate's nonlinearity with its bias: a threshold for modReLU, additive otherwise."""
    if name == "modrelu":
        return np.sign(z) * np.maximum(np.abs(z) + bias, 0)
    return np.tanh(z + bias) if name == "tanh" else np.maximum(z + bias, 0)


def step(kind: str, nonlinearity: str, x: Array, h: Array, w: Array, u: Array, bias: Array) -> Array:
    """One step of one unit; `kind` is "before", "after" or "none", as the module's reset gate acts."""
    n = h.shape[0]
    if kind == "none":
        return activate(nonlinearity, w @ x + u @ h, bias)
    reset = sigmoid(w[:n] @ x + u[:n] @ h + bias[:n])
    update = sigmoid(w[n : 2 * n] @ x + u[n : 2 * n] @ h + bias[n : 2 * n])
    inner = u[2 * n :] @ (reset * h) if kind == "before" else reset * (u[2 * n :] @ h)
    candidate = activate(nonlinearity, w[2 * n :] @ x + inner, bias[2 * n :])
    return (1 - update) * h + update * candidate


def run(
    kind: str, nonlinearity: str, weights: Weights, x: Array, h0: Array, layers: int, bidirectional: bool
) -> tuple[Array, Array]:
    """All layers over one sequence: x [T, I] and h0 [layers·directions, H] to output [T, directions·H] and h_n."""
    finals: list[Array] = []
    for layer in range(layers):
        outputs = []
        for direction in ["", "_reverse"] if bidirectional else [""]:
            suffix = f"_l{layer}{direction}"
            h = h0[len(finals)]
            states: list[Array] = []
            for row in x[::-1] if direction else x:
                h = step(kind, nonlinearity, row, h, *(weights[key + suffix] for key in ("w", "u", "bias")))
                states.append(h)
            finals.append(h)
            outputs.append(np.stack(states[::-1] if direction else states))
        x = np.concatenate(outputs, axis=1)
    return x, np.stack(finals)


def rotation_matrix(angles: Array, size: int, layers: list[list[tuple[int, int]]]) -> Array:
    """The product of full plane-rotation matrices, the first layer acting first."""
    product = np.eye(size)
    remaining = list(angles)
    for pairs in layers:
        for i, j in pairs:
            angle = remaining.pop(0)
            plane = np.eye(size)
            plane[i, i] = plane[j, j] = np.cos(angle)
            plane[i, j], plane[j, i] = -np.sin(angle), np.sin(angle)
            product = plane @ product
    assert not remaining
    return product
