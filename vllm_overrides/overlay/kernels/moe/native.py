"""Router and experts in compiled code (csrc/moe.cpp); many tokens per expert by PyTorch's library where the processor
has arithmetic of the type."""
import ctypes
from functools import cache

import torch

from vllm.overlay.kernels import native
from vllm.overlay.kernels.moe import torch_impl
from vllm.overlay.kernels.panels import Weight

unavailable, for_this_platform = native.unavailable, native.for_this_platform

# Tokens per expert, on average, from which on the library's products are taken where it has arithmetic of a type of two
# bytes; not measured yet on such a processor.
_FEW = 16


@cache
def _functions():
    return native.function("moe_route", "ipllllipp"), native.function("moe_experts", "iplppiippplllllp")


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See the package's `route`. Of equal probabilities the lower id comes first."""
    tokens, count = router_logits.shape
    logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
    weights = torch.empty((tokens, top_k), dtype=torch.float32)
    ids = torch.empty((tokens, top_k), dtype=torch.int64)
    _functions()[0](native.DTYPES[logits.dtype], logits.data_ptr(), logits.stride(0), tokens, count, top_k, renormalize,
                    weights.data_ptr(), ids.data_ptr())
    return weights, ids


def pack(w13: torch.Tensor, w2: torch.Tensor) -> tuple[Weight, Weight]:
    """See the package's `pack`. What the library will multiply stays in rows."""
    if native.library_multiplies(w13.dtype):
        return w13, w2
    return (native.pack("linear_pack", w13, w2.shape[2], w13.dtype),
            native.pack("linear_pack", w2, w2.shape[1], w2.dtype))


def experts(x: torch.Tensor, w13: Weight, w2: Weight, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """See the package's `experts`. What is computed here has the same bits on any number of threads, and in any batch:
    where the weights are packed, in every one, and else in one that gives no expert more than 19 tokens.

    Raises:
        ValueError: types that do not fit together. IndexError: an id that is no expert's.
    """
    if w13.dtype != x.dtype or w2.dtype != x.dtype or weights.dtype != torch.float32 or ids.dtype != torch.int64:
        raise ValueError(f"moe: x {x.dtype}, w13 {w13.dtype}, w2 {w2.dtype}, weights {weights.dtype}, ids {ids.dtype}")
    tokens, top_k = ids.shape
    count, hidden, inner = w2.shape
    many = tokens * top_k > _FEW * min(count, tokens * top_k)
    if many and isinstance(w13, torch.Tensor) and x.dtype != torch.float32 and native.library_multiplies(x.dtype):
        return torch_impl.experts_grouped(x, w13, w2, weights, ids)
    rows = x if x.stride(1) == 1 else x.contiguous()
    (first, packed13), (second, packed2) = native.numbers(w13), native.numbers(w2)
    weights, ids = weights.contiguous(), ids.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    bad = ctypes.c_int32(0)
    _functions()[1](native.DTYPES[x.dtype], rows.data_ptr(), rows.stride(0), first.data_ptr(), second.data_ptr(),
                    packed13, packed2, weights.data_ptr(), ids.data_ptr(), out.data_ptr(), tokens, top_k, count, hidden,
                    inner, ctypes.addressof(bad))
    if bad.value:
        raise IndexError(f"moe: an id among {ids.tolist()} is none of {count} experts")
    return out
