"""The operators that the vendor's vllm/_custom_ops.py, linear.py and vocab_parallel_embedding.py call, in PyTorch.

Arguments in the order of those calls. Sums and products of 16-bit numbers are taken in float32.
"""
from __future__ import annotations

import torch
from torch.nn import functional


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., in], [out, in] -> [..., out]. torch 2.1 multiplies no float16 on a CPU, hence the detour."""
    bias = None if bias is None else bias.float()
    return functional.linear(x.float(), weight.float(), bias).to(x.dtype)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(functional.silu(gate) * up)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, epsilon: float) -> None:
    out.copy_(_normalised(x.float(), weight, epsilon))


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """In place: residual = x + residual, x = its norm."""
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_normalised(total, weight, epsilon))


def vllm_rotary_embedding_neox(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int,
                               cos_sin_cache: torch.Tensor, is_neox: bool) -> None:
    """In place on [T, heads * head_size]; cos_sin_cache: [positions, rotated dimensions], cosines first."""
    if not is_neox:
        raise NotImplementedError("only the NeoX layout")
    cos, sin = (part[:, None] for part in cos_sin_cache[positions].float().chunk(2, dim=-1))
    half = cos.shape[-1]
    for tensor in (query, key):
        heads = tensor.view(tensor.shape[0], -1, head_size)
        # Copies, because the places that they come from are written first.
        first, second = (part.to(torch.float32, copy=True) for part in heads[..., :2 * half].chunk(2, dim=-1))
        heads[..., :half].copy_(first * cos - second * sin)
        heads[..., half:2 * half].copy_(second * cos + first * sin)


def _normalised(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()
