"""What a grammar forbids, taken out of the logits."""
from collections.abc import Sequence

import torch

from vllm.overlay.kernels.backend import Backends

backends = Backends("token_mask", (("torch", "torch_impl"), ("reference", "reference")))


def apply_token_mask(logits: torch.Tensor, mask: torch.Tensor, rows: Sequence[int]) -> None:
    """Sets to -inf, in place, what the masks do not allow; everything else stays as it is, to the bit but for -0.

    Args:
        logits: [T, V] of any float dtype, changed. mask: [R, W] int32 on any device: token t is allowed in row i if bit
            t % 32 of mask[i, t // 32] is set. Tokens from 32 W on are not allowed; bits from V on mean nothing.
        rows: the R rows of `logits` that the masks belong to, each at most once. Other rows are not touched.

    Raises:
        ValueError: as many masks as rows are needed.
    """
    if len(rows) != mask.shape[0]:
        raise ValueError(f"{mask.shape[0]} masks for {len(rows)} rows")
    if rows:
        backends.chosen().apply_token_mask(logits, mask, rows)
