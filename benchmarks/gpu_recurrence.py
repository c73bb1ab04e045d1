"""Time of one recurrent layer on a GPU: NCGRU against nn.GRU, nn.LSTM, NCGRU in plain PyTorch, and peers if installed.

A training step is the input projection, the recurrence forward and backward, the gradients of input and weights, and,
for NCGRU, the update of its orthogonal matrix after a move of A. "eager" is the time of steps called from Python one
after another, "graph" that of the same replayed from a CUDA graph. The input has n features. All contestants of a shape
take turns, so ratios are to be taken within a run. Plain PyTorch runs 64 steps of time; the time of all is inferred.

Prints tables with ratios against what must be reached, and adds one line of JSON a measurement to the file of --out.

    python -m benchmarks.gpu_recurrence --groups paper small --out benchmarks/results/h200.jsonl
    python -m benchmarks.gpu_recurrence --quick
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import judge
from benchmarks.gpu.layers import Layer, contestants, of_module, set_precision, torch_dtype
from benchmarks.gpu.programs import compile_ahead
from benchmarks.gpu.records import Record, append, facts, record
from benchmarks.gpu.shapes import FIRST_USE, GROUPS, ORTHOGONAL_SIZES, OTHER_GROUPS, OURS, Shape
from benchmarks.gpu.timing import Call, Sample, captured, in_turns, warm_up
from benchmarks.gpu_orthogonal import our_step, torch_step
from ncgru import NCGRU

Key = tuple[str, str, str, str]  # dtype, what, pass, mode


class Bench:
    """Builds, warms up, times, and forgets; failures are results too.

    Attributes:
        common: facts that each record carries.
        seconds: how long to repeat, a shape.
        chosen: names of the contestants that run; all if empty.
    """

    def __init__(self, common: Record, seconds: float, chosen: Collection[str] = ()) -> None:
        self.common = common
        self.seconds = seconds
        self.chosen = chosen
        self._calls: dict[Key, Call] = {}
        self._failures: dict[Key, str] = {}
        self._layers: dict[tuple[str, str], Layer] = {}

    def add(self, dtype: str, what: str, passing: str, call: Call, *, capture: bool = True) -> None:
        """Warm a call up, and time it from Python and from a graph; a failed capture would spoil what comes after."""
        set_precision(dtype)
        key = (dtype, what, passing)
        try:
            warm_up(call)
        except Exception as error:  # whatever keeps a contestant from running is what we report of it
            self._failures[*key, judge.EAGER] = _reason(error)
            return
        self._calls[*key, judge.EAGER] = call
        if not capture:
            return
        try:
            self._calls[*key, judge.GRAPH] = captured(call)
        except Exception as error:
            self._failures[*key, judge.GRAPH] = _reason(error)

    def add_layers(self, shape: Shape, dtype: str) -> None:
        for what, build in contestants(shape, dtype):
            if self.chosen and what not in self.chosen:
                continue
            set_precision(dtype)
            try:
                layer = build()
            except Exception as error:
                self._failures[dtype, what, judge.TRAINING, judge.EAGER] = _reason(error)
                continue
            self._layers[dtype, what] = layer
            self.add(dtype, what, judge.TRAINING, layer.training)
            if layer.forward is not None:
                self.add(dtype, what, judge.FORWARD, layer.forward)

    def finish(self, group: str, shape: Shape) -> list[dict[str, Any]]:
        """Time what was added, and let go of it. All that was added has one setting of tf32."""
        found = in_turns(self._calls, self.seconds)
        lines = [self._line(group, shape, key, sample) for key, sample in found.items()]
        lines += [record(self.common, group, shape, *key, reason) for key, reason in self._failures.items()]
        self._calls, self._failures, self._layers = {}, {}, {}
        gc.collect()
        torch.cuda.empty_cache()
        return lines

    def _line(self, group: str, shape: Shape, key: Key, sample: Sample) -> dict[str, Any]:
        layer = self._layers.get(key[:2])
        more: dict[str, Any] = {}
        if layer is not None and 1 < layer.steps < shape.T:
            sample, more["measured_T"] = sample.scaled(shape.T / layer.steps), layer.steps
        if layer is not None and isinstance(layer.module, NCGRU):
            counters = [(name, value) for name, value in layer.module.named_buffers() if value.dtype == torch.int64]
            for word in ("updates", "refreshes"):
                more[word] = sum(int(value.sum()) for name, value in counters if name.endswith(word))
        return record(self.common, group, shape, *key, sample, **more)


def _reason(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


def layers(name: str, bench: Bench, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """The measurements of a group, shape by shape."""
    group = GROUPS[name]
    shapes = group.shapes[:1] if quick else group.shapes
    compile_ahead(itertools.product(shapes, group.dtypes))
    for shape in shapes:
        for dtype in group.dtypes:
            bench.add_layers(shape, dtype)
        yield bench.finish(name, shape)


def orthogonal(bench: Bench, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """The update of one matrix, ours and torch's."""
    for n in ORTHOGONAL_SIZES[:1] if quick else ORTHOGONAL_SIZES:
        bench.add("float32", OURS, judge.UPDATING, our_step(n, 1)[0])
        bench.add("float32", judge.TORCH_CAYLEY, judge.UPDATING, torch_step(n, 1), capture=False)
        yield bench.finish("orthogonal", Shape(1, 1, n))


