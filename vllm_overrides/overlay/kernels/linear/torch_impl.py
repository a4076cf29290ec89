"""The product by PyTorch's library."""

import torch
import torch.nn.functional as F


def pack(weight: torch.Tensor) -> torch.Tensor:
    """See the package's `pack`: rows are best."""
    return weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See the package's `linear`."""
    return F.linear(x, weight, bias)
