"""Allocation of KV blocks where a block enters the prefix cache when it has been computed, and not before.

Stock enters a block when its token ids are known and calls all of a prompt's blocks computed after the first piece of
it. An abort or a preemption in the middle of a prompt then leaves blocks in the cache that nobody computed, and later
requests attend to them.
"""
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.core.block.prefix_caching_block_stock import PrefixCachingBlock, PrefixCachingBlockAllocator


class ComputedBlockAllocator(PrefixCachingBlockAllocator):
    """Stock's allocator under one law: `_cached_blocks` maps a content hash to a block that holds the KV of that
    content.

    A full block that is not (yet) in the cache is private to its sequence, and goes back to the free list when it is
    freed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Blocks in use whose content nobody may find (again).
        self._distrusted: set[int] = set()

    def promote_to_immutable_block(self, block: Any) -> int:
        """Called by a block that has become full; nothing is known about its content yet."""
        return block.block_id

    def enter_computed(self, blocks: Iterable[Any]) -> None:
        """Makes full blocks findable whose KV a finished step has computed. A second block of the same content stays
        private."""
        for block in blocks:
            content = block.content_hash
            assert content is not None and block.block_id is not None, "only full blocks in use can be entered"
            if block.block_id in self._distrusted:
                continue
            if self._cached_blocks.setdefault(content, block.block_id) == block.block_id:
                self._block_tracker[block.block_id].computed = True

    def distrust(self, blocks: Iterable[Any]) -> None:
        """Takes blocks in use out of the cache, and keeps them out until they are given to somebody else."""
        for block in blocks:
            content = block.content_hash
            if content is not None and self._cached_blocks.get(content) == block.block_id:
                del self._cached_blocks[content]
                self._block_tracker[block.block_id].computed = False
            self._distrusted.add(block.block_id)

    def _allocate_block_id(self) -> int:
        block_id = super()._allocate_block_id()
        self._distrusted.discard(block_id)
        return block_id

    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        """Stock's way in, which marks whatever was touched: not used."""
        raise NotImplementedError("blocks are entered by enter_computed")

    def _free_block_id(self, block: Any) -> None:
        if block.content_hash is not None and self._cached_blocks.get(block.content_hash) == block.block_id:
            self._decr_refcount_cached_block(block)
        else:
            self._decr_refcount_hashless_block(block)

    def cached_prefix(self, content_hashes: Sequence[int]) -> list[int]:
        """Returns the ids of the cached blocks that a chain of content hashes begins with; the first miss ends it."""
        found: list[int] = []
        for content in content_hashes:
            block_id: int | None = self._cached_blocks.get(content)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def is_in_use(self, block_id: int) -> bool:
        """Returns whether some sequence holds the block (one that none holds can be evicted)."""
        return self._refcounter.get(block_id) > 0


def extend_hashes(hashes: list[int], hash_ids: Callable[[int, int], list[int]], block_size: int,
                  num_blocks: int) -> None:
    """Appends to a chain of content hashes until it covers `num_blocks` blocks. hash_ids: `Sequence.hash_ids`."""
    for index in range(len(hashes), num_blocks):
        previous = hashes[-1] if index else None
        ids = hash_ids(index * block_size, (index + 1) * block_size)
        hashes.append(PrefixCachingBlock.hash_block_tokens(index == 0, previous, ids))
