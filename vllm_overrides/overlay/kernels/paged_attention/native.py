"""Paged attention in compiled code (csrc/): one call writes a step's keys and values, one serves all its rows."""
from array import array
from collections.abc import Sequence
from functools import cache

import torch

from vllm.overlay.kernels import native
from vllm.overlay.kernels.paged_attention import torch_impl

unavailable, for_this_platform = native.unavailable, native.for_this_platform


@cache
def _functions():
    return (native.function("write_kv", "iiplplppplllp"),
            native.function("paged_attention", "iipppppilppllllllfp"))


def write_kv(k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
             slot_mapping: torch.Tensor) -> None:
    """See the package's `write_kv`. Where a slot lies outside the cache nothing is written."""
    if k.dtype != v.dtype or key_cache.dtype != value_cache.dtype:
        torch_impl.write_kv(k, v, key_cache, value_cache, slot_mapping)
        return
    tokens, heads, size = k.shape
    blocks, block_size = key_cache.shape[:2]
    k, v = _rows(k, size), _rows(v, size)
    slots, bad = slot_mapping.contiguous(), array("q", (0, 0))
    _functions()[0](native.DTYPES[k.dtype], native.DTYPES[key_cache.dtype], k.data_ptr(), k.stride(0), v.data_ptr(),
                    v.stride(0), key_cache.data_ptr(), value_cache.data_ptr(), slots.data_ptr(), tokens, heads * size,
                    blocks * block_size, bad.buffer_info()[0])
    if bad[0]:
        raise IndexError(f"write_kv: slot {bad[1]} in a cache of {blocks} blocks of {block_size}")


def _rows(x: torch.Tensor, size: int) -> torch.Tensor:
    """x, each token's heads one after the other."""
    return x if x.stride(2) == 1 and x.stride(1) == size else x.contiguous()


def paged_attention(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_tables: torch.Tensor,
                    query_start_loc: Sequence[int], seq_lens: Sequence[int], scale: float) -> torch.Tensor:
    """See the package's `paged_attention`. Bit for bit the same for any number of threads, batch, and cut of a prompt
    into pieces of more than one token.

    Raises:
        IndexError: a row with queries has a block outside the cache; nothing is computed.
    """
    if key_cache.dtype != value_cache.dtype:
        return torch_impl.paged_attention(q, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale)
    q, key_cache, value_cache = q.contiguous(), key_cache.contiguous(), value_cache.contiguous()
    tables = block_tables if block_tables.dtype in (torch.int32, torch.int64) else block_tables.long()
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    out = torch.empty_like(q)
    starts, lengths, bad = array("q", query_start_loc), array("q", seq_lens), array("q", (0, 0))
    _, heads, size = q.shape
    blocks, block_size, kv_heads = key_cache.shape[:3]
    _functions()[1](native.DTYPES[q.dtype], native.DTYPES[key_cache.dtype], q.data_ptr(), out.data_ptr(),
                    key_cache.data_ptr(), value_cache.data_ptr(), tables.data_ptr(), tables.dtype == torch.int64,
                    tables.stride(0), starts.buffer_info()[0], lengths.buffer_info()[0], len(lengths), heads, kv_heads,
                    size, blocks, block_size, scale, bad.buffer_info()[0])
    if bad[0]:
        raise IndexError(f"paged_attention: block {bad[1]} in a cache of {blocks}")
    return out
