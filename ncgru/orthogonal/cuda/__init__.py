"""The orthogonal update on NVIDIA GPUs: own kernels for float32 in place of some forty torch operations.

`ncgru/orthogonal/inverse.py` is the specification, and what runs everywhere else. Differences, beyond rounding: every
product that a small difference depends on is taken in float64 and none in tf32, and the exact inverse is computed only
where the guard, the seal or a reset wants it, without the host being asked.

    reason = why_not(device, dtype)     # None, or a sentence: what keeps the kernels from running there
    chosen = kernels(n, index)          # of matrices with n rows on device `index`; compiled at first use
    matrix, inverse = chosen.follow(packed, state, "hyperpower", order, reset_every)
    gradient = chosen.gradient(grad_matrix, matrix, inverse, signs)
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ncgru import _cuda
from ncgru.orthogonal.cuda.large import LargeKernels
from ncgru.orthogonal.cuda.small import LARGEST_ROWS, SmallKernels, chunk_of
from ncgru.orthogonal.cuda.state import State

__all__ = ["LARGEST_SMALL", "LargeKernels", "SmallKernels", "State", "kernels", "usable", "why_not"]

LARGEST_SMALL = LARGEST_ROWS
"""The most rows of a matrix that a group of eight blocks follows; above, or where a block has too little shared memory,
all blocks of the GPU do."""

LEAST_CAPABILITY = (8, 0)
STATIC_SHARED = 1024


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps the kernels from following matrices of this dtype on this device, or None if nothing does."""
    if device.type != "cuda":
        return f"the matrices are on {device.type!r}, not on a GPU"
    if dtype != torch.float32:
        return f"the kernels are for float32, and the matrices are {dtype}"
    return _device_problem(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _device_problem(index: int) -> str | None:
    problem = _cuda.why_unavailable(index)
    if problem is not None:
        return problem
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        return f"cuda:{index} has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    try:
        kernels(2, index)
    except _cuda.CompileError as error:
        warnings.warn(f"torch operations take the place of ncgru's kernels: {error}", stacklevel=2)
        return str(error)
    return None


@functools.cache
def kernels(n: int, index: int) -> SmallKernels | LargeKernels:
    """The kernels for matrices of n rows, at least 2, on a device."""
    shared_limit = _shared_limit(index)
    chunk = chunk_of(n, shared_limit) if n <= LARGEST_SMALL else None
    return LargeKernels(n, index, shared_limit) if chunk is None else SmallKernels(n, index, chunk)


def _shared_limit(index: int) -> int:
    """Bytes of shared memory that a block may have, but for the little that kernels take without asking."""
    properties: Any = torch.cuda.get_device_properties(index)
    return int(properties.shared_memory_per_block_optin) - STATIC_SHARED


def usable(changing: Tensor, others: Collection[Tensor]) -> bool:
    """Whether the kernels can take these: float32 on one GPU that they run on, the others laid out plainly."""
    if not changing.is_cuda or changing.dtype != torch.float32 or changing.numel() == 0:
        return False
    index = changing.get_device()
    return _device_problem(index) is None and laid_out_plainly(index, others)


def laid_out_plainly(index: int, tensors: Collection[Tensor]) -> bool:
    """Whether all are contiguous on device `index`."""
    return {index}.issuperset(map(Tensor.get_device, tensors)) and all(map(Tensor.is_contiguous, tensors))
