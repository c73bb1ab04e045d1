"""`orthogonal(module, name)` and assignment: torch.nn.utils.parametrize as a user expects it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ncgru.orthogonal import ScaledCayley, inverse_cayley, nearest_orthogonal, orthogonal, pack
from ncgru.orthogonal.cayley import LARGEST_ENTRY
from ncgru.orthogonal.skew import haar_orthogonal
from tests.orthogonal.measure import spectral_defect


def train(module: nn.Module, x: Tensor, steps: int = 20) -> list[float]:
    optimiser = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        out = module(x)
        out = out[0] if isinstance(out, tuple) else out
        loss = (out - 0.3).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_the_one_liner_trains_and_stays_orthogonal() -> None:
    layer: Any = nn.Linear(8, 8)
    nearest, _ = nearest_orthogonal(layer.weight)
    assert orthogonal(layer) is layer
    assert torch.allclose(layer.weight, nearest, atol=1e-6)
    assert [(name, tuple(p.shape)) for name, p in layer.named_parameters()] == [
        ("bias", (8,)),
        ("parametrizations.weight.original", (28,)),
    ]
    before = layer.weight.detach().clone()
    losses = train(layer, torch.randn(16, 8))
    assert losses[-1] < losses[0]
    assert spectral_defect(layer.weight) < 1e-6
    assert (layer.weight - before).abs().max() > 0.05
    assert layer.parametrizations.weight[0].updates.item() == 20


def test_an_optimiser_made_before_goes_on_working() -> None:
    layer = nn.Linear(6, 6)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    orthogonal(layer)
    before = layer.weight.detach().clone()
    layer(torch.randn(3, 6)).square().sum().backward()
    optimiser.step()
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("init", ["cayley", "henaff", "haar"])
def test_initial_values_can_be_drawn(init: str) -> None:
    layers: list[Any] = []
    for _ in range(2):
        torch.manual_seed(3)
        layers.append(orthogonal(nn.Linear(7, 7), negatives=3, init=init))
    first, second = layers
    assert torch.equal(first.weight, second.weight)
    assert spectral_defect(first.weight) < 1e-6
    module = first.parametrizations.weight[0]
    if init == "cayley":
        assert torch.equal(module.signs, torch.tensor([1.0] * 4 + [-1.0] * 3))
        assert torch.linalg.det(first.weight).round() == -1
    assert first.parametrizations.weight.original.abs().max() < 1.5


@pytest.mark.parametrize("options", [{"inverse": "exact"}, {"inverse": "neumann", "order": 1, "reset_every": 5}])
def test_options_reach_the_map(options: dict[str, object]) -> None:
    layer: Any = orthogonal(nn.Linear(8, 8), **options)  # type: ignore[arg-type]
    train(layer, torch.randn(4, 8))
    module = layer.parametrizations.weight[0]
    assert module.method == options["inverse"]
    assert spectral_defect(layer.weight) < (1e-6 if options["inverse"] == "exact" else 2e-2)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_torch_recurrent_modules_can_have_square_weights(kind: Any) -> None:
    """They run on a list of weights made once, which plain parametrisation leaves behind."""
    rnn = kind(3, 5, num_layers=2)
    name = "weight_hh_l1" if kind is nn.RNN else None
    if name is None:
        with pytest.raises(ValueError, match=r"weight_hh_l0 must be square"):
            orthogonal(rnn, "weight_hh_l0")
        return
    orthogonal(rnn, name)
    orthogonal(rnn, "weight_hh_l0")
    x = torch.randn(4, 2, 3)
    losses = train(rnn, x)
    assert losses[-1] < losses[0]
    w0, w1 = rnn.weight_hh_l0, rnn.weight_hh_l1
    assert max(spectral_defect(w0), spectral_defect(w1)) < 1e-6
    plain = kind(3, 5, num_layers=2)
    with torch.no_grad():
        for weight, value in plain.named_parameters():
            value.copy_(getattr(rnn, weight))
    assert torch.allclose(rnn(x)[0], plain(x)[0], atol=1e-6)
    twin = copy.deepcopy(rnn)
    assert torch.equal(twin(x)[0], rnn(x)[0])
    assert torch.allclose(rnn.double()(x.double())[0], plain.double()(x.double())[0], atol=1e-6)
    rnn.float()
    for weight in ("weight_hh_l0", "weight_hh_l1"):
        parametrize.remove_parametrizations(rnn, weight)
    assert torch.allclose(rnn(x)[0], plain.float()(x)[0], atol=1e-6)


def test_a_batch_of_square_matrices() -> None:
    class Kernels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("...i,abij->ab...j", x, self.weight)

    module: Any = orthogonal(Kernels(), negatives=[0, 1, 2, 3, 4, 0])
    assert module.parametrizations.weight.original.shape == (2, 3, 6)
    train(module, torch.randn(5, 4))
    assert spectral_defect(module.weight) < 1e-6
    assert module.parametrizations.weight[0].updates.tolist() == [[20] * 3] * 2


def test_removing_the_parametrisation_leaves_the_matrix_or_the_vector() -> None:
    layer: Any = orthogonal(nn.Linear(5, 5))
    expected = layer.weight.detach().clone()
    parametrize.remove_parametrizations(layer, "weight")
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight, expected)
    layer = orthogonal(nn.Linear(5, 5))
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert layer.weight.shape == (10,)


def test_caching() -> None:
    layer: Any = orthogonal(nn.Linear(5, 5))
    with parametrize.cached():
        assert layer.weight is layer.weight
    assert layer.weight is not layer.weight


def test_it_composes_with_other_parametrisations() -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer: Any = orthogonal(nn.Linear(5, 5))
    parametrize.register_parametrization(layer, "weight", Doubled())
    assert spectral_defect(layer.weight / 2) < 1e-6


def test_copies_of_a_parametrised_module() -> None:
    layer: Any = orthogonal(nn.Linear(5, 5))
    twin: Any = copy.deepcopy(layer)
    fresh: Any = orthogonal(nn.Linear(5, 5))
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(twin.weight, layer.weight)
    assert torch.equal(fresh.weight, layer.weight)
    train(twin, torch.randn(3, 5))
    assert torch.equal(fresh.weight, layer.weight)


@pytest.mark.parametrize("seed", range(4))
def test_any_orthogonal_matrix_can_be_assigned(seed: int) -> None:
    layer: Any = orthogonal(nn.Linear(9, 9))
    q = haar_orthogonal(9, generator=torch.Generator().manual_seed(seed)).float()
    for matrix in (q, -q, torch.eye(9), -torch.eye(9), torch.eye(9).roll(1, 0)):
        layer.weight = matrix
        assert (layer.weight - matrix).abs().max() < 1e-6
        assert layer.parametrizations.weight.original.abs().max() <= LARGEST_ENTRY + 1e-6
    module = layer.parametrizations.weight[0]
    assert (module.updates.item(), module.refreshes.item()) == (0, 0)
    before = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        layer.weight = layer.weight
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_present_signs_are_kept_where_they_fit() -> None:
    module = ScaledCayley(6, negatives=2, dtype=torch.float64)
    packed = module.sample(generator=torch.Generator().manual_seed(0))
    other = ScaledCayley(6, negatives=2, dtype=torch.float64)
    again, distance = other.assign(module.matrix)
    assert torch.allclose(again, packed, atol=1e-14)
    assert distance < 1e-14
    assert other.negatives == (2,)
    other.assign(torch.eye(6, dtype=torch.float64))
    assert other.negatives == (0,)
    assert "negatives=0" in repr(other)
    other.sample()
    assert other.negatives == (2,)


def test_a_matrix_that_is_not_orthogonal_is_replaced_by_the_nearest_and_the_distance_told() -> None:
    layer: Any = orthogonal(nn.Linear(6, 6))
    matrix = torch.randn(6, 6)
    nearest, distance = nearest_orthogonal(matrix)
    with pytest.warns(UserWarning, match=r"the assigned matrix is not orthogonal: .* [\d.]+ away \(Frobenius norm\)"):
        layer.weight = matrix
    assert torch.allclose(layer.weight, nearest, atol=1e-6)
    module = ScaledCayley(6, (2,))
    packed, told = module.assign(torch.stack((matrix, nearest)))
    assert torch.allclose(told, torch.stack((distance, torch.zeros(()))), atol=1e-5)
    skew, signs = inverse_cayley(nearest)
    if torch.equal(signs, module.signs[0]):
        assert torch.allclose(packed[0], pack(skew), atol=1e-5)
    assert torch.allclose(module(packed), nearest.expand(2, 6, 6), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 6, 7, 40])
def test_signs_that_make_the_map_singular_are_never_kept(n: int, dtype: torch.dtype) -> None:
    """A matrix of the other determinant has no A at all with the present D."""
    module = ScaledCayley(n, (20,), negatives=0, dtype=dtype)
    q = haar_orthogonal(n, (20,), generator=torch.Generator().manual_seed(n))
    for negatives in range(min(n, 3) + 1):
        module.signs.fill_(1)[..., n - negatives :] = -1
        packed, distance = module.assign(q)
        assert packed.abs().max() <= LARGEST_ENTRY + 1e-6 if n > 1 else packed.numel() == 0
        assert (module(packed) - q).abs().max() < 20 * n * torch.finfo(dtype).eps
        assert distance.max() < 1e-13
    assert module.updates.sum() == 0


def test_some_matrices_of_a_batch_can_be_assigned() -> None:
    module = ScaledCayley(4, (2, 2))
    packed = module.sample("haar", generator=torch.Generator().manual_seed(0))
    before = copy.deepcopy(module.state_dict())
    q = haar_orthogonal(4, (2,), generator=torch.Generator().manual_seed(1)).float()
    part, distance = module.assign(q, which=[3, 0])
    assert part.shape == (2, 6)
    assert distance.shape == (2,)
    assert (module.matrix.view(4, 4, 4)[[3, 0]] - q).abs().max() < 1e-6
    for name in ("anchor", "inverse", "matrix", "signs"):
        assert torch.equal(getattr(module, name).flatten(0, 1)[1:3], before[name].flatten(0, 1)[1:3])
    packed.view(4, 6)[[3, 0]] = part
    module(packed)
    assert module.updates.sum() == 0


SQUARE = torch.eye(3)


def broken(value: float) -> nn.Linear:
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight[0, 1] = value
    return layer


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        (SQUARE, {}, TypeError, r"module must be a torch.nn.Module, got Tensor"),
        (nn.Linear(3, 3), {"name": 1}, TypeError, r"name must be a str, got int"),
        (
            nn.Linear(3, 3),
            {"name": "wieght"},
            ValueError,
            r"name must be a parameter of Linear itself \('weight', 'bias'\), got 'wieght'",
        ),
        (nn.Sequential(nn.Linear(3, 3)), {}, ValueError, r"name must be a parameter of Sequential itself \(none\)"),
        (nn.BatchNorm1d(3), {"name": "running_mean"}, ValueError, r"name must be a parameter of BatchNorm1d itself"),
        (nn.Linear(3, 4), {}, ValueError, r"weight must be square.* got shape \(4, 3\)"),
        (nn.Linear(3, 3), {"name": "bias"}, ValueError, r"bias must be square.* got shape \(3,\)"),
        (nn.LazyLinear(3), {}, ValueError, r"'weight' is a parameter without a shape yet"),
        (nn.Linear(3, 3).half(), {}, TypeError, r"weight must be float32 or float64, got torch.float16"),
        (
            nn.Linear(3, 3, dtype=torch.complex64),
            {},
            TypeError,
            r"weight must be float32 or float64, got torch.complex",
        ),
        (broken(math.nan), {}, ValueError, r"weight must be finite, got 1 NaN or infinite"),
        (broken(-math.inf), {}, ValueError, r"weight must be finite"),
        (
            nn.Linear(3, 3),
            {"negatives": 4},
            ValueError,
            r"negatives must be between 0 and size=3, got 4; pass the number",
        ),
        (nn.Linear(3, 3), {"negatives": -1}, ValueError, r"negatives must be between 0 and size=3, got -1"),
        (nn.Linear(3, 3), {"negatives": [1, 2]}, ValueError, r"one number for each of 1 matrices, got 2"),
        (nn.Linear(3, 3), {"negatives": True}, TypeError, r"negatives must be an int or a sequence of ints, got True"),
        (nn.Linear(3, 3), {"negatives": 1.0}, TypeError, r"negatives must be an int or a sequence of ints, got 1.0"),
        (nn.Linear(3, 3), {"negatives": "1"}, TypeError, r"negatives must be an int or a sequence of ints, got '1'"),
        (nn.Linear(3, 3), {"inverse": "newmann"}, ValueError, r"inverse must be one of .*did you mean 'neumann'"),
        (nn.Linear(3, 3), {"inverse": 2}, TypeError, r"inverse must be a str"),
        (nn.Linear(3, 3), {"order": 0}, ValueError, r"order must be at least 1, got 0"),
        (nn.Linear(3, 3), {"order": 2.0}, TypeError, r"order must be an int, got float 2.0"),
        (nn.Linear(3, 3), {"reset_every": 0}, ValueError, r"reset_every must be at least 1, got 0; pass None"),
        (nn.Linear(3, 3), {"init": "harr"}, ValueError, r"init must be one of .*did you mean 'haar'"),
    ],
)
def test_bad_arguments_name_the_way_out_and_change_nothing(
    module: nn.Module, options: dict[str, object], error: type[Exception], message: str
) -> None:
    before = copy.deepcopy(module)
    with pytest.raises(error, match=message):
        orthogonal(module, **options)  # type: ignore[arg-type]
    if isinstance(module, nn.Module) and not isinstance(module, nn.LazyLinear):
        assert type(module) is type(before)
        for old, new in zip(before.parameters(), module.parameters(), strict=True):
            assert torch.allclose(old, new, rtol=0, atol=0, equal_nan=True)


def test_a_weight_is_parametrised_once() -> None:
    layer: Any = orthogonal(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"'weight' is already parametrised; first call .*remove_parametrizations"):
        orthogonal(layer)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((0,), {}, ValueError, r"size must be at least 1, got 0"),
        ((2.0,), {}, TypeError, r"size must be an int, got float 2.0"),
        ((3, 2), {}, TypeError, r"batch_shape must be a sequence of ints, got 2"),
        ((3, (0,)), {}, ValueError, r"every length in batch_shape must be at least 1, got 0"),
        ((3, ("a",)), {}, TypeError, r"every length in batch_shape must be an int, got str"),
        (
            (3,),
            {"dtype": torch.bfloat16},
            TypeError,
            r"dtype must be torch.float32 or torch.float64, got torch.bfloat16",
        ),
        ((3,), {"dtype": torch.int64}, TypeError, r"dtype must be a floating-point"),
        ((3, (2,)), {"negatives": (1,)}, ValueError, r"one number for each of 2 matrices, got 1"),
    ],
)
def test_bad_arguments_of_the_map(
    arguments: tuple[int, ...], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ScaledCayley(*arguments, **options)  # type: ignore[arg-type]


def test_bad_assignments_change_nothing() -> None:
    module = ScaledCayley(3)
    module.sample("haar")
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=r"matrix must have shape .* = \(3, 3\), got \(4, 4\)"):
        module.assign(torch.eye(4))
    with pytest.raises(ValueError, match=r"matrix must be finite"):
        module.assign(torch.full((3, 3), math.nan))
    with pytest.raises(TypeError, match=r"matrix must be float32 or float64, got torch.int64"):
        module.right_inverse(torch.eye(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"init must be one of"):
        module.sample("normal")
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
