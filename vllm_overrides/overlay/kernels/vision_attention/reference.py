"""Attention patch by patch in float32: the truth that back ends are compared with."""
from collections.abc import Sequence

import torch


def vision_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Sequence[int],
                     scale: float) -> torch.Tensor:
    """See the package's `vision_attention`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for picture in range(len(cu_seqlens) - 1):
        patches = slice(cu_seqlens[picture], cu_seqlens[picture + 1])
        keys, values = k[patches].float(), v[patches].float()
        for t in range(patches.start, patches.stop):
            scores = (keys * q[t].float()).sum(-1) * scale
            weights = torch.exp(scores - scores.amax(0))
            out[t] = ((weights[:, :, None] * values).sum(0) / weights.sum(0)[:, None]).to(q.dtype)
    return out
