"""The norms in vectorised PyTorch."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None,
             gemma: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the package's `rms_norm`."""
    total = x if residual is None else x + residual
    factor = weight.float() + 1.0 if gemma else weight.float()
    normed = _normalised(total.float(), eps).mul_(factor).to(x.dtype)
    return normed if residual is None else (normed, total)


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the package's `gated_rms_norm`."""
    return _normalised(o, eps).mul_(weight.float()).mul_(F.silu(z.float())).to(z.dtype)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
