"""Depthwise causal convolution with SiLU over rows that carry their last width - 1 inputs from step to step."""
from collections.abc import Sequence

import torch

from vllm.overlay.kernels.backend import Backends
from vllm.overlay.kernels.rows import Capture, check_rows

backends = Backends("causal_conv1d", (("native", "native"), ("torch", "torch_impl"), ("reference", "reference")))


def causal_conv1d(x: torch.Tensor,
                  weight: torch.Tensor,
                  bias: torch.Tensor | None,
                  conv: torch.Tensor,
                  live_slots: torch.Tensor,
                  query_start_loc: Sequence[int],
                  num_prefills: int,
                  captures: Sequence[Capture] = ()) -> torch.Tensor:
    """y_t = SiLU(bias + sum_j weight[:, j] x_{t - W + 1 + j}), summed in float32, and the tails moved forward in place.

    Inputs before the row's piece come from its tail. A piece shorter than the tail shifts it.

    Args:
        x: [T, C], float32, bfloat16 or float16.
        weight: [C, W], W >= 1. bias: [C] or None.
        conv: [num_slots, C, W - 1]: this layer's pool of tails, oldest input first. Only the slots named are touched.
        live_slots: LongTensor [N] on the device, all different: the rows' slots.
        query_start_loc: N + 1 host ints; row i is tokens [query_start_loc[i], query_start_loc[i + 1]).
        num_prefills: rows before it may have any length, zero included; the others have exactly one token.
        captures: (row, offset, slot): leave in `slot` the tail as it is after `offset` tokens of that row's piece
            (1 <= offset <= length). The slots differ from each other and from all live slots.

    Returns:
        y [T, C] of x's dtype.

    Raises:
        ValueError: sizes, rows or captures that do not fit together.
    """
    tokens, channels = x.shape
    if weight.shape[0] != channels or conv.shape[1:] != (channels, weight.shape[1] - 1):
        raise ValueError(f"causal_conv1d: x {tuple(x.shape)}, weight {tuple(weight.shape)}, pool {tuple(conv.shape)}")
    check_rows(tokens, live_slots.shape[0], query_start_loc, num_prefills)
    return backends.chosen().causal_conv1d(x, weight, bias, conv, live_slots, query_start_loc, num_prefills, captures)
