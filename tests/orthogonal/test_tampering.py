"""State that others have written to: averaged, rounded or overwritten buffers are noticed, repaired and counted."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ncgru
from ncgru import NCGRU, ScaledCayley, diagnostics
from ncgru.orthogonal import METHODS
from tests.orthogonal.measure import moved, spectral_defect, start

State = dict[str, Tensor]


def trained(seed: int, steps: int = 5, method: str = "hyperpower") -> NCGRU:
    torch.manual_seed(seed)
    module = NCGRU(3, 24, orthogonal="rc", inverse=method)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(4, 2, 3))[0].square().sum().backward()
        optimizer.step()
    module(torch.zeros(1, 1, 3))
    return module


def mean(first: State, second: State) -> State:
    return {key: (value + second[key]) / 2 if value.is_floating_point() else value for key, value in first.items()}


def through_half(state: State, _: State) -> State:
    return {key: value.half().float() if value.is_floating_point() else value for key, value in state.items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spoil", [mean, through_half])
def test_averaged_and_rounded_checkpoints_are_repaired(method: str, spoil: Callable[[State, State], State]) -> None:
    module = trained(0, method=method)
    module.load_state_dict(spoil(module.state_dict(), trained(1, method=method).state_dict()))
    before = [int(count) for count in diagnostics.refreshes(module).values()]
    errors = diagnostics.orthogonality_error(module)
    assert all(float(error) < 2e-6 for error in errors.values())
    assert [int(count) for count in diagnostics.refreshes(module).values()] == [count + 1 for count in before]
    bits = module.weight_hh_l0.detach().clone()
    assert torch.equal(module.weight_hh_l0, bits), "repaired once, then left alone"


def test_means_over_different_signatures_are_repaired() -> None:
    first, second = ScaledCayley(6, negatives=1), ScaledCayley(6, negatives=4)
    packed = [first.sample(), second.sample()]
    first.load_state_dict(mean(first.state_dict(), second.state_dict()))
    weight = (packed[0] + packed[1]) / 2
    assert spectral_defect(first(weight)) < 1e-6
    vector = weight.clone().requires_grad_()
    assert torch.autograd.gradcheck(first.double(), vector.double(), atol=1e-6)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averaged_models_stay_orthogonal(use_buffers: bool) -> None:
    module: nn.Module = nn.Sequential(ncgru.orthogonal(nn.Linear(16, 16)))
    average = AveragedModel(module, use_buffers=use_buffers, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        module(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
        module(torch.randn(4, 16))
        average.update_parameters(module)
        assert all(float(error) < 2e-6 for error in diagnostics.orthogonality_error(average).values())


def test_a_float32_checkpoint_in_a_float64_module_gets_all_digits() -> None:
    module = NCGRU(3, 24, orthogonal="rc", dtype=torch.float64)
    module.load_state_dict(trained(0).state_dict())
    assert all(float(error) < 1e-14 for error in diagnostics.orthogonality_error(module).values())


@pytest.mark.parametrize("buffer", ["anchor", "inverse", "matrix", "signs"])
def test_every_buffer_is_under_the_seal(buffer: str) -> None:
    module = ScaledCayley(5)
    packed = start(module)
    expected = module(packed).detach().clone()
    getattr(module, buffer).view(-1)[0] += 0.125
    torch.testing.assert_close(module(packed).detach(), expected, rtol=0, atol=1e-6)
    assert int(module.refreshes) == 1


def test_copies_and_moves_break_no_seal() -> None:
    module = trained(0)
    for twin in (copy.deepcopy(module), copy.deepcopy(module).bfloat16(), copy.deepcopy(module).double()):
        before = [int(count) for count in diagnostics.refreshes(twin).values()]
        assert twin.weight_hh_l0.isfinite().all()
        assert [int(count) for count in diagnostics.refreshes(twin).values()] == before


def test_drawing_anew_starts_the_counts_anew() -> None:
    module = ScaledCayley(5, (2,))
    module(moved(module.sample(), 10.0))
    assert module.updates.tolist() == [1, 1]
    module.sample("haar")
    assert module.updates.tolist() == module.refreshes.tolist() == [0, 0]


def test_threads_see_whole_states() -> None:
    module = ScaledCayley(96)
    packed = start(module).detach()
    for trial in range(20):
        packed = moved(packed, 1e-3)
        defects: list[float] = []

        def read(vector: Tensor = packed, into: list[float] = defects) -> None:
            into.append(float(spectral_defect(module(vector).detach())))

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(defects) == 4
        assert max(defects) < 1e-5, trial
