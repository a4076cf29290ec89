"""The rotation in compiled code (csrc/rope.cpp): one call turns q and k."""
from functools import cache

import torch

from vllm.overlay.kernels import native

unavailable, for_this_platform = native.unavailable, native.for_this_platform


@cache
def _function():
    return native.function("apply_rope", "ipllplpllplpplll")


def apply_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor,
               sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `apply_rope`."""
    if q.stride(2) != 1:
        q = q.contiguous()
    if k.stride(2) != 1:
        k = k.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    turned_q, turned_k = torch.empty(q.shape, dtype=q.dtype), torch.empty(k.shape, dtype=k.dtype)
    _function()(native.DTYPES[q.dtype], q.data_ptr(), q.stride(0), q.stride(1), turned_q.data_ptr(), heads,
                k.data_ptr(), k.stride(0), k.stride(1), turned_k.data_ptr(), kv_heads, cos.data_ptr(), sin.data_ptr(),
                tokens, cos.shape[1], size)
    return turned_q, turned_k
