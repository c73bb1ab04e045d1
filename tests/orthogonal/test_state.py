"""The state: saved, loaded, copied, moved and converted without losing a bit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ncgru.orthogonal import METHODS, ScaledCayley, cayley, orthogonal, unpack
from tests.orthogonal.measure import moved, spectral_defect, start


class Owner(nn.Module):
    """A module that keeps the vector and the map side by side, as recurrent layers do."""

    def __init__(self, n: int, method: str = "hyperpower") -> None:
        super().__init__()
        self.cayley = ScaledCayley(n, (2,), inverse=method)
        self.skew = nn.Parameter(self.cayley.sample(generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.cayley(self.skew)
        return torch.tanh(torch.tanh(x @ u) @ v)


def train(owner: Owner, optimiser: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(3, owner.cayley.size, generator=torch.Generator().manual_seed(step))
        optimiser.zero_grad()
        owner(x).square().sum().backward()
        optimiser.step()


def assert_same_state(first: nn.Module, second: nn.Module) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def reload(value: object) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("method", METHODS)
def test_training_goes_on_bit_for_bit_after_loading(method: str) -> None:
    owner = Owner(12, method)
    optimiser = torch.optim.Adam(owner.parameters(), lr=1e-2)
    train(owner, optimiser, range(20))
    saved, saved_optimiser = reload(owner.state_dict()), reload(optimiser.state_dict())
    train(owner, optimiser, range(20, 40))

    resumed = Owner(12, method)
    optimiser = torch.optim.Adam(resumed.parameters(), lr=1e-2)
    resumed.load_state_dict(saved)
    optimiser.load_state_dict(saved_optimiser)
    train(resumed, optimiser, range(20, 40))
    assert_same_state(owner, resumed)
    assert resumed.cayley.updates.tolist() == [39, 39]  # the last step has not been read yet


def test_a_checkpoint_with_its_buffers_counts_nothing() -> None:
    owner, fresh = Owner(12), Owner(12)
    train(owner, torch.optim.Adam(owner.parameters(), lr=1e-2), range(5))
    owner.cayley(owner.skew)
    expected = owner.cayley.matrix.clone()
    fresh.load_state_dict(reload(owner.state_dict()))
    assert torch.equal(fresh.cayley(fresh.skew), expected)
    assert_same_state(owner, fresh)


@pytest.mark.parametrize("method", ["neumann", "hyperpower"])
def test_a_checkpoint_of_the_vector_alone_is_repaired_and_counted(method: str) -> None:
    owner = Owner(12, method)
    target = moved(owner.skew, 1.0)
    missing = owner.load_state_dict({"skew": target}, strict=False)
    assert len(missing.missing_keys) == 7
    u = owner.cayley(owner.skew)
    assert owner.cayley.updates.tolist() == owner.cayley.refreshes.tolist() == [1, 1]
    assert (u - cayley(unpack(target, 12), owner.cayley.signs)).abs().max() < 1e-4


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_equal_and_independent(copier: type) -> None:
    owner = Owner(9)
    optimiser = torch.optim.Adam(owner.parameters(), lr=1e-2)
    train(owner, optimiser, range(3))
    twin: Owner = copier(owner)
    assert_same_state(owner, twin)
    before = copy.deepcopy(owner.state_dict())
    train(twin, torch.optim.Adam(twin.parameters(), lr=1e-2), range(3))
    for name, value in owner.state_dict().items():
        assert torch.equal(value, before[name])
    twin, other = copier(owner), copier(owner)
    for module in (twin, other):
        train(module, torch.optim.SGD(module.parameters(), lr=1e-2), range(3, 9))
    assert_same_state(twin, other)


def test_state_dict_keys_are_readable() -> None:
    assert list(Owner(4).state_dict()) == [
        "skew",
        *(f"cayley.{name}" for name in ("anchor", "inverse", "matrix", "signs", "updates", "refreshes", "seal")),
    ]


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, lambda module: module.to(torch.bfloat16)])
def test_16_bit_conversion_leaves_the_state_in_float32(convert: type) -> None:
    layer: Any = nn.Sequential(orthogonal(nn.Linear(16, 16)))
    convert(layer)
    weight = layer[0].weight
    assert weight.dtype == layer[0].bias.dtype != torch.float32
    (module,) = layer[0].parametrizations.weight
    assert {module.anchor.dtype, module.inverse.dtype, module.matrix.dtype, module.signs.dtype} == {torch.float32}
    assert module.updates.dtype == torch.int64
    assert spectral_defect(module.matrix) < 1e-6
    layer(torch.randn(2, 16, dtype=weight.dtype)).sum().backward()


def test_conversion_to_float64_and_back_gives_all_digits() -> None:
    layer: Any = orthogonal(nn.Linear(16, 16)).double()
    assert layer.weight.dtype == torch.float64
    assert spectral_defect(layer.weight) < 1e-14
    layer.float()
    assert layer.weight.dtype == torch.float32
    assert spectral_defect(layer.weight) < 1e-6
    assert layer.parametrizations.weight[0].updates.item() == 0


def test_a_vector_of_another_dtype_or_shape_is_refused() -> None:
    module = ScaledCayley(4)
    with pytest.raises(TypeError, match=r"packed must be torch.float32 .*got torch.float64; convert both"):
        module(torch.zeros(6, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"packed must be torch.float32 .*got torch.int64"):
        module(torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"packed must have shape .* = \(6,\), got \(2, 6\)"):
        module(torch.zeros(2, 6))
    with pytest.raises(ValueError, match=r"packed must be on cpu .* got meta"):
        module(torch.zeros(6, device="meta"))


def test_the_meta_device_and_back() -> None:
    module = ScaledCayley(5, (2,), device="meta")
    packed = module.sample().requires_grad_()
    u = module(packed)
    assert u.device.type == "meta"
    assert u.shape == (2, 5, 5)
    assert "negatives=2" in repr(module)
    source = ScaledCayley(5, (2,))
    vector = start(source)
    module.to_empty(device="cpu")
    module.load_state_dict(source.state_dict())
    assert torch.equal(module(vector), source(vector))


def test_meta_layers_can_be_made_orthogonal() -> None:
    layer = orthogonal(nn.Linear(5, 5, device="meta"))
    assert layer.weight.shape == (5, 5)
    assert layer.weight.is_meta


def test_shared_memory_and_moves_keep_bits() -> None:
    owner = Owner(6)
    before = copy.deepcopy(owner.state_dict())
    owner.to("cpu").share_memory()
    for name, value in owner.state_dict().items():
        assert torch.equal(value, before[name])
