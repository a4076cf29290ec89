"""Stock's block manager with hits and computed marks that hold under chunked prefill, abort and preemption."""
from typing import Any

from vllm.core import block_manager_v2_stock as _stock
from vllm.overlay.prefix_cache.block_manager import ComputedBlockManager as BlockSpaceManagerV2

__all__ = ["BlockSpaceManagerV2"]


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
