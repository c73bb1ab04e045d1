"""What `large.cu` computes, on the emulator: every kind, direction and shape, with all blocks under way at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from ncgru.recurrence.cuda import large, small
from ncgru.recurrence.cuda.kind import Kind, Limits
from tests.recurrence.cuda.compare import excess, problem
from tests.recurrence.cuda.emulated import Emulated

# In float32 a sum over few terms may be off by a few units of the last place where the reference happens not to be.
LEAST = {"float32": 6e-7, "bfloat16": 2e-2, "float16": 3e-3}
RESETS, NONLINEARITIES = ("before", "after", "none"), ("modrelu", "tanh", "relu")


@pytest.fixture(autouse=True)
def _always_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small sizes too, which the emulator takes less time for; and memory that nobody wrote holds NaN."""
    monkeypatch.setattr(small, "LARGEST_HIDDEN", 0)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("reset", "nonlinearity"), list(itertools.product(RESETS, NONLINEARITIES)))
def test_kinds_in_float32(reset: str, nonlinearity: str) -> None:
    x = problem(Kind(40, "float32", reset, nonlinearity), 3, 9, 2, ragged=True)
    assert excess(Emulated(), x, LEAST["float32"]) == {}


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
@pytest.mark.parametrize("reset", RESETS)
def test_kinds_in_16_bits(storage: str, reset: str) -> None:
    x = problem(Kind(40, storage, reset, "modrelu"), 3, 9, reverse=True, ragged=True)
    assert excess(Emulated(), x, LEAST[storage]) == {}


@pytest.mark.parametrize(("hidden", "steps", "batch"), [(1, 1, 1), (2, 3, 2), (7, 2, 1), (16, 3, 8), (33, 2, 17)])
def test_shapes(hidden: int, steps: int, batch: int) -> None:
    x = problem(Kind(hidden, "float32", "before", "modrelu"), steps, batch)
    assert excess(Emulated(), x, LEAST["float32"]) == {}


def test_tf32_is_as_good_as_its_operands() -> None:
    x = problem(Kind(40, "float32", "before", "modrelu", tf32=True), 3, 9)
    assert excess(Emulated(), x, 2e-3) == {}
    assert excess(Emulated(), x, 1e-5) != {}


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_threads_does_not_matter(seed: int) -> None:
    """Also more pairs than warps, and matrices in registers and in shared memory."""
    x = problem(Kind(150, "float32", "before", "modrelu"), 4, 9, ragged=True)
    assert excess(Emulated(seed=seed), x, LEAST["float32"]) == {}


@pytest.mark.parametrize(
    ("limits", "hidden", "why"),
    [
        (Limits(3, 60000), 40, "many tiles a group"),
        (Limits(4, 46000), 40, "one direction after the other, and part after part of the batch"),
        (Limits(2, 46000), 70, "several slices a block"),
        (Limits(5, 22000), 70, "matrices read from global memory"),
        (Limits(4, 232448), 40, "wide blocks"),
        (Limits(9, 232448), 70, "wide blocks, the last of them with fewer slices"),
    ],
)
def test_small_machines(limits: Limits, hidden: int, why: str) -> None:
    x = problem(Kind(hidden, "float32", "before", "modrelu"), 4, 40, 2, ragged=True)
    assert excess(Emulated(limits), x, LEAST["float32"]) == {}, why


def test_matrices_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind(150, "float32", "before", "modrelu")
    monkeypatch.setattr(large.Design, "_choice", ((0, 0, 0), 2))
    assert excess(Emulated(), problem(kind, 3, 9), LEAST["float32"]) == {}
    assert excess(Emulated(Limits(5, 232448)), problem(kind, 3, 17), LEAST["float32"]) == {}


def test_many_steps() -> None:
    """Long enough for words that come late, or are looked at too early, to do harm."""
    x = problem(Kind(40, "float32", "before", "tanh"), 40, 9)
    for seed in range(3):
        assert excess(Emulated(seed=seed), x, 1e-6) == {}
