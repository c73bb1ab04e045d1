"""That small.cu computes the recurrence, on the emulator; and the arithmetic of its launches."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from ncgru.recurrence.cuda import small
from ncgru.recurrence.cuda.kind import Kind, Limits
from tests.recurrence.cuda.emulated import Emulated
from tests.recurrence.cuda.proof import Case, Inputs, inputs, prove, prove_as_a_whole, run, scattered

SIZES = (1, 2, 7, 16, 31, 56, 96, 127, 128)
BATCHES = (0, 1, 2, 3, 17)
STEPS = (1, 2, 3, 9)
DIRECTIONS = ("forward", "reverse", "both")
STORAGES = ("float32", "bfloat16", "float16")
RESETS = ("before", "after", "none")
NONLINEARITIES = ("modrelu", "tanh", "relu")
LIMITS = (Limits(multiprocessors=132, shared=232448), Limits(multiprocessors=1, shared=232448))
"""A GPU that takes each row in a block of its own, and one for which blocks of two rows must do."""


def machines(seed: int) -> list[Emulated]:
    return [Emulated(limits, seed) for limits in LIMITS]


def kinds() -> list[Kind]:
    """Every storage, reset and nonlinearity with some size, and every size."""
    found = [
        Kind(SIZES[(5 * i + i // 9) % len(SIZES)], storage, reset, nonlinearity)
        for i, (storage, reset, nonlinearity) in enumerate(itertools.product(STORAGES, RESETS, NONLINEARITIES))
    ]
    return found + [kind for size in SIZES if (kind := Kind(size, "float32", "before", "modrelu")) not in found]


@pytest.mark.parametrize("kind", kinds(), ids=str)
def test_computes_the_recurrence(kind: Kind) -> None:
    batch, steps = BATCHES[1 + kind.hidden % 4], STEPS[kind.hidden % 4]
    cases = [
        Case(kind, 9, 3, "both", lengths=True),
        Case(kind, steps, 2, "reverse"),
        Case(kind, 2, batch, "forward", lengths=True),
        Case(kind, 1, 1, "forward"),
    ]
    for seed, (machine, case) in enumerate(itertools.product(machines(0), cases)):
        prove(Emulated(machine.limits, seed), case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [Kind(*x) for x in itertools.product(SIZES, STORAGES, RESETS, NONLINEARITIES)], ids=str
)
def test_computes_the_recurrence_of_every_kind(kind: Kind) -> None:
    for steps, batch, directions, lengths in itertools.product(STEPS, BATCHES, DIRECTIONS, (False, True)):
        for machine in machines(steps + batch):
            prove(machine, Case(kind, steps, batch, directions, lengths))


def test_a_row_of_negative_length_is_over_from_the_start() -> None:
    case = Case(Kind(6, "float32", "before", "tanh"), 3, 2, "both", lengths=True)
    found = []
    for length in (0, -1):
        given = replace(inputs(case), lengths=torch.tensor([length, 1]))
        found.append(run(Emulated(), case, given))
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name


@pytest.mark.parametrize("layout", range(3))
@pytest.mark.parametrize("hidden", [56, 118])
def test_every_layout_computes_the_same(hidden: int, layout: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = small.layouts(hidden)[layout]
    monkeypatch.setattr(small, "layouts", lambda _: (chosen,))
    for machine in machines(layout):
        prove(machine, Case(Kind(hidden, "float32", "before", "tanh"), 3, 3, "both", lengths=True))


def test_tensors_may_lie_in_memory_in_any_way() -> None:
    case = Case(Kind(7, "float32", "before", "modrelu"), 3, 3, "both", lengths=True)
    given = inputs(case)
    everywhere: dict[str, Any] = {name: None if x is None else scattered(x) for name, x in vars(given).items()}
    found = run(Emulated(), case, Inputs(**everywhere))
    for name, expected in run(Emulated(), case, given).items():
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("reset", RESETS)
def test_errors_of_all_steps_together(reset: str, storage: str) -> None:
    prove_as_a_whole(Emulated(), Case(Kind(31, storage, reset, "tanh"), 12, 9, lengths=True))


def test_a_block_stays_within_what_a_gpu_has() -> None:
    for hidden in range(1, small.LARGEST_HIDDEN + 1):
        for layout in small.layouts(hidden):
            threads = layout.threads(hidden)
            assert threads in range(32, 1025, 32)
            assert layout.lanes * -(-hidden // layout.units) <= threads
            assert layout.columns(hidden) * layout.lanes >= hidden
            assert threads * layout.registers(hidden, 3) <= 65536
            assert layout.units * small.MOST_ROWS <= layout.lanes


def test_two_rows_a_block_where_rows_outnumber_the_gpu() -> None:
    kind, limits = Kind(128, "float32", "before", "modrelu"), LIMITS[0]
    assert small.plan(kind, limits, 132, 1, False).grid == (132, 1, 1)
    assert small.plan(kind, limits, 66, 2, False).name == "small_forward_1"
    two = small.plan(kind, limits, 133, 1, True)
    assert (two.name, two.grid) == ("small_backward_2", (67, 1, 1))
    # Smaller matrices leave room for several blocks on a multiprocessor.
    assert small.plan(Kind(64, "float32", "before", "modrelu"), limits, 256, 1, False).name == "small_forward_1"
