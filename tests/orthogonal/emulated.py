"""The launchers of ncgru.orthogonal.cuda on the CPU: their kernels run in the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ncgru import _cuda
from ncgru.orthogonal import cuda
from tests.emulator import compile_kernels

Sizes = tuple[int, int, int]


class EmulatedKernel:
    """What the launchers know of a `Kernel`, with little shared memory so that even small matrices come in chunks."""

    static_shared = 0

    def __init__(self, entry: str, name: str, max_shared: int) -> None:
        self._kernels = compile_kernels("orthogonal", entry)
        self._name = name
        self.max_shared = max_shared

    def resident_blocks(self, threads: int, shared: int) -> int:
        return 24

    def launch(self, grid: Sizes, block: Sizes, *arguments: Any, shared: int = 0, cooperative: bool = False) -> None:
        assert all(tensor.is_contiguous() for tensor in arguments if isinstance(tensor, Tensor))
        self._kernels.launch(self._name, grid, block, arguments, shared=shared, at_once=cooperative)


class EmulatedProgram:
    def __init__(self, entry: str, max_shared: int) -> None:
        self._entry, self._max_shared = entry, max_shared

    def kernel(self, name: str, index: int) -> EmulatedKernel:
        return EmulatedKernel(self._entry, name, self._max_shared)


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, a function that leaves memory as it is, but with what no calculation should ever read in it."""

    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        return tensor.fill_(math.nan if tensor.is_floating_point() else 77)

    return wrapper


@contextmanager
def kernels_on_the_cpu(*, largest_small: int = 256, max_shared: int = 227 << 10) -> Iterator[None]:
    """CPU tensors are followed by emulated kernels, in memory full of NaN; sizes above `largest_small` by large.cu."""
    cuda.kernels.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "usable", lambda changing, others: changing.dtype == torch.float32 and changing.numel() > 0)
        patch.setattr(cuda, "LARGEST_SMALL", largest_small)
        patch.setattr(_cuda, "program", lambda package, entry, defines: EmulatedProgram(entry, max_shared))
        patch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
        multiprocessors = type("Properties", (), {"multi_processor_count": 3})
        patch.setattr(torch.cuda, "get_device_properties", lambda index: multiprocessors)
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        patch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
        yield
    cuda.kernels.cache_clear()
