"""How gradients flow through a model: its step Jacobians along one sequence, beside the bound of Theorem 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ncgru import NCGRU, diagnostics
from ncgru.lab.models import SequenceModel
from ncgru.lab.models.layer import RecurrentLayer

POINTS = 100
"""Positions kept of a longer sequence."""


def gradient_profile(model: SequenceModel, inputs: Tensor) -> dict[str, Any] | None:
    """Norms along the first sequence of a batch, as a log record has them; None for a model that has no such bound.

    Args:
        model: one layer of NC-GRU, or of the GRU that resets before the product.
        inputs: [T, B, I].
    """
    layer = model.layers[0]
    assert isinstance(layer, RecurrentLayer)
    if len(model.layers) > 1 or model.embedding is not None or not isinstance(layer.cell, NCGRU):
        return None
    sequence = inputs[:, :1]
    bound = diagnostics.gradient_bound(layer.cell, sequence)
    reaching = diagnostics.state_gradients(layer.cell, sequence)[1:]
    length = len(sequence)
    kept = torch.linspace(0, length - 1, min(POINTS, length)).round().long()
    return {
        "positions": (kept + 1).tolist(),
        "jacobian_norm": bound.norm[kept, 0].tolist(),
        "bound": bound.bound[kept, 0].tolist(),
        "state_gradient": reaching[kept, 0].tolist(),
    }
