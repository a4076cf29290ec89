"""Who waits for whose prefix."""
import random

import pytest

from tests.core.groups import group
from vllm.overlay.prefix_cache.content_hash import extend_chain
from vllm.overlay.prefix_cache.sharing import MIN_BLOCKS, shared_blocks

BLOCK = 4


class Chains:
    """`ComputedBlockManager.chain`, which counts what it hashes."""

    def __init__(self):
        self.chains = {}

    def __call__(self, seq, num_blocks):
        chain = self.chains.setdefault(seq.seq_id, [])
        extend_chain(chain, seq.hash_ids, BLOCK, min(num_blocks, seq.get_len() // BLOCK))
        return chain


def seq_of(tokens, computed=0):
    (seq, ) = group(tokens).seqs
    if computed:
        seq.data.update_num_computed_tokens(computed)
    return seq


@pytest.mark.parametrize("shared", [0, 3, 31, 32, 33, 64, 200, 399])
@pytest.mark.parametrize("hit", [0, 1, 8, 30])
@pytest.mark.parametrize("computed", [0, 5, 40, 150])
def test_what_two_prompts_share(shared, hit, computed):
    waiting = seq_of(list(range(400)))
    ahead = seq_of(list(range(shared)) + [1000 + one for one in range(500 - shared)], computed)
    expected = shared // BLOCK
    if expected < hit + MIN_BLOCKS or computed >= expected * BLOCK:
        expected = 0
    chains = Chains()
    for _ in range(2):
        assert shared_blocks(chains, BLOCK, waiting, hit, ahead) == expected


def test_never_all_of_a_prompt():
    chains, tokens = Chains(), list(range(400))
    assert shared_blocks(chains, BLOCK, seq_of(tokens), 0, seq_of(tokens)) == 99
    assert shared_blocks(chains, BLOCK, seq_of(tokens), 0, seq_of(tokens + [1])) == 99
    assert shared_blocks(chains, BLOCK, seq_of(tokens + [1]), 0, seq_of(tokens)) == 100
    assert shared_blocks(chains, BLOCK, seq_of(tokens[:20]), 0, seq_of(tokens)) == 0, "too short to wait"


def test_prompts_that_part_early_are_not_hashed_to_the_end():
    chance = random.Random(0)
    one, other = (seq_of(chance.choices(range(1000), k=100_000)) for _ in range(2))
    chains = Chains()
    assert shared_blocks(chains, BLOCK, one, 0, other) == 0
    assert max(map(len, chains.chains.values())) == MIN_BLOCKS
