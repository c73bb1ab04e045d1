"""Which backend runs, and what the refusals say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ncgru.recurrence import BackendUnavailableError, available_backends, recurrence, resolve_backend
from tests.recurrence.cases import make_case

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="here the kernels may run")


@pytest.mark.parametrize("request_", ["auto", "reference"])
@pytest.mark.parametrize("device", ["cpu", torch.device("meta")])
def test_reference_runs_everywhere(request_: str, device: torch.device | str) -> None:
    choice = resolve_backend(request_, device=device, dtype=torch.bfloat16, hidden_size=3, reset="none")
    assert choice.name == "reference"
    assert choice.reason
    assert "runs on CUDA devices" in choice.refused["cuda"]


@without_gpu
@pytest.mark.parametrize("request_", ["auto", "reference"])
def test_reference_runs_for_a_gpu_that_the_kernels_cannot_use(request_: str) -> None:
    choice = resolve_backend(request_, device="cuda:1", dtype=torch.bfloat16, hidden_size=3, reset="none")
    assert choice.name == "reference"
    assert "finds no CUDA device" in choice.refused["cuda"]


def test_the_kernels_leave_float64_and_huge_sizes_to_the_reference() -> None:
    wide = resolve_backend(device="cuda", dtype=torch.float64, hidden_size=8)
    assert (wide.name, "not torch.float64" in wide.refused["cuda"]) == ("reference", True)
    large = resolve_backend(device="cuda", dtype=torch.float32, hidden_size=2049)
    assert (large.name, "up to hidden_size=2048" in large.refused["cuda"]) == ("reference", True)


@without_gpu
def test_reference_is_available() -> None:
    assert available_backends() == ("reference",)


@without_gpu
def test_refusals_say_what_is_missing() -> None:
    with pytest.raises(BackendUnavailableError, match=r"the tensors are on 'cpu'; move them.*'reference'"):
        resolve_backend("cuda", device="cpu", dtype=torch.float32, hidden_size=8)
    with pytest.raises(BackendUnavailableError, match=r"hidden_size=8.*torch.float32.*no CUDA device; pass"):
        resolve_backend("cuda", device="cuda", dtype=torch.float32, hidden_size=8)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"backend must be one of 'auto', 'reference', 'cuda'.*did you mean 'reference'"
    ):
        resolve_backend("referense", device="cpu", dtype=torch.float32, hidden_size=8)
    with pytest.raises(TypeError, match="backend must be a str"):
        resolve_backend(None, device="cpu", dtype=torch.float32, hidden_size=8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"dtype": "float32"}, TypeError, "dtype must be a floating-point torch.dtype, got 'float32'"),
        ({"dtype": torch.int64}, TypeError, "dtype must be a floating-point torch.dtype, got torch.int64"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
        ({"hidden_size": "8"}, TypeError, "hidden_size must be an int, got str '8'"),
        ({"reset": "befor"}, ValueError, "reset must be one of .*did you mean 'before'"),
        ({"nonlinearity": "tahn"}, ValueError, "nonlinearity must be one of .*did you mean 'tanh'"),
        ({"device": "nonsense"}, ValueError, r"device must be a torch\.device or its name, got 'nonsense'"),
    ],
)
def test_questions_that_make_no_sense_are_refused(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_backend(**{"device": "cpu", "dtype": torch.float32, "hidden_size": 8, **wrong})


def test_recurrence_obeys_its_backend_argument() -> None:
    case = make_case()
    expected = case.run()
    assert torch.equal(recurrence(*case.tensors, backend="reference"), expected)
    with pytest.raises(BackendUnavailableError):
        recurrence(*case.tensors, backend="cuda")
    with pytest.raises(ValueError, match="backend"):
        recurrence(*case.tensors, backend="triton")
