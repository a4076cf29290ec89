"""Block objects made as they are needed: stock makes four per block of the cache at start (3 s for 64 K blocks)."""
from typing import Any

from vllm.core.block import common_stock as _stock
from vllm.core.block.interfaces import Block, BlockAllocator

_AT_A_TIME = 4096


class BlockPool(_stock.BlockPool):
    """Stock's pool; it starts small and grows by a fixed number, so that no growth takes long."""

    def __init__(self, block_size: int, create_block: Block.Factory, allocator: BlockAllocator, pool_size: int) -> None:
        super().__init__(block_size, create_block, allocator, min(pool_size, _AT_A_TIME))

    def increase_pool(self) -> None:
        """Called when every object is in use."""
        first = self._pool_size
        self._pool_size += _AT_A_TIME
        self._free_ids.extend(range(first, self._pool_size))
        self._pool.extend(
            self._create_block(prev_block=None,
                               token_ids=[],
                               block_size=self._block_size,
                               allocator=self._allocator,
                               block_id=None) for _ in range(_AT_A_TIME))


def __getattr__(name: str) -> Any:
    return getattr(_stock, name)
