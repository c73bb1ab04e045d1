"""torch.compile, torch.export and data-parallel processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from ncgru.orthogonal import METHODS, ScaledCayley, cayley, inverse_cayley, orthogonal, unpack
from tests.orthogonal.measure import moved, start


class Layer(nn.Module):
    """Two uses of one orthogonal matrix in a forward pass."""

    def __init__(self, method: str = "hyperpower") -> None:
        super().__init__()
        self.cayley = ScaledCayley(6, inverse=method)
        self.skew = nn.Parameter(start(self.cayley).detach())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.cayley(self.skew))
        return torch.tanh(hidden @ self.cayley(self.skew))


def train(model: Callable[[Tensor], Tensor], layer: nn.Module, steps: int = 5) -> list[Tensor]:
    optimiser = torch.optim.SGD(layer.parameters(), lr=1e-1)
    outputs = []
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimiser.zero_grad()
        out = model(x)
        outputs.append(out.detach())
        out.square().sum().backward()
        optimiser.step()
    return outputs


@pytest.mark.parametrize(
    ("method", "backend"), [*((method, "aot_eager") for method in METHODS), ("hyperpower", "inductor")]
)
def test_a_compiled_module_trains_alike(method: str, backend: str) -> None:
    layer = Layer(method)
    twin = copy.deepcopy(layer)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, while it compiles
        compiled = train(torch.compile(layer, fullgraph=True, backend=backend), layer)
    for ours, theirs in zip(compiled, train(twin, twin), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    assert layer.cayley.updates.item() == twin.cayley.updates.item() == 4
    assert torch.allclose(layer.cayley.matrix, twin.cayley.matrix, atol=1e-6)


def test_a_compiled_parametrised_module() -> None:
    layer = orthogonal(nn.Linear(6, 6))
    twin = copy.deepcopy(layer)
    torch._dynamo.reset()
    compiled = train(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer)
    for ours, theirs in zip(compiled, train(twin, twin), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_the_map_alone_compiles() -> None:
    packed = torch.randn(2, 10, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(lambda vector: cayley(unpack(vector, 5)), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(packed), cayley(unpack(packed, 5)))


def test_an_exported_module_follows_its_vector_too() -> None:
    layer = Layer()
    x = torch.randn(4, 6)
    with torch.no_grad():
        exported: Any = torch.export.export(layer, (x,)).module()
        assert torch.equal(exported(x), layer(x))
        before = exported(x)
        exported.skew.copy_(moved(layer.skew, 1e-2))
        layer.skew.copy_(exported.skew)
        assert torch.equal(exported(x), layer(x))
        assert not torch.equal(exported(x), before)


def _rank(rank: int, folder: str) -> None:
    """One of two processes: each on its own half of the batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    layer = Layer()
    parallel = nn.parallel.DistributedDataParallel(layer)
    optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for step in range(6):
        x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
        optimiser.zero_grad()
        parallel(x[rank]).square().sum().backward()
        optimiser.step()
    layer(torch.zeros(1, 6))
    torch.save(layer.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_data_parallel_processes_stay_identical(tmp_path: Path) -> None:
    spawn(_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert first["cayley.updates"].item() == 6
    # Both halves of each batch were learnt from: the same as one process with gradients averaged.
    single = Layer()
    optimiser = torch.optim.Adam(single.parameters(), lr=1e-2)
    for step in range(6):
        x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
        optimiser.zero_grad()
        (0.5 * (single(x[0]).square().sum() + single(x[1]).square().sum())).backward()
        optimiser.step()
    assert torch.allclose(first["skew"], single.skew, atol=1e-4)
    skew, signs = inverse_cayley(first["cayley.matrix"])
    assert torch.allclose(cayley(skew, signs), first["cayley.matrix"], atol=1e-5)
