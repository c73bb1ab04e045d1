"""Measures and small parts that the tests of this folder share."""

from __future__ import annotations

import torch
from torch import Tensor

from ncgru.orthogonal import ScaledCayley


def spectral_defect(u: Tensor) -> float:
    """‖U'U - I‖₂, the largest of a batch."""
    u = u.detach().double()
    defect = torch.linalg.matrix_norm(u.mT @ u - torch.eye(u.shape[-1], dtype=u.dtype), 2)
    return float(defect.max())


def start(module: ScaledCayley, init: str = "haar", seed: int = 0) -> Tensor:
    """A trainable vector for `module`, sampled with a seed."""
    return module.sample(init, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def moved(packed: Tensor, size: float, seed: int = 1) -> Tensor:
    """`packed` plus a normal step of standard deviation `size`."""
    noise = torch.randn(packed.shape, dtype=packed.dtype, generator=torch.Generator().manual_seed(seed))
    return packed.detach() + size * noise
