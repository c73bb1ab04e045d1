"""The data of every task made one symbol at a time, from an independent SplitMix64 on Python integers.

Legend: T time, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
STREAMS = {"train": 1, "valid": 2, "test": 3}

Sequence = tuple[NDArray[np.float64], NDArray[np.float64]]


def splitmix64(state: int) -> Iterator[int]:
    """The published generator: the outputs that follow a state."""
    while True:
        state = (state + GOLDEN) & MASK
        word = state
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
        yield word ^ (word >> 31)


def output(state: int, number: int) -> int:
    """Output `number`, counted from 0, of the generator with this state."""
    return next(splitmix64((state + number * GOLDEN) & MASK))


def key(seed: int, stream: str, index: int) -> int:
    """The key of a sequence: the state's first output starts the streams, a stream's outputs are the keys."""
    start = output(seed & MASK, 0)
    return output(output(start, STREAMS[stream] - 1), index)


class Draws:
    """The draws of one sequence, by number."""

    def __init__(self, sequence_key: int) -> None:
        self.key = sequence_key

    def integer(self, number: int, high: int) -> int:
        return (output(self.key, number) >> 33) * high >> 31

    def uniform(self, number: int) -> float:
        return (output(self.key, number) >> 40) / 2**24


def one_hot(tokens: list[int], width: int) -> NDArray[np.float64]:
    rows = np.zeros((len(tokens), width))
    for row, token in zip(rows, tokens, strict=True):
        if token < width:
            row[token] = 1
    return rows


def count_brackets(tokens: list[int]) -> NDArray[np.float64]:
    counts = [0, 0, 0]
    rows = []
    for token in tokens:
        if token < 6:
            kind = token // 2
            counts[kind] = max(0, counts[kind] - 1) if token % 2 else min(5, counts[kind] + 1)
        rows.append(list(counts))
    return np.array(rows, dtype=np.float64)


def parenthesis(length: int, draws: Draws) -> Sequence:
    tokens = [draws.integer(t, 7) for t in range(length)]
    return one_hot(tokens, 7), count_brackets(tokens)


def _denoise(length: int, symbols: list[int], places: list[int], width: int) -> Sequence:
    tokens = [0] * (length + 20)
    for place, symbol in zip(sorted(places), symbols, strict=True):
        tokens[place] = symbol
    tokens[length + 9] = 10
    return one_hot(tokens, width), np.array([0.0] * (length + 10) + symbols)


def denoise_published(length: int, draws: Draws) -> Sequence:
    symbols = [1 + draws.integer(k, 9) for k in range(10)]
    places = [draws.integer(10 + k, length + 9) for k in range(10)]
    return _denoise(length, symbols, places, 10)


def denoise_corrected(length: int, draws: Draws) -> Sequence:
    symbols = [1 + draws.integer(k, 9) for k in range(10)]
    places: set[int] = set()
    for k in range(10):
        top = length + 9 - 10 + k
        pick = draws.integer(10 + k, top + 1)
        places.add(top if pick in places else pick)
    return _denoise(length, symbols, list(places), 11)


def copying(length: int, draws: Draws) -> Sequence:
    symbols = [1 + draws.integer(k, 8) for k in range(10)]
    tokens = symbols + [0] * length + [9] + [0] * 9
    return one_hot(tokens, 10), np.array([0.0] * (length + 10) + symbols)


def adding(length: int, draws: Draws) -> Sequence:
    half = (length - 1) // 2
    marked = (draws.integer(length, half), half + draws.integer(length + 1, length - half))
    rows = [[draws.uniform(t), float(t in marked)] for t in range(length)]
    return np.array(rows), np.array([[sum(value for value, mark in rows if mark)]])


def lost_symbols(places: int, sequences: int) -> tuple[float, float]:
    """Nats a sequence that overwritten symbols cost, by simulation: given the inputs alone, and if the earlier target
    symbols were known too. For each sequence all ways to divide the target into runs are gone through."""
    random = np.random.default_rng(7)
    alone = together = 0.0
    for _ in range(sequences):
        target = random.integers(1, 10, 10).tolist()
        where = np.sort(random.integers(0, places, 10)).tolist()
        seen = [symbol for k, symbol in enumerate(target) if k == 9 or where[k] != where[k + 1]]
        if len(seen) == 10:
            continue
        total = agreeing = 0.0
        right = np.zeros(10)
        for ends in _run_ends(len(seen)):
            weight = 1 / math.prod(math.factorial(b - a) for a, b in pairwise((0, *ends)))
            total += weight
            shown = dict(zip(ends, seen, strict=True))
            right += weight * np.array(
                [float(shown[t] == target[t - 1]) if t in shown else 1 / 9 for t in range(1, 11)]
            )
            if all(target[end - 1] == symbol for end, symbol in shown.items()):
                agreeing += weight / 9 ** (10 - len(seen))
        alone -= float(np.log(right / total).sum())
        together -= math.log(agreeing / total)
    return alone / sequences, together / sequences


def _run_ends(runs: int, start: int = 0) -> Iterator[tuple[int, ...]]:
    """The last steps of `runs` runs that fill the steps after `start` up to 10, in all ways."""
    if runs == 1:
        yield (10,)
        return
    for end in range(start + 1, 10 - runs + 2):
        for rest in _run_ends(runs - 1, end):
            yield (end, *rest)


GENERATORS: dict[str, Callable[[int, Draws], Sequence]] = {
    "parenthesis": parenthesis,
    "denoise": denoise_published,
    "denoise-corrected": denoise_corrected,
    "copying": copying,
    "adding": adding,
}
