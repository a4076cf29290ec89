"""RMS norms: Gemma style with optional residual (also per head, for q and k), and the gated norm of Gated DeltaNet."""

import torch

from vllm.overlay.kernels.backend import Backends

backends = Backends("norms", (("native", "native"), ("torch", "torch_impl"), ("reference", "reference")))


def rms_norm(x: torch.Tensor,
             weight: torch.Tensor,
             eps: float,
             residual: torch.Tensor | None = None,
             gemma: bool = True) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x * rsqrt(mean(x^2) + eps) * (1 + weight) over the last dimension, in float32, rounded once at the end.

    Args:
        x: [..., D], float32, bfloat16 or float16. For the q/k norm of attention it is [T, heads, D].
        weight: [D], any float dtype.
        residual: of x's shape and dtype. x + residual, rounded to their dtype, is what is normalised; it is returned.
        gemma: False multiplies by weight instead of 1 + weight.

    Returns:
        [..., D] of x's dtype; with a residual the pair (normalised, x + residual). The inputs are left alone.
    """
    return backends.chosen().rms_norm(x, weight, eps, residual, gemma)


def gated_rms_norm(o: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """o * rsqrt(mean(o^2) + eps) * weight * SiLU(z) over the last dimension: norm first, then the gate; all in float32.

    Args:
        o: [..., V] float32, the readout of the recurrence (it exceeds float16's range).
        z: [..., V] of the model's dtype. weight: [V], any float dtype; plain, not 1 + weight.

    Returns:
        [..., V] of z's dtype.

    Raises:
        ValueError: o is not float32.
    """
    if o.dtype != torch.float32:
        raise ValueError(f"gated_rms_norm: o is {o.dtype}; it stays float32 until here, for float16 cannot hold it")
    return backends.chosen().gated_rms_norm(o, z, weight, eps)
