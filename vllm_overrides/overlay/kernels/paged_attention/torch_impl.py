"""Paged attention in vectorised PyTorch: online softmax over tiles, so that no score matrix outgrows a fixed size.

Tiles of the context begin at multiples of a fixed number of positions: a query meets the same tiles wherever its prompt
was cut.
"""
from collections.abc import Sequence

import torch

from vllm.overlay.kernels.online_softmax import OnlineSoftmax

# Positions per tile of a prefill row.
_TILE = 512
# Scores (queries x heads x positions) of a prefill row that exist at a time, and elements of keys that one tile of the
# decode step may hold: near a CPU's cache; elsewhere few launches matter more.
_SCORES_CPU, _SCORES = 1 << 20, 1 << 22
_DECODE_ELEMENTS_CPU, _DECODE_ELEMENTS = 1 << 19, 1 << 24


def write_kv(k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
             slot_mapping: torch.Tensor) -> None:
    """See the package's `write_kv`."""
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slot_mapping, k.to(key_cache.dtype))
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slot_mapping, v.to(value_cache.dtype))


def paged_attention(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, block_tables: torch.Tensor,
                    query_start_loc: Sequence[int], seq_lens: Sequence[int], scale: float) -> torch.Tensor:
    """See the package's `paged_attention`. Rows of one query are served together, the others one by one."""
    out = torch.empty_like(q)
    single: list[int] = []
    for row, seq_len in enumerate(seq_lens):
        start, end = query_start_loc[row], query_start_loc[row + 1]
        if end - start == 1:
            single.append(row)
        elif end > start:
            out[start:end] = _prefill(q[start:end], key_cache, value_cache, block_tables[row], seq_len, scale)
    if single:
        single.sort(key=lambda row: -seq_lens[row])
        rows = torch.tensor(single, device=q.device)
        tokens = torch.tensor([query_start_loc[row] for row in single], device=q.device)
        mixed = _decode(q[tokens], key_cache, value_cache, block_tables[rows], [seq_lens[row] for row in single], scale)
        out.index_copy_(0, tokens, mixed)
    return out


def _prefill(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, table: torch.Tensor, seq_len: int,
             scale: float) -> torch.Tensor:
    queries, heads, size = q.shape
    block_size, kv_heads = key_cache.shape[1:3]
    group = heads // kv_heads
    tile = max(1, _TILE // block_size) * block_size
    step = max(1, (_SCORES_CPU if q.device.type == "cpu" else _SCORES) // (tile * heads))
    out = torch.empty_like(q)
    for begin in range(0, queries, step):
        part = q[begin:begin + step]
        count = part.shape[0]
        scaled = part.float().mul(scale).view(count, kv_heads, group, size).permute(1, 2, 0, 3)
        scaled = scaled.reshape(kv_heads, group * count, size)
        first = seq_len - queries + begin
        softmax = OnlineSoftmax()
        for at in range(0, first + count, tile):
            end = min(at + tile, first + count)
            blocks = table[at // block_size:(end + block_size - 1) // block_size]
            keys = _gather(key_cache, blocks, end - at)
            values = _gather(value_cache, blocks, end - at)
            scores = torch.bmm(scaled, keys.transpose(1, 2))
            if end > first + 1:
                position = torch.arange(at, end, device=q.device)
                own = torch.arange(first, first + count, device=q.device).repeat(group)
                scores.masked_fill_(position[None, :] > own[:, None], -float("inf"))
            softmax.add(scores, values)
        mixed = softmax.result().view(kv_heads, group, count, size).permute(2, 0, 1, 3)
        out[begin:begin + step] = mixed.reshape(count, heads, size).to(q.dtype)
    return out


def _gather(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """Returns float32 [Hkv, length, D]: the first `length` positions of `blocks`. A view of rows [position, head]."""
    return cache.index_select(0, blocks).flatten(0, 1)[:length].float().transpose(0, 1)


def _decode(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tables: torch.Tensor,
            seq_lens: list[int], scale: float) -> torch.Tensor:
    """Rows of one query each, by descending length, so that the rows still in a tile are the first ones."""
    rows, heads, size = q.shape
    block_size, kv_heads = key_cache.shape[1:3]
    elements = _DECODE_ELEMENTS_CPU if q.device.type == "cpu" else _DECODE_ELEMENTS
    lengths = torch.tensor(seq_lens, device=q.device)
    scaled = q.float().mul(scale).view(rows, kv_heads, heads // kv_heads, size)
    softmax = [OnlineSoftmax() for _ in range(kv_heads)]
    at, active = 0, rows
    while at < seq_lens[0]:
        while seq_lens[active - 1] <= at:
            active -= 1
        width = max(1, elements // (active * kv_heads * size * block_size))
        end = min(at + width * block_size, seq_lens[0])
        blocks = tables[:active, at // block_size:(end + block_size - 1) // block_size]
        covered = at + blocks.shape[1] * block_size
        # Past a row's end the table's entries may be anything, and so may the cache: NaN times a weight of 0 is NaN.
        absent = None
        if covered > seq_lens[active - 1]:
            absent = torch.arange(at, covered, device=q.device) >= lengths[:active, None]
            blocks = blocks.masked_fill(absent[:, ::block_size], 0)
        keys, values = _gather_rows(key_cache, blocks), _gather_rows(value_cache, blocks)
        if absent is not None:
            values.masked_fill_(absent[:, :, None, None], 0)
        for head in range(kv_heads):
            scores = torch.bmm(scaled[:active, head], keys[:, :, head].transpose(1, 2))
            if absent is not None:
                scores.masked_fill_(absent[:, None, :], -float("inf"))
            softmax[head].add(scores, values[:, :, head])
        at = end
    return torch.stack([one.result() for one in softmax], dim=1).view(rows, heads, size).to(q.dtype)


def _gather_rows(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Returns float32 [rows, positions, Hkv, D] of `blocks` [rows, blocks]."""
    return cache.index_select(0, blocks.flatten()).view(blocks.shape[0], -1, *cache.shape[2:]).float()
