"""Bad input is refused in words, whatever it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncgru.recurrence import BackendUnavailableError, recurrence
from tests.recurrence.cases import make_case


def arguments(**changes: Any) -> dict[str, Any]:
    """A correct call with T=2, B=3, H=4, except for `changes`."""
    good: dict[str, Any] = {
        "projected": torch.zeros(2, 3, 12),
        "initial": torch.zeros(3, 4),
        "weight": torch.zeros(12, 4),
        "threshold": torch.zeros(4),
        "lengths": torch.tensor([2, 1, 2]),
    }
    return good | changes


WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"projected": torch.zeros(3, 12)}, r"projected must have shape \[T, B, G\*H\], got \(3, 12\)"),
    ({"projected": torch.zeros(0, 3, 12)}, r"at least one time step, got shape \(0, 3, 12\); pass T >= 1"),
    ({"projected": torch.zeros(2, 3, 8)}, r"projected must have shape \[T, B, 3\*H\] = \(2, 3, 12\), got \(2, 3, 8\)"),
    ({"initial": torch.zeros(4)}, r"initial must have shape \[B, H\], got \(4,\)"),
    ({"initial": torch.zeros(2, 4)}, r"initial must have shape \[B, H\] = \(3, 4\), got \(2, 4\)"),
    ({"initial": torch.zeros(3, 0)}, r"initial must have at least one column.*pass H >= 1"),
    ({"weight": torch.zeros(4, 12)}, r"weight must have shape \[3\*H, H\] = \(12, 4\), got \(4, 12\)"),
    ({"threshold": torch.zeros(3)}, r"threshold must have shape \[H\] = \(4,\), got \(3,\)"),
    ({"lengths": torch.tensor([1, 2])}, r"lengths must have shape \[B\] = \(3,\), got \(2,\)"),
    ({"reset": "none"}, r"projected must have shape \[T, B, H\] = \(2, 3, 4\), got \(2, 3, 12\)"),
    ({"reset": "befor"}, "reset must be one of .*'befor'; did you mean 'before'"),
    ({"nonlinearity": "gelu"}, "nonlinearity must be one of .*'gelu'; did you mean 'relu'"),
    ({"nonlinearity": "tanh"}, "threshold must be None with nonlinearity='tanh'; add a bias to projected"),
]

WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"projected": [[[1.0]]]}, "projected must be a torch.Tensor, got list"),
    ({"projected": torch.zeros(2, 3, 12, dtype=torch.int64)}, "projected must be float32, .* got torch.int64"),
    ({"initial": None}, "initial must be a torch.Tensor, got NoneType"),
    ({"initial": torch.zeros(3, 4).double()}, "initial must be torch.float32 where projected is torch.float32, got"),
    ({"weight": torch.zeros(12, 4).bfloat16()}, "weight must be torch.float32 .* got torch.bfloat16; convert"),
    ({"projected": torch.zeros(2, 3, 12).half(), "weight": torch.zeros(12, 4).bfloat16()}, "float32 or torch.float16"),
    ({"threshold": 0.1}, "threshold must be a torch.Tensor, got float"),
    ({"weight": torch.zeros(12, 4, device="meta")}, "weight must be on projected's device cpu, got meta"),
    ({"lengths": [2, 1, 2]}, "lengths must be a torch.Tensor, got list"),
    ({"lengths": torch.tensor([2, 1, 2], dtype=torch.int32)}, r"lengths must be torch.int64, got torch.int32"),
    ({"lengths": torch.zeros(3, dtype=torch.int64, device="meta")}, "lengths must be on projected's device cpu"),
    ({"reverse": 1}, "reverse must be True or False, got int 1"),
    ({"reset": 3}, "reset must be a str"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_VALUES)
def test_wrong_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recurrence(**arguments(**changes))


@pytest.mark.parametrize(("changes", "message"), WRONG_TYPES)
def test_wrong_types(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        recurrence(**arguments(**changes))


def test_lengths_beyond_the_sequence_mean_its_whole_length() -> None:
    case = make_case(batch=3)
    expected = case.run()
    assert torch.equal(recurrence(*case.tensors, torch.tensor([7, 8, 100])), expected)
    held = recurrence(*case.tensors, torch.tensor([0, -1, -100]))
    assert torch.equal(held, case.initial.expand(7, 3, 5))


def test_meta_tensors_give_shapes() -> None:
    case = make_case(dtype=torch.float32)
    hidden = recurrence(*[x.detach().to("meta") for x in case.differentiable])
    assert hidden.shape == (7, 3, 5)
    assert hidden.is_meta


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
TENSORS = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), SHAPES, DTYPES)
ANYTHING = st.one_of(TENSORS, st.none(), st.integers(-2, 2), st.text(max_size=3), st.just(float("nan")))
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "projected": ANYTHING,
        "initial": ANYTHING,
        "weight": ANYTHING,
        "threshold": ANYTHING,
        "lengths": ANYTHING,
        "reset": st.sampled_from(["before", "after", "none", "", None, 1]),
        "nonlinearity": st.sampled_from(["modrelu", "tanh", "relu", "elu", None]),
        "reverse": st.sampled_from([True, False, 0, None]),
        "backend": st.sampled_from(["auto", "reference", "cuda", "x", None]),
    },
)


@settings(max_examples=1000, deadline=None)
@given(CHANGES)
def test_only_documented_exceptions_come_out(changes: dict[str, Any]) -> None:
    given_arguments = arguments(**changes)
    hidden = None
    message = ""
    try:
        hidden = recurrence(**given_arguments)
    except (ValueError, TypeError, BackendUnavailableError) as error:
        message = str(error)
    if hidden is None:
        assert any(name in message for name in [*given_arguments, "reset", "nonlinearity", "reverse", "backend"])
    else:
        assert hidden.shape == (*given_arguments["projected"].shape[:2], given_arguments["initial"].shape[1])
