"""Products with int8 weights in compiled code (csrc/int8_weights.cpp): those of `linear` and `moe`, of half as many
bytes."""
import ctypes
from functools import cache

import torch

from vllm.overlay.kernels import native
from vllm.overlay.kernels.panels import Weight

unavailable, for_this_platform = native.unavailable, native.for_this_platform


@cache
def _functions():
    return native.function("int8_linear", "iplpippplll"), native.function("int8_experts", "iplppppiippplllllp")


def pack(weight: torch.Tensor, part: int, operand: torch.dtype) -> Weight:
    """See the package's `pack`."""
    return native.pack("int8_pack", weight, part, operand)


def int8_linear(x: torch.Tensor, weight: Weight, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See the package's `int8_linear`."""
    count, size = weight.shape
    rows = x if x.dim() == 2 else x.reshape(-1, size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    numbers, packed = native.numbers(weight)
    scale = scale.contiguous()
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    out = torch.empty((*x.shape[:-1], count), dtype=x.dtype)
    _functions()[0](native.DTYPES[x.dtype], rows.data_ptr(), rows.stride(0), numbers.data_ptr(), packed,
                    scale.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), rows.shape[0], count,
                    size)
    return out


def int8_experts(x: torch.Tensor, w13: Weight, s13: torch.Tensor, w2: Weight, s2: torch.Tensor,
                 weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """See the package's `int8_experts`.

    Raises:
        ValueError: weights that are not float32 or ids that are not int64. IndexError: an id that is no expert's.
    """
    if weights.dtype != torch.float32 or ids.dtype != torch.int64:
        raise ValueError(f"int8_weights: weights {weights.dtype}, ids {ids.dtype}")
    tokens, top_k = ids.shape
    count, hidden, inner = w2.shape
    rows = x if x.stride(1) == 1 else x.contiguous()
    (first, packed13), (second, packed2) = native.numbers(w13), native.numbers(w2)
    s13, s2, weights, ids = s13.contiguous(), s2.contiguous(), weights.contiguous(), ids.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    bad = ctypes.c_int32(0)
    _functions()[1](native.DTYPES[x.dtype], rows.data_ptr(), rows.stride(0), first.data_ptr(), s13.data_ptr(),
                    second.data_ptr(), s2.data_ptr(), packed13, packed2, weights.data_ptr(), ids.data_ptr(),
                    out.data_ptr(), tokens, top_k, count, hidden, inner, ctypes.addressof(bad))
    if bad.value:
        raise IndexError(f"int8_weights: an id among {ids.tolist()} is none of {count} experts")
    return out
