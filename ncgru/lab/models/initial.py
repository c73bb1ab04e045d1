"""First values, as the released code has them for each task and kind of cell.

TensorFlow's `he_normal` is a normal distribution cut at two standard deviations and widened to keep its variance;
`_he_normal_` is that one. "Glorot" is uniform in ±√(6 / (fan-in + fan-out)), the fans those of TensorFlow's kernels, in
which the weights of x and h, and of several gates, are one matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ncgru.lab.recipes.recipe import ModelSpec
from ncgru.nn import NCGRU
from ncgru.nn.base import he_uniform_
from ncgru.nn.orthogonal import OrthogonalRecurrent

_CUT_NORMAL_DEVIATION = 0.8796256610342398
"""Standard deviation of the standard normal distribution cut at ±2."""


@torch.no_grad()
def initialise(cell: nn.Module, spec: ModelSpec) -> None:
    """Draw the first values that `spec` asks for, where they are not those that the cell has by itself."""
    if isinstance(cell, OrthogonalRecurrent) and spec.angles != "cayley":
        cell.reset_recurrent(spec.angles)
    if isinstance(cell, nn.LSTM) and spec.init == "tensorflow":
        _tensorflow_lstm(cell)
    elif isinstance(cell, nn.GRU) and spec.init == "tensorflow":
        weights = dict(cell.named_parameters())
        _tensorflow_gru(weights["weight_ih_l0"], weights["weight_hh_l0"], weights["bias_ih_l0"], update_bias=1.0)
    elif isinstance(cell, NCGRU) and spec.init == "tensorflow":
        # Our u is one minus theirs.
        _tensorflow_gru(cell.weight_ih_l0, cell.weight_hh_free_l0, cell.bias_l0, update_bias=-1.0)
    elif isinstance(cell, NCGRU) and spec.init == "torch":
        _torch_nc_gru(cell)
    elif isinstance(cell, NCGRU) and spec.init != "he":
        _released_nc_gru(cell, spec.init)


@torch.no_grad()
def initialise_readout(readout: nn.Linear, name: str, input_size: int) -> None:
    """Draw the read-out's first values.

    Args:
        readout: the linear layer.
        name: one of `READOUTS`: "tiny-normal" (parenthesis), "denoise", "glorot" (adding), "glorot-bias" (copying) or
            "language".
        input_size: of the task.
    """
    outputs, inputs = readout.weight.shape
    nn.init.zeros_(readout.bias)
    if name == "tiny-normal":
        nn.init.normal_(readout.weight, std=1 / (inputs + outputs) ** 2)
    elif name == "denoise":
        bound = math.sqrt(6 / (input_size + outputs))
        nn.init.uniform_(readout.weight, -bound, bound)
        nn.init.constant_(readout.bias, 0.01)
    elif name == "language":
        nn.init.uniform_(readout.weight, -0.1, 0.1)
    else:
        _glorot_(readout.weight, inputs, outputs)
        if name == "glorot-bias":
            _glorot_(readout.bias, outputs, outputs)


def _tensorflow_lstm(cell: nn.LSTM) -> None:
    """Rows in the order input, forget, cell, output."""
    size = cell.hidden_size
    weights = dict(cell.named_parameters())
    for name in ("weight_ih_l0", "weight_hh_l0"):
        _glorot_(weights[name], cell.input_size + size, 4 * size)
    for block, value in zip(weights["bias_ih_l0"].split(size), (0.0, 1.0, 0.0, 0.0), strict=True):
        block.fill_(value)


def _tensorflow_gru(weight_ih: Tensor, weight_hh: Tensor, bias: Tensor, *, update_bias: float) -> None:
    """Rows in the order r, z or u, candidate."""
    size = weight_hh.shape[1]
    fan_in = weight_ih.shape[1] + size
    for weight in (weight_ih, weight_hh):
        _glorot_(weight[: 2 * size], fan_in, 2 * size)
        _glorot_(weight[2 * size :], fan_in, size)
    for block, value in zip(bias.split(size), (1.0, update_bias, 0.0), strict=True):
        block.fill_(value)


def _torch_nc_gru(cell: NCGRU) -> None:
    """The language models: gates as in PyTorch's cells, where two biases add up to ours; W_c tiny, threshold 0."""
    size = cell.hidden_size
    bound = 1 / math.sqrt(size)
    gates, candidate = cell.weight_ih_l0.split([2 * size, size])
    nn.init.uniform_(gates, -bound, bound)
    nn.init.uniform_(candidate, -0.01, 0.01)
    if len(cell.orthogonal) < len(cell.rows):
        nn.init.uniform_(cell.weight_hh_free_l0, -bound, bound)
    biases = torch.empty(2, 2 * size).uniform_(-bound, bound)
    cell.bias_l0[: 2 * size] = biases.sum(0)
    cell.bias_l0[2 * size :] = 0.0


def _released_nc_gru(cell: NCGRU, name: str) -> None:
    """What differs from the library's own initialisation, which is the released one for NC-GRU(U_c) in parenthesis.

    - "he-normal-gates" (parenthesis, two matrices): W_r, W_u, U_u He-normal, each by its own fan-in.
    - "he-normal-candidate" (denoise, one matrix): W_c He-normal.
    - "normal-biases" (denoise, two matrices): gates He-uniform by their own fan-in with standard normal biases, W_c
      He-normal.
    """
    size = cell.hidden_size
    inputs = cell.weight_ih_l0.shape[1]
    blocks = {(letter, inputs): block for letter, block in zip("ruc", cell.weight_ih_l0.split(size), strict=True)}
    free = [letter for letter in cell.rows if letter not in cell.orthogonal]
    if free:
        split = cell.weight_hh_free_l0.split(size)
        blocks.update({(letter, size): block for letter, block in zip(free, split, strict=True)})
    for (letter, fan_in), block in blocks.items():
        if letter == "c":
            if name != "he-normal-gates":
                _he_normal_(block, fan_in)
        elif name == "he-normal-gates":
            _he_normal_(block, fan_in)
        elif name == "normal-biases":
            he_uniform_(block, fan_in)
    if name == "normal-biases":
        nn.init.normal_(cell.bias_l0[: 2 * size])


def _glorot_(weight: Tensor, fan_in: int, fan_out: int) -> None:
    bound = math.sqrt(6 / (fan_in + fan_out))
    nn.init.uniform_(weight, -bound, bound)


def _he_normal_(weight: Tensor, fan_in: int) -> None:
    deviation = math.sqrt(2 / fan_in) / _CUT_NORMAL_DEVIATION
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)
