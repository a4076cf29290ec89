"""The convolution in compiled code (csrc/causal_conv1d.cpp): one call for all rows of a step."""
from collections.abc import Sequence
from functools import cache

import torch

from vllm.overlay.kernels import native
from vllm.overlay.kernels.causal_conv1d import torch_impl
from vllm.overlay.kernels.rows import Capture, packed_rows

unavailable, for_this_platform = native.unavailable, native.for_this_platform


@cache
def _function():
    return native.function("causal_conv1d", "iplipppppllll")


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, conv: torch.Tensor,
                  live_slots: torch.Tensor, query_start_loc: Sequence[int], num_prefills: int,
                  captures: Sequence[Capture]) -> torch.Tensor:
    """See the package's `causal_conv1d`. A pool of another dtype than x's, or with gaps, is left to PyTorch."""
    if conv.dtype != x.dtype or not conv.is_contiguous():
        return torch_impl.causal_conv1d(x, weight, bias, conv, live_slots, query_start_loc, num_prefills, captures)
    if x.stride(1) != 1:
        x = x.contiguous()
    weight = weight.contiguous()
    if bias is not None:
        bias = bias.float().contiguous()
    channels = x.shape[1]
    out = x.new_empty(*x.shape)
    packed = packed_rows(query_start_loc, live_slots.tolist(), captures, conv.shape[0])
    _function()(native.DTYPES[x.dtype], x.data_ptr(), x.stride(0), native.DTYPES[weight.dtype], weight.data_ptr(),
                None if bias is None else bias.data_ptr(), conv.data_ptr(), out.data_ptr(), packed.buffer_info()[0],
                live_slots.shape[0], len(captures), channels, weight.shape[1])
    return out
