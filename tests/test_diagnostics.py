"""Diagnostics against direct computation, and Theorem 1 against measured Jacobians."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ncgru
from ncgru import GORU, NCGRU, GORUCell, ScaledCayley, ScoRNN, diagnostics
from tests.nn.numpy_truth import activate, sigmoid


def test_names_tell_the_matrices_apart() -> None:
    model = nn.ModuleDict(
        {
            "rnn": NCGRU(3, 4, 2, orthogonal="rc", bidirectional=True),
            "sco": ScoRNN(3, 4),
            "goru": GORU(3, 4, 2, bidirectional=True),
            "head": ncgru.orthogonal(nn.Linear(4, 4)),
            "loose": ScaledCayley(4),
        }
    )
    names = set(diagnostics.orthogonality_error(model))
    assert {"rnn.weight_hh_l1_reverse.r", "sco.weight_hh_l0.c", "goru.weight_hh_l1.c", "head.weight", "loose"} < names
    assert len(names) == 8 + 1 + 4 + 2
    assert len(diagnostics.refreshes(model)) == 8 + 3, "GORU's matrix has no inverse to follow"
    assert all(float(error) < 1e-6 for error in diagnostics.orthogonality_error(model, "frobenius").values())
    assert diagnostics.orthogonality_error(nn.Linear(2, 2)) == {}


def test_a_plain_matrix_shows_its_error() -> None:
    cayley = ScaledCayley(3, dtype=torch.float64)
    cayley.matrix.copy_(2 * torch.eye(3))
    assert float(diagnostics.orthogonality_error(cayley)["matrix"]) == pytest.approx(3)
    assert float(diagnostics.orthogonality_error(cayley, "frobenius")["matrix"]) == pytest.approx(27**0.5)
    cayley.inverse.mul_(0.5)
    assert float(diagnostics.inverse_residual(cayley)["matrix"]) == pytest.approx(0.5)


def test_the_rotations_of_goru_are_measured() -> None:
    cell = GORUCell(3, 4, dtype=torch.float64)
    cell.sign[0, 0] *= 2  # no rotation any more
    matrix = cell.weight_hh[8:].detach()
    expected = torch.linalg.matrix_norm(matrix.mT @ matrix - torch.eye(4, dtype=torch.float64), 2)
    assert float(expected) > 0.01
    torch.testing.assert_close(diagnostics.orthogonality_error(cell), {"weight_hh.c": expected})


def test_series_norm_is_that_of_the_pending_step() -> None:
    module = NCGRU(3, 4, dtype=torch.float64)
    assert float(diagnostics.series_norm(module)["weight_hh_l0.c"]) == 0
    step = torch.randn(6, dtype=torch.float64) * 0.1
    old = module.cayley_l0.inverse[0].clone()
    change = torch.zeros(4, 4, dtype=torch.float64)
    rows, columns = torch.triu_indices(4, 4, 1)
    change[rows, columns], change[columns, rows] = -step, step
    expected = torch.linalg.matrix_norm(old @ change, 2)
    with torch.no_grad():
        module.skew_l0[0] += step
    torch.testing.assert_close(diagnostics.series_norm(module)["weight_hh_l0.c"], expected)
    assert int(diagnostics.updates(module)["weight_hh_l0.c"]) == 0, "looking at the step does not take it"
    module(torch.zeros(1, 1, 3, dtype=torch.float64))
    assert float(diagnostics.series_norm(module)["weight_hh_l0.c"]) == 0
    assert int(diagnostics.updates(module)["weight_hh_l0.c"]) == 1


def test_the_guard_is_counted() -> None:
    module = NCGRU(3, 8)
    with torch.no_grad():
        module.skew_l0 += 5 * torch.randn_like(module.skew_l0)
    assert float(diagnostics.orthogonality_error(module)["weight_hh_l0.c"]) < 1e-5
    assert int(diagnostics.refreshes(module)["weight_hh_l0.c"]) == 1
    assert float(diagnostics.inverse_residual(module)["weight_hh_l0.c"]) < 1e-5


def random_module(nonlinearity: str, orthogonal: str, scale: float) -> NCGRU:
    module = NCGRU(3, 6, orthogonal=orthogonal, nonlinearity=nonlinearity, dtype=torch.float64)
    with torch.no_grad():
        for key, param in module.named_parameters():
            if not key.startswith("skew"):
                param.copy_(scale * torch.randn_like(param))
    return module


SETTINGS = [("tanh", ""), ("relu", ""), ("modrelu", "c"), ("modrelu", "rc"), ("modrelu", "ruc"), ("tanh", "rc")]


@pytest.mark.parametrize(("nonlinearity", "orthogonal"), SETTINGS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_jacobians_stay_below_the_theorems_bound(nonlinearity: str, orthogonal: str, scale: float) -> None:
    torch.manual_seed(int(10 * scale))
    for _ in range(5):
        module = random_module(nonlinearity, orthogonal, scale)
        x = torch.randn(12, 4, 3, dtype=torch.float64)
        found = diagnostics.gradient_bound(module, x, torch.randn(1, 4, 6, dtype=torch.float64))
        assert found.norm.shape == (12, 4)
        assert bool((found.norm <= found.bound * (1 + 1e-12)).all())
        assert bool((found.norm > 0).all())
        u_c = torch.linalg.matrix_norm(module.weight_hh_l0[12:], 2)
        torch.testing.assert_close(found.bound, found.alpha + found.beta * u_c)


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize(("nonlinearity", "orthogonal"), SETTINGS)
def test_alpha_and_beta_are_the_theorems(nonlinearity: str, orthogonal: str, absolute: bool) -> None:
    """One sequence step by step in NumPy: a bound that is merely large enough would hold, and say little."""
    torch.manual_seed(2)
    module = random_module(nonlinearity, orthogonal, 1.0)
    x, h0 = torch.randn(8, 1, 3, dtype=torch.float64), torch.randn(1, 1, 6, dtype=torch.float64)
    found = diagnostics.gradient_bound(module, x, h0, absolute=absolute)
    states = torch.cat([h0, module(x, h0)[0].detach()])[:, 0].numpy()
    w, u, bias = (getattr(module, f"{name}_l0").detach().numpy() for name in ("weight_ih", "weight_hh", "bias"))
    norm_r, norm_u = (np.linalg.norm(block, 2) for block in (u[:6], u[6:12]))
    size = np.abs if absolute else np.array
    for t, h in enumerate(states[:-1]):
        p = w @ x[t, 0].numpy()
        r, update = sigmoid(p[:6] + u[:6] @ h + bias[:6]), sigmoid(p[6:12] + u[6:12] @ h + bias[6:12])
        c = activate(nonlinearity, p[12:] + u[12:] @ (r * h), bias[12:])
        slope_r, slope_u = (r * (1 - r)).max(), (update * (1 - update)).max()
        alpha = slope_u * (size(h).max() + size(c).max()) * norm_u + (1 - update).max()
        beta = update.max() * (slope_r * norm_r * size(h).max() + r.max())
        assert float(found.alpha[t, 0]) == pytest.approx(alpha, rel=1e-12)
        assert float(found.beta[t, 0]) == pytest.approx(beta, rel=1e-12)


@pytest.mark.parametrize(("nonlinearity", "orthogonal"), SETTINGS)
def test_norms_equal_those_of_autograds_jacobians(nonlinearity: str, orthogonal: str) -> None:
    torch.manual_seed(1)
    module = random_module(nonlinearity, orthogonal, 1.0)
    x, h0 = torch.randn(5, 2, 3, dtype=torch.float64), torch.randn(1, 2, 6, dtype=torch.float64)
    found = diagnostics.gradient_bound(module, x, h0).norm
    far = diagnostics.state_gradients(module, x, h0)
    assert far.shape == (6, 2)
    states = torch.cat([h0, module(x, h0)[0].detach()])
    for row in range(2):
        for t in range(5):

            def step(h: Tensor, t: int = t, row: int = row) -> Tensor:
                state: Tensor = module(x[t : t + 1, row], h.unsqueeze(0))[1]
                return state[0]

            def rest(h: Tensor, t: int = t, row: int = row) -> Tensor:
                state: Tensor = module(x[t:, row], h.unsqueeze(0))[1]
                return state[0]

            for function, expected in ((step, found[t, row]), (rest, far[t, row])):
                jacobian = torch.autograd.functional.jacobian(function, states[t, row])
                torch.testing.assert_close(torch.linalg.matrix_norm(jacobian, 2), expected)
        assert float(far[5, row]) == 1


def test_signed_maxima_bound_nothing() -> None:
    """The theorem as printed takes signed maxima: with states far below zero its bound falls below the truth."""
    module = random_module("tanh", "", 1.0)
    with torch.no_grad():
        module.weight_hh_free_l0.mul_(5)
        module.bias_l0.zero_()
    h0 = -torch.rand(1, 64, 6, dtype=torch.float64) * 20
    found = diagnostics.gradient_bound(module, torch.randn(1, 64, 3, dtype=torch.float64), h0, absolute=False)
    assert bool((found.norm > found.bound).any())


def test_layouts_agree() -> None:
    module = random_module("modrelu", "rc", 1.0)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    expected = diagnostics.gradient_bound(module, x)
    module.batch_first = True
    for found, value in zip(diagnostics.gradient_bound(module, x.transpose(0, 1)), expected, strict=True):
        torch.testing.assert_close(found, value)
    torch.testing.assert_close(diagnostics.gradient_bound(module, x[:, 0]).norm[:, 0], expected.norm[:, 0])


def test_16_bit_modules_are_measured_in_float32() -> None:
    module = random_module("modrelu", "rc", 1.0).float()
    x = torch.randn(5, 2, 3)
    expected = diagnostics.gradient_bound(module, x)
    found = diagnostics.gradient_bound(module.bfloat16(), x.bfloat16())
    assert found.norm.dtype == torch.float32
    torch.testing.assert_close(found.norm, expected.norm, rtol=0.2, atol=0.2)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="norm must be one of 'spectral', 'frobenius', got 'nuclear'"):
        diagnostics.orthogonality_error(nn.Linear(2, 2), "nuclear")
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got str"):
        diagnostics.refreshes("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="module must have one layer and one direction, got num_layers=2"):
        diagnostics.gradient_bound(NCGRU(3, 4, 2), torch.zeros(2, 1, 3))
    with pytest.raises(TypeError, match="module must be an NCGRU, got ScoRNN"):
        diagnostics.state_gradients(ScoRNN(3, 4), torch.zeros(2, 1, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"input must be a torch\.Tensor, got PackedSequence"):
        diagnostics.gradient_bound(NCGRU(3, 4), nn.utils.rnn.pack_sequence([torch.zeros(2, 3)]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input must have input_size=3"):
        diagnostics.gradient_bound(NCGRU(3, 4), torch.zeros(2, 1, 5))
