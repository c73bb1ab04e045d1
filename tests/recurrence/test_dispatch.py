"""Which backend runs, and what the refusals say."""

from __future__ import annotations

import pytest
import torch

from ncgru.recurrence import BackendUnavailableError, available_backends, recurrence, resolve_backend
from tests.recurrence.cases import make_case


@pytest.mark.parametrize("request_", ["auto", "reference"])
@pytest.mark.parametrize("device", ["cpu", "cuda:1", torch.device("meta")])
def test_reference_runs_everywhere(request_: str, device: torch.device | str) -> None:
    choice = resolve_backend(request_, device=device, dtype=torch.bfloat16, hidden_size=3, reset="none")
    assert choice.name == "reference"
    assert choice.reason
    assert "CUDA kernels" in choice.refused["cuda"]


def test_reference_is_available() -> None:
    assert available_backends() == ("reference",)


def test_refusals_say_what_is_missing() -> None:
    with pytest.raises(BackendUnavailableError, match=r"no CUDA kernels, and the tensors are on 'cpu'.*'reference'"):
        resolve_backend("cuda", device="cpu", dtype=torch.float32, hidden_size=8)
    with pytest.raises(BackendUnavailableError, match=r"hidden_size=8.*torch.float32.*no CUDA kernels; pass"):
        resolve_backend("cuda", device="cuda", dtype=torch.float32, hidden_size=8)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"backend must be one of 'auto', 'reference', 'cuda'.*did you mean 'reference'"
    ):
        resolve_backend("referense", device="cpu", dtype=torch.float32, hidden_size=8)
    with pytest.raises(TypeError, match="backend must be a str"):
        resolve_backend(None, device="cpu", dtype=torch.float32, hidden_size=8)  # type: ignore[arg-type]


def test_recurrence_obeys_its_backend_argument() -> None:
    case = make_case()
    expected = case.run()
    assert torch.equal(recurrence(*case.tensors, backend="reference"), expected)
    with pytest.raises(BackendUnavailableError):
        recurrence(*case.tensors, backend="cuda")
    with pytest.raises(ValueError, match="backend"):
        recurrence(*case.tensors, backend="triton")
