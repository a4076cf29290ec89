"""The rotation in vectorised PyTorch."""
import torch

from vllm.overlay.kernels.blocks import row_blocks


def apply_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor,
               sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `apply_rope`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    out = x.clone(memory_format=torch.contiguous_format)
    for block in row_blocks(x.shape[0], x.shape[1] * 2 * half, x.device):
        a, b, c, s = x[block, :, :half].float(), x[block, :, half:2 * half].float(), cos[block], sin[block]
        out[block, :, :half] = a * c - b * s
        out[block, :, half:2 * half] = b * c + a * s
    return out
