"""Attention as the vendor's attention/backends/flash_attn.py calls it: paged caches of [blocks, KV heads, block size, head
size], causal, grouped heads. Written to be plainly right: one row at a time, float32."""
from __future__ import annotations

import torch


def flash_attn_varlen_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
                           cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float,
                           causal: bool, window_size: tuple[int, int], softcap: float,
                           alibi_slopes: torch.Tensor | None, block_table: torch.Tensor | None, out: torch.Tensor,
                           sqrt_alibi: bool | None) -> torch.Tensor:
    """Prompts and pieces of prompts. q, out: [T, heads, head size]; k, v: [T, KV heads, head size], or with a
    block_table [rows, blocks] the caches."""
    _only_plain(causal, window_size, softcap, alibi_slopes)
    query_starts, key_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for row, (start, end) in enumerate(zip(query_starts, query_starts[1:])):  # noqa: B905
        length = key_starts[row + 1] - key_starts[row]
        if end - start > max_seqlen_q or length > max_seqlen_k:
            raise ValueError(f"row {row} has {end - start} queries and {length} keys, above {max_seqlen_q}, {max_seqlen_k}")
        if block_table is None:
            keys, values = (each[key_starts[row]:key_starts[row + 1]] for each in (k, v))
        else:
            keys, values = (_gathered(each, block_table[row], length) for each in (k, v))
        out[start:end] = _attention(q[start:end], keys, values, softmax_scale)
    return out


def flash_attn_with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache_seqlens: torch.Tensor,
                            block_table: torch.Tensor, softmax_scale: float, causal: bool,
                            alibi_slopes: torch.Tensor | None, softcap: float, max_context_len: int,
                            cache_seqlens_cpu: torch.Tensor, out: torch.Tensor,
                            use_sqrt_alibi: bool | None) -> torch.Tensor:
    """One token of each row. q, out: [rows, 1, heads, head size]."""
    _only_plain(causal, (-1, -1), softcap, alibi_slopes)
    lengths = cache_seqlens_cpu.tolist()
    if lengths != cache_seqlens.tolist() or len(lengths) != len(q) or max(lengths) > max_context_len:
        raise ValueError(f"lengths {lengths}, on the device {cache_seqlens.tolist()}, {len(q)} rows, at most {max_context_len}")
    for row, length in enumerate(lengths):
        keys, values = (_gathered(cache, block_table[row], length) for cache in (k_cache, v_cache))
        out[row] = _attention(q[row], keys, values, softmax_scale)
    return out


def _gathered(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """-> [length, KV heads, head size]."""
    needed = -(-length // cache.shape[2])
    if len(blocks) < needed:
        raise ValueError(f"a table of {len(blocks)} blocks for {length} tokens")
    return cache[blocks[:needed].long()].transpose(1, 2).flatten(0, 1)[:length]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q: [n, heads, d], the last n of the m positions of k, v: [m, KV heads, d] -> [n, heads, d]."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (each.float().repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    later = torch.arange(m) > torch.arange(m - n, m)[:, None]
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).to(q.dtype)


def _only_plain(causal: bool, window: tuple[int, int], softcap: float, alibi: torch.Tensor | None) -> None:
    if not causal or tuple(window) != (-1, -1) or softcap or alibi is not None:
        raise NotImplementedError("only causal attention without window, soft cap and ALiBi")
