"""Other libraries' recurrent layers, where they are installed: modules that take [T, B, n], returning the output first.

Their reset gate comes after the product, as nn.GRU's does.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.shapes import BF16, FLOAT32

Build = Callable[[int, torch.dtype], nn.Module]


class FlashRNNLayer(nn.Module):
    """FlashRNN's GRU by its alternating backend (it has no other for the GRU), with an input projection."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.run: Any = importlib.import_module("flashrnn").flashrnn
        self.projection = nn.Linear(size, 3 * size, bias=False, device="cuda", dtype=dtype)
        self.recurrent = nn.Parameter(torch.randn(3, 1, size, size, device="cuda", dtype=dtype) / size**0.5)
        self.bias = nn.Parameter(torch.zeros(4, 1, size, device="cuda", dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        projected = self.projection(x).unflatten(-1, (3, 1, -1)).transpose(0, 1)
        name = str(x.dtype).removeprefix("torch.")
        states, _ = self.run(projected, self.recurrent, self.bias, function="gru", backend="cuda", dtype=name)
        return (states[0].squeeze(2).transpose(0, 1),)


class TorchRLLayer(nn.Module):
    """TorchRL's GRU by its Triton backend: tf32x3 in float32, or operands in bfloat16."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        modules: Any = importlib.import_module("torchrl.modules")
        self.mode: Any = modules.set_recurrent_mode
        self.make: Any = importlib.import_module("tensordict").TensorDict
        self.gru = modules.GRUModule(
            input_size=size,
            hidden_size=size,
            in_keys=["x", "state", "is_init"],
            out_keys=["y", ("next", "state")],
            recurrent_backend="triton",
            recurrent_compute_dtype=dtype,
            recurrent_matmul_precision="tf32x3",
            device="cuda",
        )

    def forward(self, x: Tensor) -> tuple[Tensor]:
        rows = x.transpose(0, 1).float()
        batch, steps, size = rows.shape
        state = rows.new_zeros(batch, steps, 1, size)
        first = torch.zeros(batch, steps, 1, dtype=torch.bool, device=rows.device)
        data = self.make({"x": rows, "state": state, "is_init": first}, [batch, steps])
        with self.mode(True):
            return (self.gru(data)["y"].transpose(0, 1),)


_PEERS: dict[str, tuple[str, tuple[str, ...], Build]] = {
    "FlashRNN GRU": ("flashrnn", (BF16,), FlashRNNLayer),
    "TorchRL GRU": ("torchrl", (FLOAT32, BF16), TorchRLLayer),
}


def available(dtype: str) -> dict[str, Build]:
    """Those that are installed and know this precision."""
    return {
        name: build
        for name, (package, dtypes, build) in _PEERS.items()
        if dtype in dtypes and importlib.util.find_spec(package) is not None
    }
