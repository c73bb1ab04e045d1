"""modReLU: it shrinks or stretches the magnitude by a trained threshold and keeps the sign."""

import torch
from torch import Tensor, nn

from ncgru import _checks


def modrelu(input: Tensor, threshold: Tensor) -> Tensor:
    """sign(z) · max(|z| + b, 0), elementwise, with sign(0) = 0.

    Args:
        input: z, of any shape [..., n].
        threshold: b, of shape [n]. Negative values open a dead zone around zero; zero makes modReLU the identity.
    """
    return torch.sign(input) * torch.relu(input.abs() + threshold)


class ModReLU(nn.Module):
    """modReLU with one trained threshold for each unit.

    The threshold starts uniform in ±0.01, as is usual for orthogonal recurrent networks.

    Args:
        num_features: n, the size of the last dimension.
        device: where the threshold lives.
        dtype: the threshold's dtype.

    Examples:
        >>> ModReLU(4)(torch.zeros(3, 4)).shape
        torch.Size([3, 4])
    """

    def __init__(
        self, num_features: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.num_features = _checks.positive_int("num_features", num_features, "pass the size of the last dimension")
        self.threshold = nn.Parameter(
            torch.empty(num_features, device=_checks.device(device), dtype=_checks.weight_dtype(dtype))
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the threshold anew."""
        nn.init.uniform_(self.threshold, -0.01, 0.01)

    def forward(self, input: Tensor) -> Tensor:
        """Apply modReLU to `input` of shape [..., num_features]."""
        _checks.tensor("input", input, "pass a tensor of shape [..., num_features]")
        if input.dim() == 0 or input.shape[-1] != self.num_features:
            raise ValueError(
                f"input must have num_features={self.num_features} as its last dimension, got shape "
                f"{tuple(input.shape)}; reshape it or build ModReLU with that size"
            )
        return modrelu(input, self.threshold)

    def extra_repr(self) -> str:
        """The size, for `print(module)`."""
        return str(self.num_features)
