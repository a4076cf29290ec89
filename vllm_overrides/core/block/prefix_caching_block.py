"""Prefix caching of blocks that have been computed, and of no others."""
from typing import Any

from vllm.core.block import prefix_caching_block_stock as _stock
from vllm.overlay.prefix_cache.allocator import (
    ComputedBlockAllocator as PrefixCachingBlockAllocator,
)

__all__ = ["PrefixCachingBlockAllocator"]


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
