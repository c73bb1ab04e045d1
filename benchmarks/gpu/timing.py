"""Medians of calls that take turns, so that what else the machine does meets them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

LEAST_REPEATS, MOST_REPEATS = 7, 31
_INTERVAL = 4e-3
"""Seconds that one timed stretch lasts, by making short calls several times in it."""
_MOST_CALLS = 50


@dataclass(frozen=True)
class Sample:
    """What a call took, in microseconds.

    Attributes:
        median: of all repeats.
        quartiles: the lower and the upper one.
        repeats: timed stretches.
        calls: calls within each.
    """

    median: float
    quartiles: tuple[float, float]
    repeats: int
    calls: int

    def scaled(self, factor: float) -> Sample:
        low, high = self.quartiles
        return Sample(self.median * factor, (low * factor, high * factor), self.repeats, self.calls)


def warm_up(call: Call, times: int = 2) -> None:
    """Compile, load and allocate what the call needs."""
    for _ in range(times):
        call()
    torch.cuda.synchronize()


def captured(call: Call) -> Call:
    """The replay of a CUDA graph of one call, which must have been warmed up.

    Raises:
        RuntimeError: something in the call cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def in_turns(calls: Mapping[Key, Call], seconds: float) -> dict[Key, Sample]:
    """Time calls that are warmed up; as many repeats as fit into these seconds, within bounds."""
    inner = {key: _calls_in_an_interval(call) for key, call in calls.items()}
    times: dict[Key, list[float]] = {key: [] for key in calls}
    end = time.perf_counter() + seconds
    for repeat in range(MOST_REPEATS):
        if repeat >= LEAST_REPEATS and time.perf_counter() > end:
            break
        for key, call in calls.items():
            times[key].append(_stretch(call, inner[key]))
    return {key: _summary(values, inner[key]) for key, values in times.items()}


def _calls_in_an_interval(call: Call) -> int:
    _stretch(call, 1)
    once = _stretch(call, 1) / 1e6
    return max(1, min(_MOST_CALLS, round(_INTERVAL / max(once, 1e-9))))


def _stretch(call: Call, calls: int) -> float:
    """Microseconds a call, of calls issued one after another to an idle GPU: the host's time where that is longer."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def _summary(values: list[float], calls: int) -> Sample:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Sample(middle, (low, high), len(values), calls)
