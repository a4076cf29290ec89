"""Which attention back end a model gets, and the kernel that must never run on the vendor's stack.

The vendor's Triton kernel for prompts with context (`attention/ops/prefix_prefill.py`) hangs a BI-V100 for good. Stock
reaches it through XFORMERS, which it also takes by itself for a quantised cache.
"""
import importlib.util
from typing import Any

from vllm.attention import selector
from vllm.attention.backends.abstract import AttentionBackend

_ADVICE = ("leave VLLM_ATTENTION_BACKEND and --kv-cache-dtype at their defaults, or give "
           "--enable-chunked-prefill=False and no --enable-prefix-caching")


def backend_of(model_config: Any, cache_config: Any) -> type[AttentionBackend]:
    """Returns the back end that the workers will choose. Raises ValueError where VLLM_ATTENTION_BACKEND is wrong."""
    return selector.get_attn_backend(*_question(model_config, cache_config))


def check_config(config: Any) -> None:
    """config: an EngineConfig. Raises ValueError where a step of this engine would hang the card."""
    cut = config.scheduler_config.chunked_prefill_enabled or config.cache_config.enable_prefix_caching
    if cut and is_vendor_stack():
        chosen = selector.which_attn_to_use(*_question(config.model_config, config.cache_config))
        if chosen == selector._Backend.XFORMERS:
            raise ValueError("attention back end XFORMERS computes prompts with context by a kernel that hangs this "
                             f"card for good: {_ADVICE}")


def refuse_prefix_kernel() -> None:
    """The last gate before that kernel. Raises RuntimeError on the vendor's stack."""
    if is_vendor_stack():
        raise RuntimeError(f"the Triton kernel for prompts with context hangs this card for good: {_ADVICE}")


def is_vendor_stack() -> bool:
    """Whether the vendor's operators are installed; they are not imported to find out."""
    return importlib.util.find_spec("ixformer") is not None


def _question(model_config: Any, cache_config: Any) -> tuple[Any, ...]:
    """The arguments with which stock's runner and cache engine ask the selector."""
    return (model_config.get_head_size(), model_config.get_sliding_window(), model_config.dtype,
            cache_config.cache_dtype, cache_config.block_size, model_config.is_attention_free)
