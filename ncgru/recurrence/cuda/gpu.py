"""GPUs as the machines that the kernels run on, and why one cannot run them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._cuda import Kernel, program, why_unavailable
from . import small
from .kind import Kind, Limits, storage_of
from .large import LARGEST_HIDDEN, Design
from .machine import Argument, Machine

OLDEST = (8, 0)
"""The least compute capability: tensor cores for tf32 and bfloat16."""
FAST_HALVES = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities of data centres: tensor cores with at least 16 times the rate of float32, elsewhere 2 to 4."""


@dataclass(frozen=True)
class Gpu:
    """The CUDA device of this number."""

    index: int
    limits: Limits

    def launch(
        self,
        source: str,
        defines: Mapping[str, int],
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Argument],
        *,
        shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        kernel = _kernel(self.index, source, name, tuple(defines.items()))
        kernel.launch(grid, (threads, 1, 1), *arguments, shared=shared, cooperative=cooperative)


@functools.cache
def gpu(index: int) -> Gpu:
    """The machine on device `index`."""
    properties: Any = torch.cuda.get_device_properties(index)
    fast_halves = (properties.major, properties.minor) in FAST_HALVES
    return Gpu(index, Limits(properties.multi_processor_count, properties.shared_memory_per_block_optin, fast_halves))


def machine_of(tensor: Tensor) -> Machine:
    """The machine that a tensor is on."""
    return gpu(tensor.get_device())


@functools.cache
def why_not(index: int) -> str | None:
    """What keeps the kernels from running on device `index`, whatever the recurrence; None if nothing does."""
    missing = why_unavailable(index)
    if missing is None and torch.cuda.get_device_capability(index) < OLDEST:
        have = ".".join(map(str, torch.cuda.get_device_capability(index)))
        return f"the kernels need compute capability {'.'.join(map(str, OLDEST))}, and this GPU has {have}"
    return missing


def why_not_this(dtype: torch.dtype, hidden_size: int) -> str | None:
    """What keeps the kernels from running this recurrence, whatever the GPU."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels compute float32, float16 and bfloat16, not {dtype}"
    if hidden_size > LARGEST_HIDDEN:
        return f"the kernels go up to hidden_size={LARGEST_HIDDEN}, and this is {hidden_size}"
    return None


@functools.cache
def why_not_there(index: int, dtype: torch.dtype, hidden_size: int, reset: str) -> str | None:
    """What keeps the kernels from running this recurrence on a device that runs others."""
    if hidden_size <= small.LARGEST_HIDDEN or _design(index, dtype, hidden_size, reset).possible:
        return None
    limits = gpu(index).limits
    return (
        f"hidden_size={hidden_size} is too large for this GPU, which has {limits.multiprocessors} multiprocessors with "
        f"{limits.shared} bytes of shared memory for a block"
    )


@functools.cache
def how(index: int, dtype: torch.dtype, hidden_size: int, reset: str) -> str:
    """How the kernels run this recurrence, for people who ask."""
    if hidden_size <= small.LARGEST_HIDDEN:
        return "one launch a pass, a block holds the matrices in registers"
    plan = _design(index, dtype, hidden_size, reset)
    where = "in shared memory and registers"
    if plan.streams:
        where = "in part; the rest is too large for the chip and read from its L2 cache at each step, which is slower"
    return f"one launch a pass, {plan.blocks(plan.narrow)} blocks hold the matrices {where}"


def _design(index: int, dtype: torch.dtype, hidden_size: int, reset: str) -> Design:
    return Design(Kind(hidden_size, storage_of(dtype), reset, "modrelu"), gpu(index).limits, backward=False)


@functools.cache
def _kernel(index: int, source: str, name: str, defines: tuple[tuple[str, int], ...]) -> Kernel:
    return program("ncgru.recurrence.cuda", source, dict(defines)).kernel(name, index)
