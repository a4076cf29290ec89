"""The norms in vectorised PyTorch."""
import torch
import torch.nn.functional as F

from vllm.overlay.kernels.blocks import row_blocks


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None,
             gemma: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the package's `rms_norm`."""
    total = x if residual is None else x + residual
    factor = weight.float() + 1.0 if gemma else weight.float()
    normed = torch.empty_like(total, memory_format=torch.contiguous_format)
    rows, out = total.reshape(-1, total.shape[-1]), normed.view(-1, total.shape[-1])
    for block in row_blocks(rows.shape[0], rows.shape[1], x.device):
        out[block] = _normalised(rows[block].float(), eps).mul_(factor)
    return normed if residual is None else (normed, total)


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the package's `gated_rms_norm`."""
    factor = weight.float()
    normed = torch.empty_like(z, memory_format=torch.contiguous_format)
    rows, gates, out = (tensor.reshape(-1, o.shape[-1]) for tensor in (o, z, normed))
    for block in row_blocks(rows.shape[0], rows.shape[1], o.device):
        out[block] = _normalised(rows[block], eps).mul_(factor).mul_(F.silu(gates[block].float()))
    return normed


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
