"""Mixture of experts: the router's choice and the routed experts' SwiGLU. README.md has sizes and costs."""

import torch

from vllm.overlay.kernels.panels import Weight, check_operand
from vllm.overlay.kernels.phased import PhasedBackends

backends = PhasedBackends("moe", (("native", "native"), ("torch", "torch_impl"), ("reference", "reference")),
                          entirely=True)


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts: float32 softmax over all experts, the `top_k` largest, optionally made to sum to 1.

    Args:
        router_logits: [T, E], any float dtype.
        top_k: 1 <= top_k <= E.

    Returns:
        weights float32 [T, top_k] in descending order and ids int64 [T, top_k]. Which of several equal probabilities
        is taken at the end of the list is the back end's choice.

    Raises:
        ValueError: top_k out of range.
    """
    if not 1 <= top_k <= router_logits.shape[1]:
        raise ValueError(f"moe: top_k {top_k} of {router_logits.shape[1]} experts")
    return backends.chosen_for(router_logits.shape[0]).route(router_logits, top_k, renormalize)


def pack(w13: torch.Tensor, w2: torch.Tensor) -> tuple[Weight, Weight]:
    """The experts' weights as the back end in use multiplies them best, or as they are where two back ends share them.
    They may be packed where they lie: the tensors themselves are of no use afterwards."""
    module = backends.only()
    return (w13, w2) if module is None else module.pack(w13, w2)


def experts(x: torch.Tensor, w13: Weight, w2: Weight, weights: torch.Tensor,
            ids: torch.Tensor) -> torch.Tensor:
    """sum_j weights[t, j] W2[e] (SiLU(gate) * up) with (gate, up) = W13[e] x_t and e = ids[t, j], summed in float32.

    Args:
        x: [T, H], float32, bfloat16 or float16.
        w13: [E, 2 I, H] of x's dtype: the gate's rows, then the up projection's. w2: [E, H, I]. Or what `pack`
            made of both. Under tensor parallelism I is the rank's share and the caller sums the results of all ranks.
        weights: float32 [T, k]. ids: int64 [T, k], 0 <= id < E.

    Returns:
        [T, H] of x's dtype.

    Raises:
        ValueError: sizes that do not fit together.
    """
    count, double, hidden = w13.shape
    if x.shape[1] != hidden or w2.shape != (count, hidden, double // 2) or double % 2:
        raise ValueError(f"moe: x {tuple(x.shape)}, w13 {tuple(w13.shape)}, w2 {tuple(w2.shape)}")
    if weights.shape != ids.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(f"moe: {x.shape[0]} tokens, weights {tuple(weights.shape)}, ids {tuple(ids.shape)}")
    check_operand("moe", x, w13, w2)
    return backends.chosen_for(x.shape[0]).experts(x, w13, w2, weights, ids)
