"""The norms in float32, written out: the truth that back ends are compared with."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None,
             gemma: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the package's `rms_norm`."""
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    factor = weight.float() + 1 if gemma else weight.float()
    normed = (_normalised(total.float(), eps) * factor).to(x.dtype)
    return normed if residual is None else (normed, total)


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the package's `gated_rms_norm`."""
    gate = z.float() / (1 + torch.exp(-z.float()))
    return (_normalised(o, eps) * weight.float() * gate).to(z.dtype)


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / torch.sqrt(mean_square + eps)
