"""The optimisers of a run: one instance for A, one for the rest, as the paper has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ncgru._checks import one_of

if TYPE_CHECKING:
    from ncgru.lab.recipes.recipe import OptimizerSpec

NAMES = ("adam", "adamw", "rmsprop", "sgd")


class Optimizers:
    """Both optimisers as one.

    Weight decay and the scaling of the learning rate act on the rest alone: decay would pull U towards D, and batches
    of different lengths count alike for A.

    Args:
        spec: names, learning rates and constants.
        skew: the parameters behind the orthogonal matrices, possibly none.
        others: all other parameters.
        device: where they are.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        skew: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        device: torch.device,
    ) -> None:
        self._lr = spec.lr
        self._scale = 1.0
        self.others = build(spec.name, list(others), spec, spec.lr, spec.weight_decay, device)
        angles = list(skew)
        skew_lr = spec.lr if spec.skew_lr is None else spec.skew_lr
        self.skew = build(spec.skew_name or spec.name, angles, spec, skew_lr, 0.0, device) if angles else None

    def step(self, scale: float = 1.0) -> None:
        """Update all parameters; `scale` multiplies the learning rate of those that are not A."""
        if scale != self._scale:
            for group in self.others.param_groups:
                group["lr"] = self._lr * scale
            self._scale = scale
        self.others.step()
        if self.skew is not None:
            self.skew.step()

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on."""
        return {"others": self.others.state_dict(), "skew": self.skew.state_dict() if self.skew else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; rates and constants are those of the recipe, and what suits the present device."""
        for name, optimizer in (("others", self.others), ("skew", self.skew)):
            if optimizer is not None:
                groups = [
                    {**optimizer.param_groups[index], "params": saved["params"]}
                    for index, saved in enumerate(state[name]["param_groups"])
                ]
                optimizer.load_state_dict({**state[name], "param_groups": groups})


def build(
    name: str, parameters: list[nn.Parameter], spec: OptimizerSpec, lr: float, weight_decay: float, device: torch.device
) -> torch.optim.Optimizer:
    """The optimiser of that name.

    Fused forms are the fastest on both kinds of device. On a GPU the counts of steps are kept there, so that a step
    needs nothing from the host.
    """
    one_of("optimizer", name, NAMES)
    shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    on_gpu = device.type == "cuda"
    if name == "sgd":
        return torch.optim.SGD(parameters, momentum=spec.momentum, fused=True, **shared)
    if name == "rmsprop":
        return torch.optim.RMSprop(
            parameters,
            alpha=spec.alpha,
            eps=spec.eps,
            momentum=spec.momentum,
            foreach=True,
            capturable=on_gpu,
            **shared,
        )
    adam = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return adam(parameters, betas=spec.betas, eps=spec.eps, fused=True, capturable=on_gpu, **shared)
