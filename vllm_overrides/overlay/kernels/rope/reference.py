"""The rotation pair by pair in float32: the truth that back ends are compared with."""

import torch


def apply_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor,
               sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `apply_rope`."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    half = cos.shape[1]
    for i in range(half):
        a, b = x[:, :, i].float(), x[:, :, i + half].float()
        c, s = cos[:, i, None], sin[:, i, None]
        out[:, :, i] = (a * c - b * s).to(x.dtype)
        out[:, :, i + half] = (b * c + a * s).to(x.dtype)
    return out
