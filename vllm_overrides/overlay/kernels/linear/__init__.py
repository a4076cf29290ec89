"""Dense products with a weight matrix that is not quantised: projections and the head. README.md has sizes and
costs."""

import torch

from vllm.overlay.kernels.backend import Backends
from vllm.overlay.kernels.panels import Weight, check_operand

backends = Backends("linear", (("native", "native"), ("torch", "torch_impl"), ("reference", "reference")))


def pack(weight: torch.Tensor) -> Weight:
    """`weight`, [N, K], as the back end in use multiplies it best. It may be packed where it lies: the tensor itself is
    of no use afterwards."""
    return backends.chosen().pack(weight)


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias, summed in float32 (on a card: as its library does it) and rounded once.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: [N, K] of x's dtype, or what `pack` made of it. bias: [N] of x's dtype, or None.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: sizes or dtypes that do not fit together.
    """
    if x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(f"linear: x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}")
    check_operand("linear", x, weight)
    return backends.chosen().linear(x, weight, bias)
