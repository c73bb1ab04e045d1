"""The processes that train one model together, and the device of each.

Under `torchrun` every process takes its share of each batch, and gradients are averaged: shares are equal, so this is
the gradient of the joint batch. All ranks start from rank 0's model and make the same updates, stored inverses
included. Only rank 0 writes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; every method with a value is called by all of them.

    Attributes:
        rank: number of this process.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        if self.alone:
            return flag
        votes = torch.tensor(int(flag))
        dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes)

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all ranks."""
        if self.alone:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total / self.size

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self.alone:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value)
        return values

    def lead(self, action: Callable[[], T]) -> T:
        """What `action` returns or raises on rank 0, on every rank; the others do not run it."""
        if self.alone:
            return action()
        outcome: list[T | Exception | None] = [None]
        if self.leads:
            try:
                outcome[0] = action()
            except Exception as error:  # the others would wait for ever
                outcome[0] = error
        dist.broadcast_object_list(outcome, src=0)
        result = outcome[0]
        if isinstance(result, Exception):
            raise result
        return result  # type: ignore[return-value]

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model whose backward averages gradients over the ranks; its weights become those of rank 0."""
        if self.alone:
            return model
        # Buffers follow from parameters in the same way on every rank, so only the start has to be shared.
        known = inspect.signature(DistributedDataParallel).parameters
        option = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # its older name
        options: dict[str, Any] = {option: False, "device_ids": [device] if device.type == "cuda" else None}
        wrapped: nn.Module = DistributedDataParallel(model, **options)
        return wrapped


ALONE = Ranks()


@contextmanager
def process_group(device: str) -> Iterator[Ranks]:
    """The ranks that `torchrun` started, or this process alone; an existing process group is used and left as it is."""
    if dist.is_available() and dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size())
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(local_rank())
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    dist.init_process_group(backend)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
        dist.barrier()  # a process that leaves while another still talks may take it down
    finally:
        dist.destroy_process_group()


def local_rank() -> int:
    """Number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def checked_device(request: str, ranks: Ranks | None = None) -> torch.device:
    """The device that was asked for, else an error that says what is missing; each rank gets a GPU of its own."""
    try:
        device = torch.device(request)
    except RuntimeError as error:
        raise ValueError(f"device must be cpu, cuda or cuda:<number>, got {request!r}; pass one of these") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"device must be cpu, cuda or cuda:<number>, got {request!r}; pass one of these")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        why = "is built without CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise ValueError(
            f"device must be one that this machine has, got {request!r}, but PyTorch {torch.__version__} {why}; "
            f"use device cpu, or a machine with a GPU and a CUDA build of PyTorch"
        )
    index = device.index
    if index is None:
        index = 0 if ranks is None or ranks.alone else local_rank()
    if index >= count:
        raise ValueError(
            f"device must be one of cuda:0 to cuda:{count - 1}, got cuda:{index}; start fewer processes "
            f"or choose another"
        )
    return torch.device("cuda", index)
