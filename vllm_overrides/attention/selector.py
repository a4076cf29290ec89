"""The paged PyTorch back end (stock's name for it: TORCH_SDPA) is the default on CUDA devices too; stock allows it on
the CPU only."""
from functools import cache
from typing import Any

import torch

from vllm.attention import selector_stock as _stock
from vllm.attention.backends.abstract import AttentionBackend
from vllm.overlay.runtime.announced import agree


def which_attn_to_use(head_size: int, sliding_window: int | None, dtype: torch.dtype, kv_cache_dtype: str | None,
                      block_size: int, is_attention_free: bool) -> _stock._Backend:
    """Stock's choice, except that TORCH_SDPA is the default wherever it can serve what is asked for here.

    A sliding window and a quantised cache are stock's on a card. What the arguments do not tell (ALiBi, a soft cap,
    block sparsity, an encoder) the back end refuses by itself.

    Raises:
        ValueError: VLLM_ATTENTION_BACKEND names a back end that does not exist or, on the CPU, any but TORCH_SDPA.
    """
    ours = _stock._Backend.TORCH_SDPA
    if is_attention_free:
        return _stock._Backend.NO_ATTENTION
    asked = _stock.get_global_forced_attn_backend() or _stock.get_env_variable_attn_backend()
    if _stock.is_cpu():
        if asked not in (None, ours):
            raise ValueError(f"VLLM_ATTENTION_BACKEND={asked.name}: only {ours.name} runs on the CPU")
        return ours
    other_device = (_stock.is_openvino() or _stock.is_xpu() or _stock.is_hip() or _stock.current_platform.is_tpu())
    can_serve = sliding_window is None and kv_cache_dtype in (None, "auto")
    if asked == ours or (asked is None and can_serve and not other_device):
        return ours
    return _stock.which_attn_to_use(head_size, sliding_window, dtype, kv_cache_dtype, block_size, is_attention_free)


@cache
def get_attn_backend(head_size: int,
                     sliding_window: int | None,
                     dtype: torch.dtype,
                     kv_cache_dtype: str | None,
                     block_size: int,
                     is_attention_free: bool,
                     is_blocksparse: bool = False) -> type[AttentionBackend]:
    """The back end that `which_attn_to_use` names. Raises RuntimeError where a server announced another one."""
    arguments = (head_size, sliding_window, dtype, kv_cache_dtype, block_size, is_attention_free)
    if which_attn_to_use(*arguments) == _stock._Backend.TORCH_SDPA:
        from vllm.attention.backends.torch_sdpa import TorchSDPABackend
        backend: type[AttentionBackend] = TorchSDPABackend
    else:
        backend = _stock.get_attn_backend(*arguments, is_blocksparse)
    if not is_attention_free:
        agree("attention", backend.get_name(), "VLLM_ATTENTION_BACKEND")
        _stock.logger.info("Attention back end: %s", backend.get_name())
    return backend


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
