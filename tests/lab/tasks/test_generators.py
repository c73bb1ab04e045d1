"""Every generator against a version that makes one symbol at a time, and the statistics of its data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ncgru.lab.tasks import Adding, Denoise, Parenthesis
from ncgru.lab.tasks.parenthesis import open_brackets
from tests.lab.tasks import numpy_truth
from tests.lab.tasks.synthetic_tasks import MAKERS


@pytest.mark.parametrize("kind", list(MAKERS))
@pytest.mark.parametrize("length", [3, 4, 17, 64, 100])
def test_equals_the_slow_version(kind: str, length: int) -> None:
    batch = MAKERS[kind](length).source("train", batch_size=6, seed=5).batch(2)
    for row in range(6):
        draws = numpy_truth.Draws(numpy_truth.key(5, "train", 2 * 6 + row))
        inputs, targets = numpy_truth.GENERATORS[kind](length, draws)
        np.testing.assert_array_equal(batch.inputs[:, row], inputs.astype(np.float32))
        np.testing.assert_allclose(batch.targets[:, row], targets, rtol=1e-7)


@given(st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=150))
def test_counts_of_any_tokens(rows: list[list[int]]) -> None:
    counts = open_brackets(torch.tensor(rows))
    for k in range(3):
        np.testing.assert_array_equal(counts[:, k], numpy_truth.count_brackets([row[k] for row in rows]))


@pytest.mark.parametrize("token", range(7))
def test_counts_of_one_repeated_token(token: int) -> None:
    counts = open_brackets(torch.full((40, 1), token))
    np.testing.assert_array_equal(counts[:, 0], numpy_truth.count_brackets([token] * 40))


def test_parenthesis_tokens_are_uniform_and_one_hot() -> None:
    inputs, targets = Parenthesis(length=200).source("test", batch_size=1600).batch(0)
    assert torch.equal(inputs.sum(-1), torch.ones(200, 1600))
    shares = inputs.mean((0, 1))
    assert (shares - 1 / 7).abs().max() < 4 * math.sqrt(6 / 49 / (200 * 1600))
    assert targets.dtype == torch.int64
    assert targets.min() == 0
    assert targets.max() == 5


@pytest.mark.parametrize(("length", "percent"), [(200, 19.6), (400, 10.5)])
def test_share_of_published_denoise_sequences_that_lose_a_symbol(length: int, percent: float) -> None:
    sequences = 20_000
    inputs, targets = Denoise(length=length, test_size=sequences).source("test", batch_size=sequences).batch(0)
    left = inputs[..., 1:].sum((0, 2))
    share = (left < 10).double().mean().item()
    exact = 1 - math.prod(1 - k / (length + 9) for k in range(10))
    assert round(100 * exact, 1) == percent
    assert abs(share - exact) < 4 * math.sqrt(exact * (1 - exact) / sequences)
    assert (targets[-10:] > 0).all()


def test_published_denoise_shows_the_marker_as_the_zero_vector() -> None:
    inputs, _ = Denoise(length=30).source("train", batch_size=50).batch(0)
    marker = torch.zeros(50, dtype=torch.int64) + 30 + 9
    assert inputs.shape[-1] == 10
    assert torch.equal(inputs.sum(-1).argmin(0), marker)
    assert torch.equal(inputs.sum((0, 2)), torch.full((50,), 49.0))


def test_corrected_denoise_keeps_all_symbols_in_order() -> None:
    inputs, targets = Denoise(length=30, variant="corrected").source("train", batch_size=500).batch(0)
    tokens = inputs.argmax(-1)
    assert torch.equal(inputs.sum(-1), torch.ones(50, 500))
    assert torch.equal(tokens[39], torch.full((500,), 10))
    for row in range(500):
        shown = tokens[:39, row]
        assert torch.equal(shown[shown > 0], targets[-10:, row])


def test_corrected_denoise_draws_every_set_of_places_equally_often() -> None:
    sequences = 66 * 400
    task = Denoise(length=3, variant="corrected", test_size=sequences)
    inputs, _ = task.source("test", batch_size=sequences).batch(0)
    occupied = (inputs[:12].argmax(-1) > 0).long()
    sets = (occupied * (2 ** torch.arange(12)).unsqueeze(1)).sum(0)
    _, counts = torch.unique(sets, return_counts=True)
    assert len(counts) == math.comb(12, 10)
    chi_square = ((counts - 400) ** 2 / 400).sum().item()
    assert abs(chi_square - 65) < 4 * math.sqrt(2 * 65)


@pytest.mark.parametrize("length", [3, 10, 11])
def test_adding_marks_one_step_of_each_half_uniformly(length: int) -> None:
    sequences = 10_000
    inputs, targets = Adding(length=length).source("test", batch_size=sequences).batch(0)
    half = (length - 1) // 2
    marks = inputs[..., 1]
    assert torch.equal(marks[:half].sum(0), torch.ones(sequences))
    assert torch.equal(marks[half:].sum(0), torch.ones(sequences))
    for part in (marks[:half], marks[half:]):
        share = 1 / len(part)
        assert (part.mean(1) - share).abs().max() < 4 * math.sqrt(share / sequences)
    torch.testing.assert_close(targets[0, :, 0], (inputs[..., 0] * marks).sum(0))
