"""Chains of content hashes: what they depend on, and that stock's blocks take the same ones."""
import random
import time

import pytest

from vllm.core.block.prefix_caching_block import PrefixCachingBlockAllocator
from vllm.overlay.prefix_cache.content_hash import common_blocks, extend_chain, hash_block


def chain_of(ids, block=4):
    chain = []
    extend_chain(chain, lambda start, end: ids[start:end], block, len(ids) // block)
    return chain


def test_a_hash_stands_for_everything_before_it():
    ids = list(range(40))
    chain = chain_of(ids)
    assert len(set(chain)) == 10
    for place in range(40):
        other = chain_of(ids[:place] + [99] + ids[place + 1:])
        same = [one == two for one, two in zip(chain, other, strict=True)]
        assert same == [index < place // 4 for index in range(10)]


def test_a_chain_grows_as_if_it_had_been_made_at_once():
    ids = [random.Random(0).randrange(-1, 1 << 62) for _ in range(100)]
    chain, asked = [], []

    def hash_ids(start, end):
        asked.append((start, end))
        return ids[start:end]

    for blocks in (0, 1, 1, 3, 2, 25):
        extend_chain(chain, hash_ids, 4, blocks)
        assert len(chain) == max(blocks, len(chain))
    assert chain == chain_of(ids) and asked == [(0, 4), (4, 12), (12, 100)], "no token is hashed twice"


def test_python_s_hash_of_small_numbers_is_not_what_counts():
    """hash(-1) == hash(-2): two prompts that stock takes for one."""
    assert hash((True, None, -1)) == hash((True, None, -2))
    assert chain_of([-1] * 4) != chain_of([-2] * 4)


def test_blocks_of_stock_hash_the_same():
    ids = [random.Random(1).randrange(1 << 40) for _ in range(22)]
    chain = chain_of(ids)
    assert hash_block(True, None, ids[:4]) == chain[0] and hash_block(False, chain[0], ids[4:8]) == chain[1]
    allocator = PrefixCachingBlockAllocator(num_blocks=8, block_size=4)
    block, found = None, []
    for start in range(0, 20, 4):
        block = allocator.allocate_mutable_block(block)
        for token in ids[start:start + 4]:
            block.append_token_ids([token])
        found.append(block.content_hash)
    assert found == chain
    allocator = PrefixCachingBlockAllocator(num_blocks=8, block_size=4)
    blocks = allocator.allocate_prefix(ids, chain, 0)
    assert [block.content_hash for block in blocks] == [*chain, None] and blocks[-1].token_ids == ids[20:]
    blocks[-1].append_token_ids([7, 8])
    assert blocks[-1].content_hash == hash_block(False, chain[-1], [*ids[20:], 7, 8])


@pytest.mark.parametrize("shared", [0, 1, 7, 24, 25])
def test_common_blocks(shared):
    ids = list(range(100))
    other = ids[:4 * shared] + [1000 + one for one in ids[4 * shared:]]
    assert common_blocks(chain_of(ids), chain_of(other), 100) == shared
    assert common_blocks(chain_of(ids), chain_of(other), 5) == min(shared, 5)
    assert common_blocks(chain_of(ids), chain_of(other)[:3], 100) == min(shared, 3)


def test_250k_tokens_are_hashed_in_no_time():
    ids = list(range(250_000))
    start = time.process_time()
    chain = chain_of(ids, 16)
    seconds = time.process_time() - start
    assert len(chain) == 15_625 and seconds < 0.5, f"{seconds:.2f} s"