def first_use(common: Record, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """The first training step of a fresh process, with an empty cache of machine code and with a full one."""
    for shape, dtype in FIRST_USE[:1] if quick else FIRST_USE:
        with tempfile.TemporaryDirectory() as folder:
            lines = []
            for mode in ("cold", "warm"):
                first, following = _in_fresh_process(shape, dtype, folder)
                lines.append(_once(common, shape, dtype, mode, first))
            lines.append(_once(common, shape, dtype, "next", following))
        yield lines


def _once(common: Record, shape: Shape, dtype: str, mode: str, seconds: float) -> dict[str, Any]:
    sample = Sample(seconds * 1e6, (seconds * 1e6, seconds * 1e6), 1, 1)
    return record(common, "first-use", shape, dtype, OURS, judge.FIRST, mode, sample)


def _in_fresh_process(shape: Shape, dtype: str, folder: str) -> tuple[float, float]:
    """Seconds of the first and of the second training step."""
    command = [sys.executable, "-m", "benchmarks.gpu_recurrence", "--first-use", *map(str, shape), dtype]
    environment = os.environ | {"NCGRU_CACHE": folder}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the first use of n={shape.n} failed:\n{done.stderr}")
    first, following = map(float, done.stdout.split()[-2:])
    return first, following


def print_first_use(shape: Shape, dtype: str) -> None:
    """What the fresh process does. CUDA, cuBLAS and autograd are started first: they are no part of ncgru.

    The first call of `torch.autograd.grad` that is given a gradient imports sympy, which takes two seconds on some
    machines.
    """
    start = torch.randn(64, 64, device="cuda", dtype=torch_dtype(dtype), requires_grad=True)
    torch.autograd.grad(start @ start, start, start.detach())
    torch.cuda.synchronize()
    set_precision(dtype)
    seconds = []
    layer = of_module(lambda: NCGRU(shape.n, shape.n, device="cuda", dtype=torch_dtype(dtype)), shape, moving=True)
    for _ in range(2):
        begin = time.perf_counter()
        layer.training()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    print(*seconds)


def run(name: str, bench: Bench, quick: bool) -> Iterator[list[dict[str, Any]]]:
    if name == "first-use":
        return first_use(bench.common, quick)
    return orthogonal(bench, quick) if name == "orthogonal" else layers(name, bench, quick)


def show(tables: list[judge.Table]) -> None:
    for table in tables:
        print(f"\n{table.title}\n{table.note}")
        widths = [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]
        for row in (table.header, *table.rows):
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*GROUPS, *OTHER_GROUPS]
    parser.add_argument("--groups", nargs="+", choices=names, default=names, metavar="GROUP", help=", ".join(names))
    parser.add_argument("--out", type=Path, help="the file that JSON lines are added to")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help='contestants, such as NCGRU "nn.GRU"')
    parser.add_argument("--quick", action="store_true", help="the first shape of each group")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to repeat, a shape (but 7 times at least)")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--first-use", nargs=4, metavar=("T", "B", "N", "DTYPE"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure the groups that were asked for."""
    chosen = options()
    if chosen.first_use:
        *sizes, dtype = chosen.first_use
        print_first_use(Shape(*map(int, sizes)), dtype)
        return
    bench = Bench(facts(chosen.commit), chosen.seconds, chosen.only)
    lines: list[dict[str, Any]] = []
    for name in chosen.groups:
        begin = time.perf_counter()
        for measured in run(name, bench, chosen.quick):
            lines += measured
            if chosen.out is not None:
                append(chosen.out, measured)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    show(judge.tables(lines))
    if any("failed" in line and line["what"] == OURS for line in lines):
        raise SystemExit("something of ours could not be measured; see the last table")


if __name__ == "__main__":
    main()
