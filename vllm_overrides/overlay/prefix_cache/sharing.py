"""Prompts that share a beginning: the second one waits for the first instead of computing the same beside it."""
from collections.abc import Callable

from vllm.overlay.prefix_cache.content_hash import common_blocks
from vllm.sequence import Sequence

# Fewer blocks are rather computed twice: waiting costs a step or more.
MIN_BLOCKS = 8


def shared_blocks(chain: Callable[[Sequence, int], list[int]], block_size: int, waiting: Sequence, hit: int,
                  ahead: Sequence) -> int:
    """Returns how many blocks a waiting prompt will find once the prompt of `ahead` is computed: those that both begin
    with, if that is still to pass them and they are at least MIN_BLOCKS more than the `hit` blocks found now; else 0.

    chain: `ComputedBlockManager.chain`; of prompts that part early only the first blocks are hashed.
    """
    limit = min((waiting.get_len() - 1) // block_size, ahead.get_len() // block_size)
    needed = max(hit + MIN_BLOCKS, ahead.data.get_num_computed_tokens() // block_size + 1)
    if limit < needed:
        return 0
    reach = MIN_BLOCKS
    while True:
        one, other = chain(waiting, reach), chain(ahead, reach)
        if min(len(one), len(other)) >= needed and one[needed - 1] != other[needed - 1]:
            return 0
        reach = min(len(one), len(other), limit)
        if one[reach - 1] != other[reach - 1]:
            common = common_blocks(one, other, reach)
            return common if common >= needed else 0
        if reach == limit:
            return limit
        reach = min(limit, 2 * reach)
