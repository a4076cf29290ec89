"""The masks bit by bit: the truth that back ends are compared with."""
from collections.abc import Sequence

import torch


def apply_token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: Sequence[int]) -> None:
    """See the package's `apply_token_mask`."""
    for words, row in zip(mask.tolist(), rows, strict=True):
        allowed = [bool(word >> bit & 1) for word in words for bit in range(32)][:logits.shape[1]]
        allowed += [False] * (logits.shape[1] - len(allowed))
        logits[row, ~torch.tensor(allowed, device=logits.device)] = -float("inf")
