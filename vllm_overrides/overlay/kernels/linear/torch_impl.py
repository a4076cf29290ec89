"""The product by PyTorch's library."""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See the package's `linear`."""
    return F.linear(x, weight, bias)
