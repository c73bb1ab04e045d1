"""Corpora as batches: columns, segments and their lengths."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import NormalDist, mean, stdev

import numpy as np
import pytest
import torch
from torch import Tensor

from ncgru.lab.tasks.segments import CorpusSource, segment_ends
from tests.lab.tasks import numpy_truth


def _tokens(count: int = 1003) -> Tensor:
    return torch.arange(count)


def _source(batch_size: int = 4, bptt: int = 20, *, seed: int | None = None, count: int = 1003) -> CorpusSource:
    return CorpusSource(_tokens(count), batch_size, range(batch_size), bptt, length_seed=seed)


def _lengths(ends: list[int]) -> list[int]:
    return [b - a for a, b in pairwise([0, *ends])]


@pytest.mark.parametrize("seed", [None, 3])
def test_an_epoch_shows_every_step_of_every_column_once(seed: int | None) -> None:
    source = _source(seed=seed)
    batches = [source.batch(k) for k in range(source.epoch_start(1))]
    columns = np.arange(1000).reshape(4, 250).T
    np.testing.assert_array_equal(torch.cat([batch.inputs for batch in batches]), columns[:-1])
    np.testing.assert_array_equal(torch.cat([batch.targets for batch in batches]), columns[1:])


@pytest.mark.parametrize("seed", [None, 3])
def test_state_is_carried_within_an_epoch_only(seed: int | None) -> None:
    source = _source(seed=seed)
    starts = {source.epoch_start(epoch) for epoch in range(4)}
    assert [source.continues(k) for k in range(max(starts))] == [k not in starts for k in range(max(starts))]


@pytest.mark.parametrize("seed", [None, 0, 3])
def test_a_position_gives_the_same_segment_whatever_came_before(seed: int | None) -> None:
    source = _source(seed=seed)
    straight = [source.segment(k) for k in range(60)]
    fresh = _source(seed=seed)
    for k in (59, 0, 31, 17):
        assert fresh.segment(k) == straight[k]


def test_fixed_lengths() -> None:
    source = _source(bptt=20)
    assert source.batches_per_epoch == 13
    assert [source.segment(k).length for k in range(13)] == [20] * 12 + [9]
    assert source.segment(14) == (1, 1, 20, 20)
    assert source.epoch_start(3) == 39
    assert source.learning_rate_scale(12) == 1.0


def test_a_column_of_whole_segments_has_no_empty_one() -> None:
    assert segment_ends(60, 20, None, 0) == [20, 40, 60]
    assert segment_ends(7, 20, None, 0) == [7]


@pytest.mark.parametrize(("seed", "epoch", "bptt"), [(0, 0, 100), (1111, 7, 70), (5, 2, 8)])
def test_random_lengths_equal_the_slow_version(seed: int, epoch: int, bptt: int) -> None:
    steps = 5000
    draws = numpy_truth.Draws(numpy_truth.key(seed, "train", epoch))
    slots = steps // 5 + 1
    slow: list[int] = []
    while sum(slow) < steps:
        share, normal = ((draws.integer(k, 2**31) + 0.5) / 2**31 for k in (len(slow), slots + len(slow)))
        centre = bptt if share < 0.95 else bptt / 2
        slow.append(max(5, int(centre + 5 * NormalDist().inv_cdf(normal))))
    slow[-1] -= sum(slow) - steps
    assert _lengths(segment_ends(steps, bptt, seed, epoch)) == slow


def test_random_lengths_have_the_usual_distribution() -> None:
    lengths = _lengths(segment_ends(1_000_000, 100, 1, 0))[:-1]
    long = [length for length in lengths if length > 75]
    share = len(long) / len(lengths)
    assert abs(share - 0.95) < 4 * math.sqrt(0.95 * 0.05 / len(lengths))
    assert abs(mean(long) - 99.5) < 4 * 5 / math.sqrt(len(long))  # cutting to an integer takes half a step
    assert abs(stdev(long) - 5) < 0.2
    short = [length for length in lengths if length <= 75]
    assert abs(mean(short) - 49.5) < 4 * 5 / math.sqrt(len(short))


def test_random_lengths_differ_between_seeds_and_epochs() -> None:
    plans = [segment_ends(2000, 50, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(plan) for plan in plans}) == 4


def test_no_random_length_is_below_five_but_the_last() -> None:
    lengths = _lengths(segment_ends(20_001, 5, 0, 0))
    assert min(lengths[:-1]) == 5
    assert sum(lengths) == 20_001


def test_the_rate_follows_random_lengths() -> None:
    source = _source(seed=3)
    assert source.batches_per_epoch is None
    assert source.learning_rate_scale(2) == source.batch(2).inputs.shape[0] / 20


def test_ranks_together_have_the_joint_batch() -> None:
    joint = _source(seed=1).batch(3)
    parts = [CorpusSource(_tokens(), 4, rows, 20, length_seed=1).batch(3) for rows in (range(2), range(2, 4))]
    assert torch.equal(torch.cat([part.inputs for part in parts], 1), joint.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts], 1), joint.targets)


def test_copies_stand_side_by_side() -> None:
    single = _source().batch(1)
    double = CorpusSource(_tokens(), 4, range(4), 20, copies=2).batch(1)
    assert torch.equal(double.inputs, torch.cat([single.inputs, single.inputs], 1))


def test_a_window_may_start_where_a_tensor_says() -> None:
    source = _source()
    for start in (0, 7, 229):
        by_int, by_tensor = source.window(start, 20), source.window(torch.tensor(start), 20)
        assert torch.equal(by_int.inputs, by_tensor.inputs)
        assert torch.equal(by_int.targets, by_tensor.targets)


def test_one_column_uses_all_tokens_but_the_first_as_targets() -> None:
    source = _source(1, 100, count=451)
    targets = torch.cat([source.batch(k).targets for k in range(source.epoch_start(1))])
    assert torch.equal(targets[:, 0], torch.arange(1, 451))
