"""First values: those of the released code and its frameworks, checked by bounds, moments and gate behaviour."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ncgru import NCGRU
from ncgru.lab import recipes
from ncgru.lab.models import build_model
from ncgru.lab.models.layer import RecurrentLayer
from ncgru.lab.recipes import ModelSpec

SIGMOID_OF_ONE = 1 / (1 + math.exp(-1))


def cell_of(name: str) -> dict[str, Tensor]:
    """The parameters of the first layer's cell."""
    layer = build_model(recipes.get(name), seed=1).layers[0]
    assert isinstance(layer, RecurrentLayer)
    return {key: value.detach() for key, value in layer.cell.named_parameters()}


def assert_uniform(values: Tensor, bound: float) -> None:
    assert values.abs().max() <= bound * (1 + 1e-6)
    assert values.abs().max() > 0.9 * bound
    assert abs(values.std().item() / (bound / math.sqrt(3)) - 1) < 0.15


def assert_cut_normal(values: Tensor, deviation: float) -> None:
    """Standard deviation as asked for, cut at two of the wider normal distribution's."""
    cut = 2 * deviation / 0.87962566103423978
    assert cut * 0.8 < values.abs().max() <= cut * (1 + 1e-6)
    assert abs(values.std().item() / deviation - 1) < 0.1


@pytest.mark.parametrize("kind", ["gru", "cho-gru"])
def test_a_silent_gru_keeps_its_state_as_tensorflows(kind: str) -> None:
    """With all weights 0 TensorFlow's cell gives σ(1)·h + (1 - σ(1))·tanh(0)."""
    layer = RecurrentLayer(ModelSpec(kind, (4,)), 3, 4, 1e-3)
    with torch.no_grad():
        for name, parameter in layer.cell.named_parameters():
            if "weight" in name:
                parameter.zero_()
    output, _ = layer(torch.zeros(1, 2, 3), (torch.ones(1, 2, 4),))
    torch.testing.assert_close(output, torch.full((1, 2, 4), SIGMOID_OF_ONE))


def test_a_silent_lstm_forgets_as_tensorflows() -> None:
    """With all weights 0 the memory is multiplied by σ(1): forget bias 1, all others 0."""
    layer = RecurrentLayer(ModelSpec("lstm", (4,)), 3, 4, 1e-3)
    with torch.no_grad():
        for name, parameter in layer.cell.named_parameters():
            if "weight" in name:
                parameter.zero_()
    _, (hidden, memory) = layer(torch.zeros(1, 2, 3), (torch.zeros(1, 2, 4), torch.ones(1, 2, 4)))
    torch.testing.assert_close(memory, torch.full((1, 2, 4), SIGMOID_OF_ONE))
    torch.testing.assert_close(hidden, torch.full((1, 2, 4), 0.5 * math.tanh(SIGMOID_OF_ONE)))


def test_chos_gru_is_tensorflows_cell() -> None:
    """Against the cell in NumPy: gates from [x; h], reset before the product, u times the old state."""
    layer = RecurrentLayer(ModelSpec("cho-gru", (5,)), 3, 5, 1e-3)
    weights = {name: value.detach().double().numpy() for name, value in layer.cell.named_parameters()}
    rng = np.random.default_rng(0)
    inputs, state = rng.normal(size=(4, 2, 3)), np.zeros((2, 5))
    w_r, w_u, w_c = weights["weight_ih_l0"].reshape(3, 5, 3)
    u_r, u_u, u_c = weights["weight_hh_free_l0"].reshape(3, 5, 5)
    expected = []
    for x in inputs:
        reset = 1 / (1 + np.exp(-(x @ w_r.T + state @ u_r.T + 1)))
        keep = 1 / (1 + np.exp(-(-(x @ w_u.T + state @ u_u.T) + 1)))  # its weights are minus ours
        state = keep * state + (1 - keep) * np.tanh(x @ w_c.T + (reset * state) @ u_c.T)
        expected.append(state)
    output, _ = layer(torch.tensor(inputs, dtype=torch.float32), None)
    np.testing.assert_allclose(output.detach().numpy(), np.stack(expected), atol=1e-6)


def test_glorot_kernels() -> None:
    lstm = cell_of("denoise-200/lstm")
    for name in ("weight_ih_l0", "weight_hh_l0"):
        assert_uniform(lstm[name], math.sqrt(6 / (10 + 90 + 360)))
    gru = cell_of("denoise-200/gru")
    for name in ("weight_ih_l0", "weight_hh_l0"):
        assert_uniform(gru[name][:200], math.sqrt(6 / (10 + 100 + 200)))
        assert_uniform(gru[name][200:], math.sqrt(6 / (10 + 100 + 100)))


