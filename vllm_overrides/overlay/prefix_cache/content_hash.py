"""What a prefix is known by: a chain of hashes, one per block, each over the one before it and its block's content.

Equal hashes mean equal tokens, and equal pictures, from the first token on. Stock takes Python's `hash`, which is made
for dictionaries: whoever can choose token ids can make two prompts collide, and one is then answered with the other's
KV.
"""
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

_SIZE = 16
# In the place of the hash before the first block.
_START = bytes(_SIZE)


def hash_block(is_first_block: bool, prev_block_hash: int | None, cur_block_token_ids: Sequence[int]) -> int:
    """Returns the hash of a full block; stands for stock's `PrefixCachingBlock.hash_block_tokens`.
    cur_block_token_ids: hash ids rather, of `Sequence.hash_ids`; each fits into int64."""
    before = _START if is_first_block or prev_block_hash is None else prev_block_hash.to_bytes(_SIZE, "little")
    return int.from_bytes(_next(before, array("q", cur_block_token_ids).tobytes()), "little")


def extend_chain(chain: list[int], hash_ids: Callable[[int, int], list[int]], block_size: int, num_blocks: int) -> None:
    """Appends to a chain until it covers `num_blocks` blocks. hash_ids: `Sequence.hash_ids`."""
    if len(chain) >= num_blocks:
        return
    content = array("q", hash_ids(len(chain) * block_size, num_blocks * block_size)).tobytes()
    last = chain[-1].to_bytes(_SIZE, "little") if chain else _START
    width = 8 * block_size
    for start in range(0, len(content), width):
        last = _next(last, content[start:start + width])
        chain.append(int.from_bytes(last, "little"))


def common_blocks(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Returns how many of their first `limit` hashes two chains share."""
    low, high = 0, min(len(one), len(other), limit)
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _next(before: bytes, content: bytes) -> bytes:
    return blake2b(before + content, digest_size=_SIZE).digest()
