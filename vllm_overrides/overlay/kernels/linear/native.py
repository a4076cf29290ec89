"""Products in compiled code (csrc/linear.cpp), which reads every weight once; of many rows by PyTorch's
library, where the processor has arithmetic of the type.

Every element is summed in one order, which depends neither on the threads nor, where the weight is packed, on the other
rows. Where it is not, up to 19 rows it is one order and from 20 on another (csrc/products.h).
"""
import sys
from functools import cache

import torch

from vllm.overlay.kernels import native
from vllm.overlay.kernels.linear import torch_impl
from vllm.overlay.kernels.panels import Panels, Weight

unavailable, for_this_platform = native.unavailable, native.for_this_platform

# Rows up to which this is used where the library has arithmetic of the type; not measured yet on such a processor.
_FEW = 16


@cache
def _function():
    return native.function("linear", "iplpipplll")


@cache
def _most(dtype: torch.dtype) -> int:
    return _FEW if native.library_multiplies(dtype) else sys.maxsize


def pack(weight: torch.Tensor) -> Weight:
    """See the package's `pack`. What the library will multiply stays in rows."""
    if native.library_multiplies(weight.dtype):
        return weight
    return native.pack("linear_pack", weight, weight.shape[0], weight.dtype)


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """See the package's `linear`."""
    count, size = weight.shape
    rows = x if x.dim() == 2 else x.reshape(-1, size)
    if not isinstance(weight, Panels) and (rows.shape[0] > _most(x.dtype) or not weight.is_contiguous()):
        return torch_impl.linear(x, weight, bias)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty((*x.shape[:-1], count), dtype=x.dtype)
    numbers, packed = native.numbers(weight)
    _function()(native.DTYPES[x.dtype], rows.data_ptr(), rows.stride(0), numbers.data_ptr(), packed,
                None if bias is None else bias.contiguous().data_ptr(), out.data_ptr(), rows.shape[0], count, size)
    return out
