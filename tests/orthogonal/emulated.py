"""The launchers of ncgru.orthogonal.cuda on the CPU: their kernels run in the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ncgru import _cuda
from ncgru.orthogonal import cuda
from ncgru.orthogonal.cuda import large
from tests.emulator import compile_kernels

Sizes = tuple[int, int, int]


class EmulatedKernel:
    """What the launchers know of a `Kernel`."""

    def __init__(self, entry: str, name: str, defines: Mapping[str, int | str]) -> None:
        self._kernels = compile_kernels("orthogonal", entry, **defines)
        self._name = name
        self._clusters = bool(defines.get("CLUSTER"))

    def resident_blocks(self, threads: int, shared: int) -> int:
        return 24

    def launch(self, grid: Sizes, block: Sizes, *arguments: Any, shared: int = 0, cooperative: bool = False) -> None:
        assert cooperative or not self._name.endswith("small") or self._clusters
        assert all(tensor.is_contiguous() for tensor in arguments if isinstance(tensor, Tensor))
        self._kernels.launch(self._name, grid, block, arguments, shared=shared, at_once=cooperative or self._clusters)


class EmulatedProgram:
    def __init__(self, entry: str, defines: Mapping[str, int | str]) -> None:
        self._entry, self._defines = entry, defines

    def kernel(self, name: str, index: int) -> EmulatedKernel:
        return EmulatedKernel(self._entry, name, self._defines)


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, a function that leaves memory as it is, but with what no calculation should ever read in it."""

    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        return tensor.fill_(math.nan if tensor.is_floating_point() else 77)

    return wrapper


@contextmanager
def kernels_on_the_cpu(
    *,
    largest_small: int = 160,
    max_shared: int = 227 << 10,
    clusters: bool = False,
    tiles: tuple[int, int] | None = None,
    blocks: int = 3,
) -> Iterator[None]:
    """CPU tensors are followed by emulated kernels, in memory full of NaN; sizes above `largest_small` by large.cu.

    These have products in `tiles`, or as they choose themselves, by so many blocks.
    """

    def program(package: str, entry: str, defines: Mapping[str, int | str]) -> EmulatedProgram:
        return EmulatedProgram(entry, {**defines, "CLUSTER": int(clusters)} if entry == "small.cu" else defines)

    cuda.kernels.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "usable", lambda changing, others: changing.dtype == torch.float32 and changing.numel() > 0)
        patch.setattr(cuda, "LARGEST_SMALL", largest_small)
        patch.setattr(_cuda, "program", program)
        patch.setattr(torch.cuda, "get_device_capability", lambda index: (9 if clusters else 8, 0))
        if tiles is not None:
            patch.setattr(large, "SHAPES", (tiles,))
        properties = {"multi_processor_count": blocks, "shared_memory_per_block_optin": max_shared}
        patch.setattr(torch.cuda, "get_device_properties", lambda index: type("Properties", (), properties))
        patch.setattr(torch, "empty", poisoned(torch.empty))
        patch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        patch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
        yield
    cuda.kernels.cache_clear()
