"""Attention in vectorised PyTorch: online softmax over square tiles, so that no score matrix outgrows a fixed size."""
import math
from collections.abc import Sequence

import torch

from vllm.overlay.kernels.online_softmax import OnlineSoftmax

# Bytes of scores (heads x queries x keys, float32) that exist at a time: near a CPU's cache; elsewhere few launches
# matter more.
SCORE_BYTES_CPU, SCORE_BYTES = 1 << 20, 64 << 20


def score_bytes(device_type: str) -> int:
    """Bytes of scores that exist at a time, whatever the pictures are; the rest of a tile is smaller."""
    return SCORE_BYTES_CPU if device_type == "cpu" else SCORE_BYTES


def vision_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Sequence[int],
                     scale: float) -> torch.Tensor:
    """See the package's `vision_attention`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Square tiles: keys and values are converted to float32 once per row of tiles, so tall ones save that work.
    tile = max(1, math.isqrt(score_bytes(q.device.type) // (4 * q.shape[1])))
    # One buffer for all tiles: fresh pages cost a CPU more than the product that fills them.
    buffer = torch.empty(q.shape[1] * tile * tile, dtype=torch.float32, device=q.device)
    for picture in range(len(cu_seqlens) - 1):
        start, end = cu_seqlens[picture], cu_seqlens[picture + 1]
        for begin in range(start, end, tile):
            queries = slice(begin, min(begin + tile, end))
            scaled = q[queries].float().mul(scale).transpose(0, 1)
            softmax = OnlineSoftmax()
            for at in range(start, end, tile):
                positions = slice(at, min(at + tile, end))
                keys = k[positions].float().permute(1, 2, 0)
                shape = (*scaled.shape[:2], keys.shape[2])
                scores = torch.bmm(scaled, keys, out=buffer[:math.prod(shape)].view(shape))
                softmax.add(scores, v[positions].float().transpose(0, 1))
            out[queries] = softmax.result().transpose(0, 1)
    return out
