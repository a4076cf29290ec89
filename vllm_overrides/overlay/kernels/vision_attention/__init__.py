"""Full attention of the patches of a picture over each other; pictures of one batch do not see each other."""
from collections.abc import Sequence

import torch

from vllm.overlay.kernels.backend import Backends

backends = Backends("vision_attention", (("torch", "torch_impl"), ("reference", "reference")))


def vision_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Sequence[int],
                     scale: float) -> torch.Tensor:
    """softmax(scale q k^T) v within each picture, both ways; scores, softmax and sums in float32.

    Args:
        q, k, v: [T, H, D], float32, bfloat16 or float16; any H and D. Views with a contiguous last dimension are fine.
        cu_seqlens: pictures + 1 host ints, from 0 to T; picture i has the patches [cu_seqlens[i], cu_seqlens[i + 1]).
        scale: multiplies the scores, D ** -0.5 for these models.

    Returns:
        New contiguous [T, H, D] of q's dtype.

    Raises:
        ValueError: sizes or borders that do not fit together.
    """
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(f"vision_attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if not cu_seqlens or cu_seqlens[0] != 0 or cu_seqlens[-1] != q.shape[0] or list(cu_seqlens) != sorted(cu_seqlens):
        raise ValueError(f"vision_attention: {q.shape[0]} patches, cu_seqlens {list(cu_seqlens)}")
    return backends.chosen().vision_attention(q, k, v, cu_seqlens, scale)
