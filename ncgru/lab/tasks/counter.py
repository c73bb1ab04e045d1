r"""Counter-based random numbers: draw j of sequence i is a pure function of (seed, stream, i, j).

Nothing is stored between draws, so any batch can be made at any time, on any device, in any order: on resume, in
data-parallel training, and inside a captured CUDA graph whose position is a device tensor.

The function is SplitMix64 (Steele, Lea, Flood 2014): the j-th output of a generator with state k is `mix(k + (j+1) g)`
with `g` the odd integer nearest to 2^64 divided by the golden ratio and `mix` a bijection of 64-bit words. We nest it:
the key of a stream is an output of the generator seeded by the user's seed, the key of a sequence is an output of the
stream's generator, and a draw is an output of the sequence's generator.

Two sequences share draws only if their keys lie within one length of each other on a cycle of 2^64: with 10^6 sequences
of 10^3 draws the chance that any two do is about 10^-4, and such a pair would be one in 10^12.

Torch has no logical right shift for int64, the shift copies the sign: each one is followed by a mask. Products wrap
modulo 2^64 on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

STREAMS = ("train", "valid", "test")
"""Names of the streams; their data never meet."""


def _signed(word: int) -> int:
    """The int64 with the same bits as the unsigned 64-bit `word`."""
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _fold(words: Tensor, shift: int) -> Tensor:
    """words ^ (words >>> shift), with a logical shift."""
    shifted = words >> shift
    shifted &= (1 << (64 - shift)) - 1
    shifted ^= words
    return shifted


def _mix_high(words: Tensor) -> Tensor:
    """SplitMix64's mix without its last fold, which leaves the upper 31 bits as they are."""
    words = _fold(words, 30)
    words *= _FIRST
    words = _fold(words, 27)
    words *= _SECOND
    return words


def mix(words: Tensor) -> Tensor:
    """SplitMix64's bijection of 64-bit words, elementwise on int64."""
    return _fold(_mix_high(words), 31)


def stream_key(seed: Tensor, stream: str) -> Tensor:
    """Keys of one stream for a tensor of seeds (int64, any shape)."""
    step = _signed((STREAMS.index(stream) + 1) * _GOLDEN % 2**64)
    return mix(mix(seed + _GOLDEN) + step)


def sequence_keys(stream: Tensor, index: Tensor) -> Tensor:
    """Keys of the sequences numbered `index` in the streams with keys `stream` (int64; the two broadcast)."""
    return mix(stream + (index + 1) * _GOLDEN)


def random_bits(keys: Tensor, count: int, *, first: int = 0) -> Tensor:
    """31 random bits for draws `first`, ..., `first + count - 1` of each sequence.

    Args:
        keys: int64 [B], one key a sequence.
        count: number of draws a sequence.
        first: number of the first draw; draws with different numbers are independent.

    Returns:
        int64 [count, B], uniform over 0, ..., 2^31 - 1.
    """
    counters = torch.arange(first + 1, first + count + 1, device=keys.device)
    counters *= _GOLDEN
    words = _mix_high(keys + counters.unsqueeze(1))
    words >>= 33
    words &= (1 << 31) - 1
    return words


def integers(keys: Tensor, count: int, high: int | Tensor, *, first: int = 0) -> Tensor:
    """Integers uniform over 0, ..., high - 1, int64 [count, B]; `high` may be a tensor that broadcasts.

    By multiplication and shift: a value's probability is off by at most 2^-31.
    """
    words = random_bits(keys, count, first=first)
    words *= high
    words >>= 31
    return words


def uniform(keys: Tensor, count: int, *, dtype: torch.dtype = torch.float32, first: int = 0) -> Tensor:
    """Numbers uniform on the grid of 2^24 points in [0, 1), [count, B]: the same values in float32 and float64."""
    return (random_bits(keys, count, first=first) >> 7).to(dtype).mul_(2.0**-24)
