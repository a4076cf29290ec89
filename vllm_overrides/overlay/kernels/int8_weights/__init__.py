"""Weights in int8 with a float32 scale per output channel, activations as they are (w8a16). README.md has the maths."""
import torch

from vllm.overlay.kernels.int8_weights.quantise import quantise, quantise_into
from vllm.overlay.kernels.panels import Weight, check_operand
from vllm.overlay.kernels.phased import PhasedBackends

__all__ = ["backends", "int8_experts", "int8_linear", "pack", "quantise", "quantise_into"]

backends = PhasedBackends("int8_weights",
                          (("native", "native"), ("torch", "torch_impl"), ("reference", "reference")), entirely=False)


def pack(weight: torch.Tensor, part: int, operand: torch.dtype) -> Weight:
    """`weight`, int8 [.., N, K], as the back end in use multiplies it best, or as it is where two back ends share it.
    It may be packed where it lies: the tensor itself is of no use afterwards.

    Args:
        part: rows that are multiplied by themselves: N, or of W13 half of it. operand: dtype of x.
    """
    module = backends.only()
    return weight if module is None else module.pack(weight, part, operand)


def int8_linear(x: torch.Tensor, weight: Weight, scale: torch.Tensor,
                bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (scale * weight)^T + bias.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: int8 [N, K], or what `pack` made of it. scale: float32 [N]. bias: [N] of x's dtype.

    Returns:
        [..., N] of x's dtype.

    Raises:
        ValueError: sizes or types that do not fit together.
    """
    _check("weight", weight, scale)
    if len(weight.shape) != 2 or x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != scale.shape):
        raise ValueError(f"int8_weights: x {tuple(x.shape)}, weight {tuple(weight.shape)}"
                         f"{'' if bias is None else f', bias {tuple(bias.shape)}'}")
    check_operand("int8_weights", x, weight)
    return backends.chosen().int8_linear(x, weight, scale, bias)


def int8_experts(x: torch.Tensor, w13: Weight, s13: torch.Tensor, w2: Weight, s2: torch.Tensor,
                 weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The routed experts of vllm.overlay.kernels.moe with W13 = s13 * w13 and W2 = s2 * w2.

    Args:
        x: [T, H], float32, bfloat16 or float16.
        w13: int8 [E, 2 I, H], s13: float32 [E, 2 I]. w2: int8 [E, H, I], s2: float32 [E, H]. w13 and w2
            may be what `pack` made of them.
        weights: float32 [T, k]. ids: int64 [T, k], 0 <= id < E.

    Returns:
        [T, H] of x's dtype.

    Raises:
        ValueError: sizes or types that do not fit together.
    """
    _check("w13", w13, s13)
    _check("w2", w2, s2)
    count, double, hidden = w13.shape
    if x.shape[1] != hidden or w2.shape != (count, hidden, double // 2) or double % 2:
        raise ValueError(f"int8_weights: x {tuple(x.shape)}, w13 {tuple(w13.shape)}, w2 {tuple(w2.shape)}")
    if weights.shape != ids.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(f"int8_weights: {x.shape[0]} tokens, weights {tuple(weights.shape)}, ids {tuple(ids.shape)}")
    check_operand("int8_weights", x, w13, w2)
    return backends.chosen_for(x.shape[0]).int8_experts(x, w13, s13, w2, s2, weights, ids)


def _check(name: str, values: Weight, scale: torch.Tensor) -> None:
    if values.dtype != torch.int8 or scale.dtype != torch.float32 or scale.shape != values.shape[:-1]:
        raise ValueError(f"int8_weights: {name} {values.dtype} {tuple(values.shape)}, "
                         f"its scale {scale.dtype} {tuple(scale.shape)}")
