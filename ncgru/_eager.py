"""Whether torch simply computes, so that a whole layer may run outside of its dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def simply_computes(*tensors: Tensor | None) -> bool:
    """Whether all of these just hold numbers, and no program is being traced, compiled, exported or transformed."""
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, tensors))
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )
