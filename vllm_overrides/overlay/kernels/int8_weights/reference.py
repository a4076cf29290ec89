"""Products with int8 weights in float32, rounded once: the truth that back ends are compared with."""
import torch

from vllm.overlay.kernels.moe import reference as moe


def pack(weight: torch.Tensor, part: int, operand: torch.dtype) -> torch.Tensor:
    """See the package's `pack`: rows are best."""
    return weight


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See the package's `int8_linear`."""
    out = x.float() @ (weight.float() * scale[:, None]).T
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype)


def int8_experts(x: torch.Tensor, w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor,
                 weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """See the package's `int8_experts`."""
    return moe.experts(x, w13.float() * s13[..., None], w2.float() * s2[..., None], weights, ids)
