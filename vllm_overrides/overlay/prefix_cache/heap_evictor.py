"""Eviction of unused KV blocks by a heap: stock scans all blocks of the oldest time stamp for every single block."""
import heapq
from collections.abc import Container
from itertools import count

from vllm.core.evictor_v2_stock import Evictor

# (needed, last access, minus the number of tokens up to the block's end, arrival, block id)
_Entry = tuple[bool, float, int, int, int]


class HeapEvictor(Evictor):
    """Gives up the least recently used block first; among those of one time stamp the one that ends the longest prefix.
    Blocks that a checkpoint of recurrent state needs come after all others.

    Entries of the heap whose block was taken out or touched since are skipped when they surface, so every operation is
    logarithmic. needed: the content hashes of blocks that checkpoints need; whoever changes it calls `rank`.
    """
    needed: Container[int] = frozenset()

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._hashes: dict[int, int] = {}
        self._heap: list[_Entry] = []
        self._arrivals = count()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entries

    def add(self, block_id: int, content_hash: int, num_hashed_tokens: int, last_accessed: float) -> None:
        """Makes a block a candidate. last_accessed: seconds."""
        self._hashes[block_id] = content_hash
        self._push((content_hash in self.needed, last_accessed, -num_hashed_tokens, next(self._arrivals), block_id))

    def evict(self) -> tuple[int, int]:
        """Takes out the next block and returns (block id, content hash).

        Raises:
            ValueError: there is none.
        """
        while self._heap:
            entry = heapq.heappop(self._heap)
            block_id = entry[-1]
            if self._entries.get(block_id) == entry:
                del self._entries[block_id]
                return block_id, self._hashes.pop(block_id)
        raise ValueError("no unused block to evict")

    def update(self, block_id: int, last_accessed: float) -> None:
        """Renews a candidate's time stamp. Raises KeyError if it is none."""
        needed, _, tokens, arrival, _ = self._entries[block_id]
        self._push((needed, last_accessed, tokens, arrival, block_id))

    def rank(self, block_id: int) -> None:
        """Looks anew whether a candidate is needed. Raises KeyError if it is none."""
        needed, last_accessed, tokens, arrival, _ = self._entries[block_id]
        now = self._hashes[block_id] in self.needed
        if now != needed:
            self._push((now, last_accessed, tokens, arrival, block_id))

    def remove(self, block_id: int) -> None:
        """Takes a candidate out because it is used again.

        Raises:
            ValueError: it is no candidate.
        """
        if block_id not in self._entries:
            raise ValueError(f"block {block_id} is not in the evictor")
        del self._entries[block_id], self._hashes[block_id]

    @property
    def num_blocks(self) -> int:
        return len(self._entries)

    def _push(self, entry: _Entry) -> None:
        self._entries[entry[-1]] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
