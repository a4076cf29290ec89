"""The block manager with honest prefix hits, exact room checks, and no sequence that can never be admitted again."""
from typing import Any, NamedTuple

from vllm.core.block.block_table import BlockTable
from vllm.core.block_manager_v2_stock import BlockSpaceManagerV2
from vllm.core.interfaces import AllocStatus
from vllm.overlay.prefix_cache.allocator import ComputedBlockAllocator, extend_hashes
from vllm.sequence import Sequence, SequenceGroup, SequenceStatus
from vllm.utils import Device, cdiv


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
        # Per sequence: how many of its leading blocks were entered, and the content hashes of its leading full blocks.
        self._entered: dict[int, int] = {}
        self._hashes: dict[int, list[int]] = {}

    @property
    def _gpu(self) -> ComputedBlockAllocator:
        return self.block_allocator._allocators[Device.GPU]

    def cached_prefix_blocks(self, seq: Sequence) -> list[int]:
        """Returns the ids of the cached blocks that `seq` begins with, never all of its tokens: the last one must be
        computed."""
        num_blocks = (seq.get_len() - 1) // self.block_size
        hashes = self._hashes.setdefault(seq.seq_id, [])
        if len(hashes) < num_blocks:
            extend_hashes(hashes, seq.hash_ids, self.block_size, num_blocks)
        return self._gpu.cached_prefix(hashes[:num_blocks])

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
            end = (seq.data.get_num_computed_tokens() + token_chunk_size) // self.block_size
            first = self._entered.get(seq.seq_id, 0)
            if end > first:
                self._running.append(_Computed(seq.seq_id, first, end))

    def step_succeeded(self) -> None:
        """Enters what the last scheduled step has computed. Harmless when it was called for that step already."""
        for seq_id, first, end in self._running:
            table = self.block_tables.get(seq_id)
            if table is not None:
                self._gpu.enter_computed(table.blocks[first:end])
                self._entered[seq_id] = end
        self._running.clear()

    def step_failed(self) -> None:
        """Forgets what the last scheduled step should have computed."""
        self._running.clear()

    def distrust(self, seq: Sequence) -> None:
        """Takes the blocks of a running sequence out of the prefix cache for good, those that it found there too."""
        table = self.block_tables.get(seq.seq_id)
        if self.enable_caching and table is not None:
            self._gpu.distrust(table.blocks)

    def _allocate_sequence(self, seq: Sequence) -> BlockTable:
        """Blocks of the prompt are known by what their pictures show. What is generated later has no pictures."""
        if seq.pictures is None:
            return super()._allocate_sequence(seq)
        return super()._allocate_sequence(_Content(seq.hash_ids(0, seq.get_len())))

    def free(self, seq: Sequence) -> None:
        self._entered.pop(seq.seq_id, None)
        self._hashes.pop(seq.seq_id, None)
        super().free(seq)

    def can_allocate(self, seq_group: SequenceGroup, num_lookahead_slots: int = 0) -> AllocStatus:
        """As stock, but blocks of the prefix that others hold need no room, and whoever fits into the empty cache is
        never refused.

        Stock keeps 1 % of the blocks free of prompts even then: a preempted sequence of nearly max_model_len would end
        unfinished.
        """
        if seq_group.is_encoder_decoder() or self.max_block_sliding_window is not None:
            return super().can_allocate(seq_group, num_lookahead_slots)
        (seq, ) = seq_group.get_seqs(status=SequenceStatus.WAITING)
        needed = cdiv(seq.get_len() + num_lookahead_slots, self.block_size)
        if needed > self.num_total_gpu_blocks:
            return AllocStatus.NEVER
        if self.enable_caching:
            needed -= sum(self._gpu.is_in_use(block_id) for block_id in self.cached_prefix_blocks(seq))
        free = self.get_num_free_gpu_blocks()
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


class _Content(NamedTuple):
    """In the place of a sequence where stock asks for the ids to hash."""
    hash_ids: list[int]

    def get_token_ids(self) -> list[int]:
        return self.hash_ids
