"""The programs that are compiled for every architecture stand for all."""

from __future__ import annotations

import itertools

import pytest

from ncgru.recurrence.cuda import small
from ncgru.recurrence.cuda.kind import Kind
from ncgru.recurrence.cuda.large import GLOBAL, REGISTERS, Design
from ncgru.recurrence.cuda.variants import kinds

CHOICES = (("before", "after", "none"), ("modrelu", "tanh", "relu"), ("float32", "bfloat16", "float16", "tf32"))


def choices(kind: Kind) -> tuple[str, str, str]:
    return kind.reset, kind.nonlinearity, "tf32" if kind.tf32 else kind.storage


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 2)])
def test_any_two_choices_meet(pair: tuple[int, int]) -> None:
    def met(found: list[Kind]) -> set[tuple[str, ...]]:
        return {tuple(choices(kind)[i] for i in pair) for kind in found}

    everything = set(itertools.product(*(CHOICES[i] for i in pair)))
    listed = [kind for kind, _ in kinds()]
    assert met([kind for kind in listed if kind.hidden > small.LARGEST_HIDDEN]) == everything
    # The small kernel knows no tf32.
    assert met([kind for kind in listed if kind.hidden <= small.LARGEST_HIDDEN]) == {
        which for which in everything if "tf32" not in which
    }


def test_matrices_are_held_in_every_way() -> None:
    designs = [Design(kind, limits, False) for kind, limits in kinds() if kind.hidden > small.LARGEST_HIDDEN]
    held = [design.held[-design.kind.gates :] for design in designs]
    assert any(REGISTERS in places for places in held)
    assert any(GLOBAL in places and set(places) != {GLOBAL} for places in held)
    assert any(set(places) == {GLOBAL} for places in held)
    assert any(design.wide > design.narrow for design in designs)
