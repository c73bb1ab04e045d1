"""Compiles the kernels that a measurement needs, many at a time, so that the machine's time goes to measuring."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from benchmarks.gpu.shapes import TF32, Shape
from ncgru._cuda import program
from ncgru.recurrence.cuda import gpu, small
from ncgru.recurrence.cuda.kind import Kind
from ncgru.recurrence.cuda.large import Design

Source = tuple[str, Mapping[str, int]]


def compile_ahead(runs: Iterable[tuple[Shape, str]]) -> None:
    """Bring the machine code for NCGRU of these shapes and dtypes into the cache on disk."""
    sources = {str(source): source for shape, dtype in runs for source in [_source(shape.n, dtype)]}
    major, minor = torch.cuda.get_device_capability(0)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        list(pool.map(_compile, sources.values(), [f"sm_{major}{minor}"] * len(sources)))


def _source(hidden: int, dtype: str) -> Source:
    kind = Kind(hidden, "float32" if dtype == TF32 else dtype, "before", "modrelu", tf32=dtype == TF32)
    limits = gpu.gpu(0).limits
    if hidden <= small.LARGEST_HIDDEN:
        return "small.cu", small.plan(kind, limits, 1, 1, backward=False).defines
    return "large.cu", Design(kind, limits, backward=False).defines


def _compile(source: Source, architecture: str) -> None:
    program("ncgru.recurrence.cuda", *source).cubin(architecture)
