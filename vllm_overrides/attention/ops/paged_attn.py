"""Stock's paged attention, without the kernel that hangs the vendor's card."""
from typing import Any

import torch

from vllm.attention.ops import paged_attn_stock as _stock


class PagedAttention(_stock.PagedAttention):
    """Stock's operations."""

    @staticmethod
    def forward_prefix(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Stock's. Raises RuntimeError on the vendor's stack."""
        from vllm.overlay.attention.choice import refuse_prefix_kernel
        refuse_prefix_kernel()
        return _stock.PagedAttention.forward_prefix(*args, **kwargs)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
