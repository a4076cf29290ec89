"""Attention query by query in float32: the truth that back ends are compared with."""
from collections.abc import Sequence

import torch


def write_kv(k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
             slot_mapping: torch.Tensor) -> None:
    """See the package's `write_kv`."""
    blocks, block_size = key_cache.shape[:2]
    for t, slot in enumerate(slot_mapping.tolist()):
        if not 0 <= slot < blocks * block_size:
            raise IndexError(f"write_kv: slot {slot} in a cache of {blocks} blocks of {block_size}")
        key_cache[slot // block_size, slot % block_size] = k[t]
        value_cache[slot // block_size, slot % block_size] = v[t]


def paged_attention(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_tables: torch.Tensor,
                    query_start_loc: Sequence[int], seq_lens: Sequence[int], scale: float) -> torch.Tensor:
    """See the package's `paged_attention`."""
    block_size, kv_heads = key_cache.shape[1:3]
    group = q.shape[1] // kv_heads
    out = torch.empty_like(q)
    for row, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        if start == end:
            continue
        table = block_tables[row].tolist()
        keys = torch.stack([key_cache[table[i // block_size], i % block_size] for i in range(seq_len)]).float()
        values = torch.stack([value_cache[table[i // block_size], i % block_size] for i in range(seq_len)]).float()
        for t in range(start, end):
            visible = seq_len - (end - 1 - t)
            for head in range(q.shape[1]):
                scores = keys[:visible, head // group] @ q[t, head].float() * scale
                weights = torch.exp(scores - scores.max())
                mixed = (weights[:, None] * values[:visible, head // group]).sum(0) / weights.sum()
                out[t, head] = mixed.to(q.dtype)
    return out
