"""Filters of next-token logits with stock's results, without sorting the vocabulary where top-k is small."""
import torch

from vllm.overlay.kernels.backend import Backends

backends = Backends("sampling", (("torch", "torch_impl"), ("reference", "reference")))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Returns int64 [T]: the first index of each row's largest value in logits [T, V]."""
    return backends.chosen().greedy(logits)


def apply_top_k_top_p(logits: torch.Tensor, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keeps of each row its k largest logits, of these the smallest set of the largest whose mass reaches p; else -inf.

    What stock's `_apply_top_k_top_p` returns. All logits equal to the k-th are kept by top-k; within equal logits top-p
    drops the lower token id first; a token is dropped where the mass of itself and everything below it is at most 1 - p;
    at least one stays. Tokens whose probability is zero in float32 are dropped.

    Args:
        logits: [T, V] float32. p: [T], 1 = off. k: [T] integer, 1 <= k <= V, V = off.

    Returns:
        A new [T, V].
    """
    return backends.chosen().apply_top_k_top_p(logits, p, k)


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Sets to -inf what is less probable than min_p times the most probable token.

    What stock's `_apply_min_p` returns, but neither argument is changed (stock's adds a dimension to `min_p` in place, which
    a second step with the same sampling tensors then trips over).

    Args:
        logits: [T, V] float32. min_p: [T], 0 = off.

    Returns:
        A new [T, V].
    """
    return backends.chosen().apply_min_p(logits, min_p)
