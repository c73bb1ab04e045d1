"""That the recurrences which the GPU is proved on leave nothing out. Needs no GPU."""

from __future__ import annotations

import itertools

import pytest

from ncgru.recurrence.cuda import small
from tests.gpu import covering
from tests.gpu.covering import BATCHES, DIRECTIONS, NONLINEARITIES, PRECISIONS, RESETS, SIZES, STEPS
from tests.recurrence.cuda.proof import Case

ALL = [case for number, kind in enumerate(covering.kinds()) for case in covering.cases(number, kind)]


def precision(case: Case) -> str:
    return "tf32" if case.kind.tf32 else case.kind.storage


def is_large(case: Case) -> bool:
    return case.kind.hidden > small.LARGEST_HIDDEN


def test_each_regime_runs_every_kind() -> None:
    met = {(is_large(x), precision(x), x.kind.reset, x.kind.nonlinearity) for x in ALL}
    assert met == set(itertools.product((False, True), PRECISIONS, RESETS, NONLINEARITIES))


def test_each_kind_runs_in_every_direction_with_and_without_lengths() -> None:
    for of, values in (
        (lambda x: x.kind.reset, RESETS),
        (lambda x: x.kind.nonlinearity, NONLINEARITIES),
        (precision, PRECISIONS),
    ):
        met = {(is_large(x), of(x), x.directions, x.lengths) for x in ALL}
        assert met == set(itertools.product((False, True), values, DIRECTIONS, (False, True)))


def test_every_shape_meets_every_regime_precision_and_reset() -> None:
    for of, values in ((precision, PRECISIONS), (lambda x: x.kind.reset, RESETS), (lambda x: x.steps, STEPS)):
        met = {(is_large(x), of(x), x.batch) for x in ALL}
        assert met == set(itertools.product((False, True), values, BATCHES))


@pytest.mark.parametrize("size", SIZES)
def test_every_size_meets_every_length_and_many_batches(size: int) -> None:
    own = [case for case in ALL if case.kind.hidden == size]
    assert {case.steps for case in own} == set(STEPS)
    assert len({case.batch for case in own}) >= 6
    assert {case.directions for case in own} == set(DIRECTIONS)
    assert {case.lengths for case in own} == {False, True}


def test_long_sequences_meet_every_reset_nonlinearity_precision_and_direction() -> None:
    assert {case.steps for case in covering.LONG} == {2020}
    assert {precision(case) for case in covering.LONG} == set(PRECISIONS)
    assert {case.kind.reset for case in covering.LONG} == set(RESETS)
    assert {case.kind.nonlinearity for case in covering.LONG} == set(NONLINEARITIES)
    assert {case.directions for case in covering.LONG} == set(DIRECTIONS)
