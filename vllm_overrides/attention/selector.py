"""Lets VLLM_ATTENTION_BACKEND=TORCH_SDPA choose our back end on a card too; stock allows that name on the CPU only."""
from functools import cache
from typing import Any

import torch

from vllm.attention import selector_stock as _stock
from vllm.attention.backends.abstract import AttentionBackend


@cache
def get_attn_backend(head_size: int,
                     sliding_window: int | None,
                     dtype: torch.dtype,
                     kv_cache_dtype: str | None,
                     block_size: int,
                     is_attention_free: bool,
                     is_blocksparse: bool = False) -> type[AttentionBackend]:
    """Stock's choice, except that TORCH_SDPA means the paged PyTorch back end on every device."""
    if not is_blocksparse:
        backend = _stock.which_attn_to_use(head_size, sliding_window, dtype, kv_cache_dtype, block_size,
                                           is_attention_free)
        if backend == _stock._Backend.TORCH_SDPA:
            from vllm.attention.backends.torch_sdpa import TorchSDPABackend
            _stock.logger.info("Attention back end: %s", TorchSDPABackend.get_name())
            return TorchSDPABackend
    return _stock.get_attn_backend(head_size, sliding_window, dtype, kv_cache_dtype, block_size, is_attention_free,
                                   is_blocksparse)


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