def test_nc_gru_in_parenthesis() -> None:
    one = cell_of("parenthesis-100/nc-gru-c")
    assert_uniform(one["weight_ih_l0"][:112], math.sqrt(6 / 63))
    assert_uniform(one["weight_hh_free_l0"], math.sqrt(6 / 63))
    assert_uniform(one["weight_ih_l0"][112:], math.sqrt(6 / 7))
    two = cell_of("parenthesis-100/nc-gru-rc")
    assert_cut_normal(two["weight_ih_l0"][:112], math.sqrt(2 / 7))
    assert_cut_normal(two["weight_hh_free_l0"], math.sqrt(2 / 56))
    assert_uniform(two["weight_ih_l0"][112:], math.sqrt(6 / 7))
    for cell in (one, two):
        assert not cell["bias_l0"][:112].any()
        assert_uniform(cell["bias_l0"][112:], 0.1)


def test_nc_gru_in_denoise() -> None:
    one = cell_of("denoise-200/nc-gru-c")
    assert_uniform(one["weight_hh_free_l0"], math.sqrt(6 / 128))
    assert_cut_normal(one["weight_ih_l0"][236:], math.sqrt(2 / 10))
    assert not one["bias_l0"][:236].any()
    two = cell_of("denoise-200/nc-gru-rc")
    assert_uniform(two["weight_ih_l0"][:236], math.sqrt(6 / 10))
    assert_uniform(two["weight_hh_free_l0"], math.sqrt(6 / 118))
    assert_cut_normal(two["weight_ih_l0"][236:], math.sqrt(2 / 10))
    assert abs(two["bias_l0"][:236].std().item() - 1) < 0.15
    for cell in (one, two):
        assert_uniform(cell["bias_l0"][236:], 0.1)


def test_nc_gru_in_language_models() -> None:
    spec = ModelSpec("nc-gru", (100,), orthogonal="c", negatives=50, init="torch")
    torch.manual_seed(0)
    cell = {name: value.detach() for name, value in RecurrentLayer(spec, 80, 100, 1e-3).cell.named_parameters()}
    assert_uniform(cell["weight_ih_l0"][:200], 0.1)
    assert_uniform(cell["weight_hh_free_l0"], 0.1)
    assert_uniform(cell["weight_ih_l0"][200:], 0.01)
    assert not cell["bias_l0"][200:].any()
    assert cell["bias_l0"][:200].abs().max() > 0.1  # the sum of two biases
    assert abs(cell["bias_l0"][:200].std().item() / (0.1 * math.sqrt(2 / 3)) - 1) < 0.15


def test_read_outs() -> None:
    tiny = build_model(recipes.get("parenthesis-100/lstm")).readout
    assert abs(tiny.weight.std().item() * (42 + 18) ** 2 - 1) < 0.1
    assert not tiny.bias.any()
    denoise = build_model(recipes.get("denoise-200/lstm")).readout
    assert_uniform(denoise.weight.detach(), math.sqrt(6 / 20))
    assert (denoise.bias == 0.01).all()
    adding = build_model(recipes.get("adding-200/goru")).readout
    assert_uniform(adding.weight.detach(), math.sqrt(6 / 129))
    assert not adding.bias.any()
    copying = build_model(recipes.get("copying-1000/lstm")).readout
    assert_uniform(copying.weight.detach(), math.sqrt(6 / 77))
    assert 0 < copying.bias.abs().max() <= math.sqrt(3 / 9)


def test_first_angles_and_signs() -> None:
    """The Cayley image turns every pair of units into the right half plane, times D with its -1's last."""
    layer = build_model(recipes.get("parenthesis-100/nc-gru-c")).layers[0]
    assert isinstance(layer, RecurrentLayer)
    assert isinstance(layer.cell, NCGRU)
    matrix = layer.cell.weight_hh_l0.detach()[112:]
    signs = torch.tensor([1.0] * 16 + [-1.0] * 40)
    blocks = (matrix * signs).reshape(28, 2, 28, 2).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    assert (blocks[:, 0, 0] > 0).all()
    torch.testing.assert_close(blocks[:, 0, 0], blocks[:, 1, 1])
    torch.testing.assert_close(blocks @ blocks.mT, torch.eye(2).expand(28, 2, 2), atol=1e-6, rtol=0)
