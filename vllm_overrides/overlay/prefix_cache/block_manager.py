"""The block manager with honest prefix hits, exact room checks, and no sequence that can never be admitted again."""
from typing import Any, NamedTuple

from vllm.core.block.block_table import BlockTable
from vllm.core.block_manager_v2_stock import BlockSpaceManagerV2
from vllm.core.interfaces import AllocStatus
from vllm.overlay.prefix_cache.allocator import ComputedBlockAllocator
from vllm.overlay.prefix_cache.content_hash import extend_chain
from vllm.sequence import Sequence, SequenceGroup, SequenceStatus
from vllm.utils import Device, cdiv

# Blocks hashed at first to see whether a prompt is known.
_LOOK_AHEAD = 16


class _Computed(NamedTuple):
    """Blocks [first, end) of a sequence that the running step completes."""
    seq_id: int
    first: int
    end: int


class ComputedBlockManager(BlockSpaceManagerV2):
    """Stock's manager; it lets the scheduler count hits and enters blocks into the prefix cache only after their step
    succeeded.

    The runner is never told of hits: `get_common_computed_block_ids` is empty, and a hit is simply tokens already
    computed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: list[_Computed] = []
        # Per sequence: how many of its leading blocks were entered; the content hashes of its leading full blocks; how
        # many of them are in the cache, as of which of its removals.
        self._entered: dict[int, int] = {}
        self._chains: dict[int, list[int]] = {}
        self._known: dict[int, tuple[int, int]] = {}
        # Sequences whose beginning has been forgotten: what follows it can never be found.
        self._forgotten: set[int] = set()

    @property
    def gpu(self) -> ComputedBlockAllocator:
        """Of the blocks on the device; only where prefix caching is on."""
        return self.block_allocator._allocators[Device.GPU]

    def chain(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Returns the content hashes of the sequence's leading full blocks, at least `num_blocks` if it has as many.
        The list grows with the sequence; until it is freed it is the same one."""
        chain = self._chains.setdefault(seq.seq_id, [])
        extend_chain(chain, seq.hash_ids, self.block_size, min(num_blocks, seq.get_len() // self.block_size))
        return chain

    def num_known_blocks(self, seq: Sequence) -> int:
        """Returns how many blocks that `seq` begins with are in the cache, never all of its tokens: the last one must
        be computed. Only blocks that are known, and the next few, are hashed."""
        limit = (seq.get_len() - 1) // self.block_size
        known, removals = self._known.get(seq.seq_id, (0, 0))
        if removals != self.gpu.removals:
            known = 0
        while known < limit:
            chain = self.chain(seq, min(limit, max(2 * known, _LOOK_AHEAD)))
            end = min(limit, len(chain))
            known = next((index for index in range(known, end) if not self.gpu.has(chain[index])), end)
            if known < end:
                break
        self._known[seq.seq_id] = known, self.gpu.removals
        return known

    def get_common_computed_block_ids(self, seqs: list[Sequence]) -> list[int]:
        """Always empty: stock's runner keeps the hit over later pieces and then reads a block table that is too
        short."""
        return []

    def mark_blocks_as_computed(self, seq_group: SequenceGroup, token_chunk_size: int) -> None:
        """Notes which blocks the step that is being scheduled completes; `step_succeeded` enters them.

        Groups whose KV depends on more than the content hash knows (`is_hashed`) are left out.
        """
        if not self.enable_caching or not is_hashed(seq_group):
            return
        for seq in seq_group.get_seqs(status=SequenceStatus.RUNNING):
            if seq.seq_id in self._forgotten:
                continue
            end = (seq.data.get_num_computed_tokens() + token_chunk_size) // self.block_size
            first = self._entered.get(seq.seq_id, 0)
            if end > first:
                self._running.append(_Computed(seq.seq_id, first, end))

    def step_succeeded(self) -> None:
        """Enters what the last scheduled step has computed. Harmless when it was called for that step already."""
        for seq_id, first, end in self._running:
            table = self.block_tables.get(seq_id)
            if table is not None:
                self.gpu.enter_computed(table.blocks[first:end])
                self._entered[seq_id] = end
        self._running.clear()

    def step_failed(self) -> None:
        """Forgets what the last scheduled step should have computed."""
        self._running.clear()

    def distrust(self, seq: Sequence) -> None:
        """Takes the blocks of a running sequence out of the prefix cache for good, those that it found there too."""
        table = self.block_tables.get(seq.seq_id)
        if self.enable_caching and table is not None:
            self._forgotten.add(seq.seq_id)
            self.gpu.distrust(table.blocks)

    def forget_all(self) -> None:
        """Empties the prefix cache. Sequences that run go on, and leave nothing behind in it."""
        if self.enable_caching:
            self._running.clear()
            self._forgotten.update(self.block_tables)
            self.gpu.forget_all()

    def _allocate_sequence(self, seq: Sequence) -> BlockTable:
        """Shares the blocks of the tokens that need no computing, and no others. Blocks of the prompt are known by what
        their pictures show. What is generated later has no pictures."""
        if not self.enable_caching:
            return super()._allocate_sequence(seq)
        length = seq.get_len()
        blocks = self.gpu.allocate_prefix(seq.hash_ids(0, length), self.chain(seq, length // self.block_size),
                                          seq.data.get_num_computed_tokens() // self.block_size)
        return BlockTable(self.block_size, self.block_allocator, blocks, self.max_block_sliding_window)

    def free(self, seq: Sequence) -> None:
        table = self.block_tables.get(seq.seq_id)
        if self.enable_caching and table is not None and seq.seq_id not in self._forgotten:
            # The blocks of others that stood for its own may have been given up since.
            self.gpu.enter_computed(table.blocks[:self._entered.get(seq.seq_id, 0)])
        self._forgotten.discard(seq.seq_id)
        for each in (self._entered, self._chains, self._known):
            each.pop(seq.seq_id, None)
        super().free(seq)

    def can_allocate(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """As stock, but blocks of the prefix that others hold need no room, and whoever fits into the empty cache is
        never refused. The prefix is what need not be computed.

        Stock keeps 1 % of the blocks free of prompts even then: a preempted sequence of nearly max_model_len would end
        unfinished.
        """
        if seq_group.is_encoder_decoder() or self.max_block_sliding_window is not None:
            return super().can_allocate(seq_group, num_lookahead_slots)
        (seq, ) = seq_group.get_seqs(status=SequenceStatus.WAITING)
        needed = cdiv(seq.get_len() + num_lookahead_slots, self.block_size)
        if needed > self.num_total_gpu_blocks:
            return AllocStatus.NEVER
        free = self.get_num_free_gpu_blocks()
        shared = seq.data.get_num_computed_tokens() // self.block_size if self.enable_caching else 0
        if shared and free - needed < self.watermark_blocks:
            needed -= self.gpu.num_in_use(self.chain(seq, shared), shared)
        if free - needed >= self.watermark_blocks or (free >= needed and not self.block_tables):
            return AllocStatus.OK
        return AllocStatus.LATER

    def can_append_slots(self, seq_group: SequenceGroup, num_lookahead_slots: int) -> bool:
        """As stock, but counts the blocks that are really missing; stock wants a free block for a token that fits into
        the last one.

        Where the cache just holds one longest sequence, stock preempts that sequence after each of its last tokens.
        """
        seqs = seq_group.get_seqs(status=SequenceStatus.RUNNING)
        if len(seqs) > 1:
            return super().can_append_slots(seq_group, num_lookahead_slots)
        missing = sum(
            cdiv(seq.get_len() + num_lookahead_slots, self.block_size) - len(self.block_tables[seq.seq_id].blocks)
            for seq in seqs)
        return missing <= self.get_num_free_gpu_blocks()


def is_hashed(seq_group: SequenceGroup) -> bool:
    """Returns whether equal hash ids mean equal KV: no LoRA, no prompt adapter, no pictures of stock's multimodal
    models (those of ours are in the hash ids)."""
    return not (seq_group.lora_request or seq_group.prompt_adapter_request or seq_group.multi_modal_data)
