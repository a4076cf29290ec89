"""Allocation of KV blocks where a block enters the prefix cache when it has been computed, and not before.

Stock enters a block when its token ids are known and calls all of a prompt's blocks computed after the first piece of
it. An abort or a preemption in the middle of a prompt then leaves blocks in the cache that nobody computed, and later
requests attend to them.
"""
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.core.block.prefix_caching_block_stock import PrefixCachingBlock, PrefixCachingBlockAllocator
from vllm.overlay.prefix_cache.content_hash import hash_block
from vllm.overlay.rebind import rebind
from vllm.utils import cdiv

# Blocks hash themselves when they become full.
rebind(PrefixCachingBlock, "hash_block_tokens", staticmethod(hash_block))


class ComputedBlockAllocator(PrefixCachingBlockAllocator):
    """Stock's allocator under one law: `_cached_blocks` maps a content hash to a block that holds the KV of that
    content.

    A full block that is not (yet) in the cache is private to its sequence, and goes back to the free list when it is
    freed. removals: counts blocks that left the cache. on_removed: called with the hash of each.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.removals = 0
        self.on_removed: Callable[[int], None] | None = None
        # Blocks in use whose content nobody may find (again).
        self._distrusted: set[int] = set()

    def allocate_prefix(self, ids: Sequence[int], chain: Sequence[int], shared: int) -> list[Any]:
        """Returns the blocks of a sequence: the first `shared` of them from the cache, where they must be, the others
        private, although the cache may know their content: a block that others may be reading is not written again.

        ids: what the tokens are known by. chain: hashes of the full blocks of them.
        """
        blocks: list[Any] = []
        for index in range(cdiv(len(ids), self._block_size)):
            piece = list(ids[index * self._block_size:(index + 1) * self._block_size])
            block = self._block_pool.init_block(prev_block=blocks[-1] if blocks else None,
                                                token_ids=piece,
                                                block_size=self._block_size,
                                                physical_block_id=None)
            if len(piece) == self._block_size:
                block._cached_content_hash = chain[index]
            if index < shared:
                block.block_id = self._cached_blocks[chain[index]]
                self._incr_refcount_cached_block(block)
            else:
                block.block_id = self._allocate_block_id()
            blocks.append(block)
        return blocks

    def promote_to_immutable_block(self, block: Any) -> int:
        """Called by a block that has become full; nothing is known about its content yet."""
        return block.block_id

    def enter_computed(self, blocks: Iterable[Any]) -> None:
        """Makes full blocks findable whose KV has been computed. A second block of the same content stays private while
        somebody uses the first, and takes its place where nobody does."""
        for block in blocks:
            content, block_id = block.content_hash, block.block_id
            assert content is not None and block_id is not None, "only full blocks in use can be entered"
            if block_id in self._distrusted:
                continue
            other = self._cached_blocks.get(content)
            if other is not None and other != block_id:
                if other not in self.evictor:
                    continue
                # Its chain would be cut by the next eviction, the one that has just been computed would not.
                self.evictor.remove(other)
                self._hashless_allocator._free_block_indices.appendleft(other)
            self._cached_blocks[content] = block_id
            self._block_tracker[block_id].computed = True

    def distrust(self, blocks: Iterable[Any]) -> None:
        """Takes blocks in use out of the cache, and keeps them out until they are given to somebody else."""
        for block in blocks:
            self._distrusted.add(block.block_id)
            content = block.content_hash
            if content is not None and self._cached_blocks.get(content) == block.block_id:
                del self._cached_blocks[content]
                self._block_tracker[block.block_id].computed = False
                self._removed(content)

    def forget_all(self) -> None:
        """Empties the cache. Blocks in use become private; whoever uses them must not enter what follows them."""
        for block_id in self._cached_blocks.values():
            if block_id in self.evictor:
                self.evictor.remove(block_id)
                self._hashless_allocator._free_block_indices.append(block_id)
            else:
                self._block_tracker[block_id].computed = False
        contents = list(self._cached_blocks)
        self._cached_blocks.clear()
        for content in contents:
            self._removed(content)

    def needs_changed(self, contents: Iterable[int]) -> None:
        """Blocks of these hashes are needed by checkpoints, or no longer."""
        for content in contents:
            block_id = self._cached_blocks.get(content)
            if block_id is not None and block_id in self.evictor:
                self.evictor.rank(block_id)

    def mark_blocks_as_computed(self, block_ids: list[int]) -> None:
        """Stock's way in, which marks whatever was touched: not used."""
        raise NotImplementedError("blocks are entered by enter_computed")

    def has(self, content: int) -> bool:
        """Returns whether a block of that hash can be found."""
        return content in self._cached_blocks

    def num_in_use(self, chain: Sequence[int], shared: int) -> int:
        """Returns how many of the first `shared` blocks of a chain, all in the cache, some sequence holds."""
        return sum(self._refcounter.get(self._cached_blocks[content]) > 0 for content in chain[:shared])

    def _allocate_block_id(self) -> int:
        block_id = super()._allocate_block_id()
        self._distrusted.discard(block_id)
        return block_id

    def _maybe_allocate_hashless_block_id(self) -> int | None:
        """As stock, without making a block object for each to throw it away."""
        if not self._hashless_allocator._free_block_indices:
            return None
        block_id: int = self._hashless_allocator._allocate_block_id()
        self._track_block_id(block_id, computed=False)
        return block_id

    def _maybe_allocate_evicted_block_id(self) -> int | None:
        if not self.evictor.num_blocks:
            return None
        block_id, content = self.evictor.evict()
        del self._cached_blocks[content]
        self._refcounter.incr(block_id)
        self._track_block_id(block_id, computed=False)
        self._removed(content)
        return block_id

    def _removed(self, content: int) -> None:
        self.removals += 1
        if self.on_removed is not None:
            self.on_removed(content)

    def _free_block_id(self, block: Any) -> None:
        if block.content_hash is not None and self._cached_blocks.get(block.content_hash) == block.block_id:
            self._decr_refcount_cached_block(block)
        else:
            self._decr_refcount_hashless_block(block)
