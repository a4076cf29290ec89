"""The norms in compiled code (csrc/norms.cpp)."""
from functools import cache

import torch

from vllm.overlay.kernels import native

unavailable, for_this_platform = native.unavailable, native.for_this_platform


@cache
def _functions():
    return native.function("rms_norm", "iplppipfpllf"), native.function("gated_rms_norm", "ippllipplllf")


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None,
             gemma: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See the package's `rms_norm`."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    normed = torch.empty(x.shape, dtype=x.dtype)
    total = None
    if residual is not None:
        residual, total = residual.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    _functions()[0](native.DTYPES[x.dtype], rows.data_ptr(), rows.stride(0),
                    residual.data_ptr() if residual is not None else None,
                    total.data_ptr() if total is not None else None, native.DTYPES[weight.dtype],
                    weight.contiguous().data_ptr(), float(gemma), normed.data_ptr(), rows.shape[0], size, eps)
    return normed if total is None else (normed, total)


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the package's `gated_rms_norm`."""
    size = o.shape[-1]
    readout = o.contiguous()
    gates = z if z.dim() == 3 and z.stride(2) == 1 else z.reshape(-1, 1, size).contiguous()
    out = torch.empty(z.shape, dtype=z.dtype)
    _functions()[1](native.DTYPES[z.dtype], readout.data_ptr(), gates.data_ptr(), gates.stride(0), gates.stride(1),
                    native.DTYPES[weight.dtype], weight.contiguous().data_ptr(), out.data_ptr(),
                    gates.shape[0], gates.shape[1], size, eps)
    return out
