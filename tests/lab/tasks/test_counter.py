"""The counter-based random numbers: equal to the published generator, and without visible structure."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch
from torch import Tensor

from ncgru.lab.tasks.counter import integers, mix, random_bits, sequence_keys, stream_key, uniform
from tests.lab.tasks import numpy_truth


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _keys(count: int, *, seed: int = 0, stream: str = "train") -> Tensor:
    return sequence_keys(stream_key(torch.tensor(seed), stream), torch.arange(count))


def _deviation(counts: Tensor) -> float:
    """Chi-square against equal chances, in standard deviations (many bins: close to normal)."""
    expected = counts.sum().double() / counts.numel()
    freedom = counts.numel() - 1
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    return (chi_square - freedom) / math.sqrt(2 * freedom)


def _pair_deviation(first: Tensor, second: Tensor) -> float:
    """Chi-square of two 5-bit variables over their 1,024 joint values."""
    return _deviation(torch.bincount((first * 32 + second).flatten(), minlength=1024))


def test_slow_generator_gives_the_published_numbers() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert list(islice(numpy_truth.splitmix64(1234567), 5)) == published


@pytest.mark.parametrize("word", [0, 1, 1234567, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15])
def test_mix_is_splitmix64(word: int) -> None:
    state = (word - numpy_truth.GOLDEN) % 2**64
    assert mix(torch.tensor([_signed(word)])).item() == _signed(next(numpy_truth.splitmix64(state)))


@pytest.mark.parametrize("seed", [0, 1, 12345, -7, 2**63 - 1])
@pytest.mark.parametrize("stream", ["train", "valid", "test"])
def test_keys_and_draws_equal_the_slow_generator(seed: int, stream: str) -> None:
    index = torch.tensor([0, 1, 2, 1_000_000, 2**40])
    keys = sequence_keys(stream_key(torch.tensor(seed), stream), index)
    slow = [numpy_truth.key(seed, stream, i) for i in index.tolist()]
    assert keys.tolist() == [_signed(k) for k in slow]
    bits = random_bits(keys, 4, first=3)
    assert bits.tolist() == [[numpy_truth.output(k, 3 + j) >> 33 for k in slow] for j in range(4)]


def test_draws_do_not_depend_on_how_many_are_taken() -> None:
    keys = _keys(6)
    assert torch.equal(random_bits(keys, 20)[5:9], random_bits(keys, 4, first=5))


def test_integers_by_a_tensor_of_bounds() -> None:
    keys = _keys(50)
    bounds = torch.tensor([[1], [2], [10]])
    drawn = integers(keys, 3, bounds)
    for k, bound in enumerate((1, 2, 10)):
        assert torch.equal(drawn[k], integers(keys, 3, bound)[k])
        assert set(drawn[k].tolist()) == set(range(bound))


@pytest.mark.parametrize("high", [2, 3, 7, 9, 10, 209, 409, 1000])
def test_integers_are_uniform(high: int) -> None:
    drawn = integers(_keys(2000), 200, high)
    assert drawn.min() == 0
    assert drawn.max() == high - 1
    assert abs(_deviation(torch.bincount(drawn.flatten(), minlength=high))) < 4


def test_uniform_numbers_fill_the_unit_interval() -> None:
    drawn = uniform(_keys(2000), 500, dtype=torch.float64)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    bins = torch.bincount((drawn * 4096).long().flatten(), minlength=4096)
    assert abs(_deviation(bins)) < 4
    n = drawn.numel()
    assert abs(drawn.mean().item() - 1 / 2) < 4 / math.sqrt(12 * n)
    assert abs(drawn.var().item() - 1 / 12) < 4 / math.sqrt(180 * n)


def test_uniform_numbers_are_the_same_in_every_dtype() -> None:
    keys = _keys(10)
    assert torch.equal(uniform(keys, 30, dtype=torch.float32).double(), uniform(keys, 30, dtype=torch.float64))


def test_every_bit_is_fair_and_independent_of_every_other() -> None:
    bits = random_bits(_keys(4000), 50).flatten()
    signs = ((bits.unsqueeze(1) >> torch.arange(31)) & 1).double() * 2 - 1
    moments = signs.T @ signs / math.sqrt(len(bits))  # off the diagonal: standard normal if independent
    off_diagonal = moments[~torch.eye(31, dtype=torch.bool)]
    assert (signs.sum(0) / math.sqrt(len(bits))).abs().max() < 4.5
    assert off_diagonal.abs().max() < 4.5
    assert abs(off_diagonal.square().mean().item() - 1) < 0.2


@pytest.mark.parametrize("shift", [0, 13, 26])
@pytest.mark.parametrize("lag", [1, 2, 10])
def test_neighbouring_draws_and_sequences_are_independent(lag: int, shift: int) -> None:
    five_bits = (random_bits(_keys(3000), 100) >> shift) & 31
    assert abs(_pair_deviation(five_bits[:-lag], five_bits[lag:])) < 4
    assert abs(_pair_deviation(five_bits[:, :-lag], five_bits[:, lag:])) < 4
    assert abs(_pair_deviation(five_bits[:-lag, lag:], five_bits[lag:, :-lag])) < 4


@pytest.mark.parametrize("shift", [0, 26])
def test_seeds_and_streams_are_independent(shift: int) -> None:
    first = (random_bits(_keys(3000), 100) >> shift) & 31
    for other in (_keys(3000, seed=1), _keys(3000, seed=-1), _keys(3000, stream="valid"), _keys(3000, stream="test")):
        assert abs(_pair_deviation(first, (random_bits(other, 100) >> shift) & 31)) < 4


def test_the_first_draws_of_consecutive_seeds_are_uniform() -> None:
    streams = stream_key(torch.arange(100_000), "train")
    first = random_bits(sequence_keys(streams, torch.tensor(0)), 1)[0]
    assert abs(_deviation(torch.bincount(first >> 21, minlength=1024))) < 4
    assert abs(_deviation(torch.bincount(first & 1023, minlength=1024))) < 4


def test_triples_of_draws_fill_the_cube() -> None:
    three = integers(_keys(200_000), 3, 16)
    assert abs(_deviation(torch.bincount(three[0] * 256 + three[1] * 16 + three[2], minlength=4096))) < 4


def test_runs_up_and_down_are_as_frequent_as_they_should_be() -> None:
    drawn = random_bits(_keys(1000), 300)
    up = (drawn[1:] > drawn[:-1]).double()
    turns = (up[1:] != up[:-1]).double()
    n = turns.numel()
    assert abs(turns.mean().item() - 2 / 3) < 4 * math.sqrt(16 / 90 / n)
    assert abs(up.mean().item() - 1 / 2) < 4 / math.sqrt(12 * n)


def test_changing_one_bit_of_the_counter_changes_half_of_the_output() -> None:
    words = mix(torch.arange(4000))
    counts = []
    for bit in range(63):
        changed = mix(words) ^ mix(words ^ (1 << bit))
        counts.append(((changed.unsqueeze(1) >> torch.arange(64)) & 1).double().mean(0))
    shares = torch.stack(counts)  # [flipped bit, output bit]
    assert (shares - 0.5).abs().max() < 5.5 * 0.5 / math.sqrt(4000)


def test_a_million_keys_are_all_different() -> None:
    keys = torch.cat([_keys(500_000), _keys(250_000, stream="test"), _keys(250_000, seed=1)])
    assert len(torch.unique(keys)) == 1_000_000
