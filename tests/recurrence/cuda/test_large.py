"""What `large.cu` computes, on the emulator: every kind, direction and shape, with all blocks under way at once."""

from __future__ import annotations

import itertools

import pytest

from ncgru.recurrence.cuda import large, passes, small
from ncgru.recurrence.cuda.kind import Kind, Limits
from tests.recurrence.cuda.emulated import Emulated
from tests.recurrence.cuda.proof import Case, inputs, prove, prove_as_a_whole, run

RESETS, NONLINEARITIES = ("before", "after", "none"), ("modrelu", "tanh", "relu")


@pytest.fixture(autouse=True)
def _always_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes too, which the emulator takes less time for."""
    for cached in (passes.design, passes.large_launches):  # tests make other choices for the same kinds
        cached.cache_clear()
    monkeypatch.setattr(small, "LARGEST_HIDDEN", 0)


@pytest.mark.parametrize(("reset", "nonlinearity"), list(itertools.product(RESETS, NONLINEARITIES)))
def test_kinds_in_float32(reset: str, nonlinearity: str) -> None:
    prove(Emulated(), Case(Kind(40, "float32", reset, nonlinearity), 3, 9, "both", lengths=True))


@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
@pytest.mark.parametrize("reset", RESETS)
def test_kinds_in_16_bits(storage: str, reset: str) -> None:
    prove(Emulated(), Case(Kind(40, storage, reset, "modrelu"), 3, 9, "reverse", lengths=True))


@pytest.mark.parametrize(("hidden", "steps", "batch"), [(1, 1, 1), (2, 3, 2), (7, 2, 1), (16, 3, 8), (33, 2, 17)])
def test_shapes(hidden: int, steps: int, batch: int) -> None:
    prove(Emulated(), Case(Kind(hidden, "float32", "before", "modrelu"), steps, batch))


@pytest.mark.parametrize("reset", RESETS)
def test_tf32_is_as_good_as_its_operands(reset: str) -> None:
    rounded = Case(Kind(40, "float32", reset, "modrelu", tf32=True), 3, 9)
    prove(Emulated(), rounded)
    given = inputs(rounded)
    exact = run(Emulated(), Case(Kind(40, "float32", reset, "modrelu"), 3, 9), given)
    for name, found in run(Emulated(), rounded, given).items():
        assert (found - exact[name]).norm() > 1e-5 * exact[name].norm(), name


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("reset", RESETS)
def test_errors_of_all_steps_together(reset: str, storage: str) -> None:
    prove_as_a_whole(Emulated(), Case(Kind(40, storage, reset, "tanh"), 12, 9, lengths=True))


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_threads_does_not_matter(seed: int) -> None:
    """Also more pairs than warps, and matrices in registers and in shared memory."""
    prove(Emulated(seed=seed), Case(Kind(150, "float32", "before", "modrelu"), 4, 9, lengths=True))


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
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_small_machines(limits: Limits, hidden: int, why: str) -> None:
    prove(Emulated(limits), Case(Kind(hidden, "float32", "before", "modrelu"), 4, 40, "both", lengths=True))


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("stack", [1, 2])
def test_matrices_in_registers(monkeypatch: pytest.MonkeyPatch, kept: int, stack: int) -> None:
    """The first pairs of each warp, or all of them."""
    kind = Kind(150, "float32", "before", "modrelu")
    monkeypatch.setattr(large.Design, "choice", large.Choice((0, 0, 0), kept, 2, stack))
    prove(Emulated(), Case(kind, 3, 9))
    prove(Emulated(Limits(5, 232448)), Case(kind, 3, 17))


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize(("width", "stack"), [(1, 2), (2, 2), (1, 3), (2, 3), (1, 4)])
def test_stacks_of_tiles(monkeypatch: pytest.MonkeyPatch, storage: str, reset: str, width: int, stack: int) -> None:
    """A group with one stack, and with several, of which the last is not full."""
    kind = Kind(40, storage, reset, "modrelu")
    monkeypatch.setattr(large.Design, "choice", large.Choice((1, 1, 1), 0, width, stack))
    for batch in (13, 77):
        prove(Emulated(Limits(6, 232448), seed=batch), Case(kind, 3, batch, "both", lengths=True))


def test_many_steps() -> None:
    """Long enough for words that come late, or are looked at too early, to do harm."""
    for seed in range(3):
        prove(Emulated(seed=seed), Case(Kind(40, "float32", "before", "tanh"), 40, 9))
