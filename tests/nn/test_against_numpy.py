"""Every module against NumPy, one sequence at a time, through every layout that `nn.GRU` takes."""

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from ncgru import GORU
from ncgru.nn.rotations import RotationLayout, rotation_product
from ncgru.nn.sequence import SequenceModule
from tests.nn.builders import CELLS, SEQUENCES
from tests.nn.numpy_truth import Array, Weights, rotation_matrix, run, step

SIZES = {"input_size": 3, "hidden_size": 5}
LAYOUTS = list(product([1, 2], [False, True]))


def build(name: str, layers: int = 1, bidirectional: bool = False, **settings: object) -> SequenceModule:
    """A float64 module whose biases are all drawn at random, so that each of them shows."""
    torch.manual_seed(sum(map(ord, name)) + layers)
    module = SEQUENCES[name](**SIZES, num_layers=layers, bidirectional=bidirectional, dtype=torch.float64, **settings)
    with torch.no_grad():
        for key, param in module.named_parameters():
            if key.startswith("bias"):
                param.uniform_(-0.4, 0.4)
            elif key.startswith("weight_ih"):
                param.uniform_(-1, 1)
    return module


def weights_of(module: SequenceModule) -> Weights:
    found = {}
    for _, directions in module._layers:
        for suffix in directions:
            bias = getattr(module, f"bias{suffix}").detach().clone()
            if isinstance(module, GORU) and module.nonlinearity == "modrelu":
                bias[-module.hidden_size :] += 0.001
            found[f"w{suffix}"] = getattr(module, f"weight_ih{suffix}").detach().numpy()
            found[f"u{suffix}"] = getattr(module, f"weight_hh{suffix}").detach().numpy()
            found[f"bias{suffix}"] = bias.numpy()
    return found


def truth(module: SequenceModule, x: Tensor, h0: Tensor) -> tuple[Array, Array]:
    """`x` [T, I] and `h0` [layers·directions, H] through NumPy."""
    layers, both = module.num_layers, module.bidirectional
    return run(module.reset, module.nonlinearity, weights_of(module), x.numpy(), h0.numpy(), layers, both)


def close(actual: Tensor, expected: Array) -> None:
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize(("layers", "bidirectional"), LAYOUTS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_batched(name: str, layers: int, bidirectional: bool, batch_first: bool) -> None:
    module = build(name, layers, bidirectional, batch_first=batch_first)
    x = torch.randn(7, 4, 3, dtype=torch.float64)
    h0 = torch.randn(layers * (1 + bidirectional), 4, 5, dtype=torch.float64)
    output, h_n = module(x.transpose(0, 1) if batch_first else x, h0)
    assert isinstance(output, Tensor)
    output = output.transpose(0, 1) if batch_first else output
    for row in range(4):
        expected, final = truth(module, x[:, row], h0[:, row])
        close(output[:, row], expected)
        close(h_n[:, row], final)


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize(("layers", "bidirectional"), LAYOUTS)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_packed(name: str, layers: int, bidirectional: bool, is_sorted: bool) -> None:
    module = build(name, layers, bidirectional)
    lengths = [6, 4, 4, 1] if is_sorted else [4, 6, 1, 4]
    rows = [torch.randn(length, 3, dtype=torch.float64) for length in lengths]
    h0 = torch.randn(layers * (1 + bidirectional), 4, 5, dtype=torch.float64)
    output, h_n = module(pack_sequence(rows, enforce_sorted=is_sorted), h0)
    assert isinstance(output, PackedSequence)
    padded, found = pad_packed_sequence(output)
    assert found.tolist() == lengths
    for row, x in enumerate(rows):
        expected, final = truth(module, x, h0[:, row])
        close(padded[: len(x), row], expected)
        close(h_n[:, row], final)


@pytest.mark.parametrize("name", SEQUENCES)
def test_unbatched_equals_a_batch_of_one(name: str) -> None:
    module = build(name, 2, True)
    x, h0 = torch.randn(6, 3, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    output, h_n = module(x, h0)
    expected, final = truth(module, x, h0)
    assert isinstance(output, Tensor)
    close(output, expected)
    close(h_n, final)


@pytest.mark.parametrize("name", SEQUENCES)
def test_without_bias(name: str) -> None:
    module = build(name, bias=False)
    assert not [key for key, _ in module.named_parameters() if "bias" in key]
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    bias = np.zeros(5 * len(module.rows))
    if isinstance(module, GORU) and module.nonlinearity == "modrelu":
        bias[-5:] = 0.001
    h = np.zeros(5)
    w, u = (getattr(module, key).detach().numpy() for key in ("weight_ih_l0", "weight_hh_l0"))
    for row in x[:, 0].numpy():
        h = step(module.reset, module.nonlinearity, row, h, w, u, bias)
    close(module(x)[1][0, 0], h)


@pytest.mark.parametrize("name", CELLS)
def test_cell_takes_the_same_step(name: str) -> None:
    make_cell, make_module, settings = CELLS[name]
    cell = make_cell(3, 5, dtype=torch.float64, **settings)
    module = make_module(3, 5, dtype=torch.float64, **settings)
    module.load_state_dict(
        {key.replace(".", "_l0.", 1) if "." in key else f"{key}_l0": value for key, value in cell.state_dict().items()}
    )
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    output, _ = module(x)
    h = None
    for t in range(6):
        h = cell(x[t], h)
        torch.testing.assert_close(h, output[t], rtol=0, atol=1e-13)
    assert h is not None
    torch.testing.assert_close(cell(x[0, 1], h[1]), cell(x[0], h)[1], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("size", "capacity", "style"), [(5, 4, "tunable"), (6, 3, "tunable"), (1, 2, "tunable"), (8, None, "fft")]
)
def test_rotations_against_full_matrices(size: int, capacity: int | None, style: str) -> None:
    layout = RotationLayout(size, capacity, style)
    if style == "tunable":
        layers = [[(i, i + 1) for i in range(k % 2, size - 1, 2)] for k in range(capacity or 4)]
    else:
        layers = [[(i, i ^ (1 << k)) for i in range(size) if i < i ^ (1 << k)] for k in range(3)]
    angles = torch.rand(2, sum(map(len, layers)), dtype=torch.float64) * 6 - 3
    product = rotation_product(angles, **layout.partners())
    for found, given in zip(product, angles, strict=True):
        close(found, rotation_matrix(given.numpy(), size, layers))
        close(found @ found.T, np.eye(size))


def test_packing_keeps_the_order_of_the_state() -> None:
    module = build("ncgru")
    x = torch.randn(5, 3, 3, dtype=torch.float64)
    h0 = torch.randn(1, 3, 5, dtype=torch.float64)
    lengths = torch.tensor([2, 5, 3])
    _, h_n = module(pack_padded_sequence(x, lengths, enforce_sorted=False), h0)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(h_n[:, row], module(x[:length, row], h0[:, row])[1])


def test_gradients_reach_every_parameter_and_the_state() -> None:
    for name in SEQUENCES:
        module = build(name, 2, True)
        h0 = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
        x = torch.randn(6, 3, 3, dtype=torch.float64, requires_grad=True)
        output, h_n = module(x, h0)
        assert isinstance(output, Tensor)
        (output.square().sum() + h_n.square().sum()).backward()
        for key, param in [*module.named_parameters(), ("h0", h0), ("x", x)]:
            assert param.grad is not None, key
            assert bool(param.grad.abs().sum() > 0), key
