"""Filters of next-token logits with stock's results, without sorting the vocabulary where top-k is small."""
import torch

from vllm.overlay.kernels.backend import Backends

backends = Backends("sampling", (("torch", "torch_impl"), ("reference", "reference")))


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Returns int64 [T]: the first index of each row's largest value in logits [T, V]."""
    return backends.chosen().greedy(logits)


def apply_top_k_top_p(logits: torch.Tensor, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keeps of each row its k largest logits, of these the smallest set of the largest whose mass reaches p; else -inf.

    What stock's `_apply_top_k_top_p` returns: top-k keeps all logits equal to the k-th; top-p drops a token where the
    mass of itself and of all below it is at most 1 - p, so also where its probability is 0 in float32; one stays.
    Where the cut of top-p falls among equal logits, stock drops whichever of them its unstable sort put first, and we
    drop those with the lowest token ids: as many, and the same ones in every batch.

    Args:
        logits: [T, V] float32. p: [T], 1 = off. k: [T] integer, 1 <= k <= V, V = off.

    Returns:
        A new [T, V].
    """
    return backends.chosen().apply_top_k_top_p(logits, p, k)


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Sets to -inf what is less probable than min_p times the most probable token.

    What stock's `_apply_min_p` returns, but neither argument is changed (stock adds a dimension to `min_p` in place,
    over which a second step with the same sampling tensors trips).

    Args:
        logits: [T, V] float32. min_p: [T], 0 = off.

    Returns:
        A new [T, V].
    """
    return backends.chosen().apply_min_p(logits, min_p)
