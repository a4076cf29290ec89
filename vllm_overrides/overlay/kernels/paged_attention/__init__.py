"""Causal attention over a paged cache of keys and values, for prompts, pieces of prompts and decode rows alike."""
from collections.abc import Sequence

import torch

from vllm.overlay.kernels.backend import Backends

backends = Backends("paged_attention",
                    (("native", "native"), ("torch", "torch_impl"), ("reference", "reference")))


def write_kv(k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
             slot_mapping: torch.Tensor) -> None:
    """Stores the step's keys and values at their cache positions.

    Args:
        k, v: [T, Hkv, D].
        key_cache, value_cache: [num_blocks, block_size, Hkv, D], contiguous; the dtype may differ (values are cast).
        slot_mapping: int64 [T] on the device: block * block_size + position in the block, all different.

    Raises:
        ValueError: sizes that do not fit together.
        IndexError (CPU) or a device-side assertion: a slot outside the cache. Stock's padding value -1 is one: drop
            such tokens before calling.
    """
    if k.shape != v.shape or key_cache.shape != value_cache.shape or key_cache.shape[2:] != k.shape[1:]:
        raise ValueError(f"write_kv: k {tuple(k.shape)}, v {tuple(v.shape)}, key_cache {tuple(key_cache.shape)}, "
                         f"value_cache {tuple(value_cache.shape)}")
    backends.chosen().write_kv(k, v, key_cache, value_cache, slot_mapping)


def paged_attention(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_tables: torch.Tensor,
                    query_start_loc: Sequence[int], seq_lens: Sequence[int], scale: float) -> torch.Tensor:
    """softmax(scale q k^T) v over each query's own and earlier positions; scores, softmax and sums in float32.

    The step's own keys and values must be in the cache already. Row i has the queries
    [query_start_loc[i], query_start_loc[i + 1]); the last of them stands at position seq_lens[i] - 1.

    Args:
        q: [T, Hq, D], float32, bfloat16 or float16; any D. Hq is a multiple of Hkv; head h reads h // (Hq // Hkv).
        key_cache, value_cache: [num_blocks, block_size, Hkv, D]. Positions at or after seq_lens[i] are never used,
            whatever they hold.
        block_tables: integer [N, max_blocks] on the device: the rows' blocks in order; entries past the
            sequence's end are ignored. It may be narrower than another row needs only where that row has no queries.
        query_start_loc: N + 1 host ints. seq_lens: N host ints, context and piece together.
        scale: multiplies the scores, D ** -0.5 for these models.

    Returns:
        [T, Hq, D] of q's dtype.

    Raises:
        ValueError: sizes or rows that do not fit together.
    """
    tokens, heads, size = q.shape
    rows = len(seq_lens)
    if heads % key_cache.shape[2] or key_cache.shape[3] != size or key_cache.shape != value_cache.shape:
        raise ValueError(f"paged_attention: q {tuple(q.shape)}, key_cache {tuple(key_cache.shape)}, "
                         f"value_cache {tuple(value_cache.shape)}")
    if len(query_start_loc) != rows + 1 or block_tables.shape[0] != rows or query_start_loc[-1] != tokens:
        raise ValueError(f"paged_attention: {tokens} tokens, {rows} sequence lengths, query_start_loc "
                         f"{list(query_start_loc)}, block_tables {tuple(block_tables.shape)}")
    for row in range(rows):
        queries = query_start_loc[row + 1] - query_start_loc[row]
        if queries < 0 or queries > seq_lens[row]:
            raise ValueError(f"paged_attention: row {row} has {queries} queries in a sequence of {seq_lens[row]}")
        if queries and seq_lens[row] > block_tables.shape[1] * key_cache.shape[1]:
            raise ValueError(f"paged_attention: row {row} has {seq_lens[row]} positions and a table of "
                             f"{block_tables.shape[1]} blocks of {key_cache.shape[1]}")
    return backends.chosen().paged_attention(q, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale)
