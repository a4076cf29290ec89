"""The attention back end as vLLM sees it: metadata, cache layout, forward with and without a cache, refusals."""
import pytest
import torch

from vllm.attention.backends.abstract import AttentionType
from vllm.overlay.attention.paged_backend import PagedTorchBackend, PagedTorchImpl, PagedTorchMetadata

BLOCK = 4


def metadata(lengths, seq_lens, tables, slots, num_prefills):
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return PagedTorchMetadata(num_prefills=num_prefills,
                              num_prefill_tokens=starts[num_prefills],
                              num_decode_tokens=starts[-1] - starts[num_prefills],
                              slot_mapping=torch.tensor(slots),
                              seq_lens=seq_lens,
                              block_tables=torch.tensor(tables, dtype=torch.int32),
                              query_starts=starts)


def whole(q, k, v, heads, kv_heads, size):
    """Causal attention over one sequence by torch, [T, heads * size]."""
    q, k, v = (x.view(-1, n, size).transpose(0, 1) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v,
                                                            is_causal=True).transpose(0, 1).reshape(-1, heads * size)


@pytest.mark.parametrize("heads, kv_heads, size", [(4, 4, 16), (8, 2, 20), (16, 2, 256), (3, 1, 7)])
def test_a_sequence_in_pieces_beside_others(heads, kv_heads, size):
    """13 tokens as 6 + 5 + 1 + 1 in scattered blocks, beside a second sequence."""
    torch.manual_seed(0)
    impl = PagedTorchImpl(heads, size, size**-0.5, kv_heads)
    cache = torch.full(PagedTorchBackend.get_kv_cache_shape(9, BLOCK, kv_heads, size), float("nan"))
    q, k, v = (torch.randn(13, n * size) for n in (heads, kv_heads, kv_heads))
    other = [torch.randn(13, n * size) for n in (heads, kv_heads, kv_heads)]
    tables = [[7, 2, 5, 0], [1, 8, 3, 6]]
    expected, expected_other = whole(q, k, v, heads, kv_heads, size), whole(*other, heads, kv_heads, size)
    at = 0
    for length in (6, 5, 1, 1):
        piece = slice(at, at + length)
        slots = [table[p // BLOCK] * BLOCK + p % BLOCK for table in tables for p in range(at, at + length)]
        at += length
        joined = [torch.cat([x[piece], y[piece]]) for x, y in zip((q, k, v), other, strict=True)]
        meta = metadata([length, length], [at, at], tables, slots, 2 if length > 1 else 0)
        out = impl.forward(*joined, cache, meta)
        for name, found, right in (("first", out[:length], expected[piece]), ("other", out[length:],
                                                                              expected_other[piece])):
            assert torch.allclose(found, right,
                                  atol=1e-5), f"{name} sequence, tokens up to {at}: {(found - right).abs().max()}"


def test_without_a_cache_every_row_sees_its_own_piece():
    """As while memory is profiled."""
    torch.manual_seed(1)
    impl = PagedTorchImpl(4, 16, 0.25, 2)
    q, k, v = (torch.randn(9, n * 16) for n in (4, 2, 2))
    meta = metadata([5, 4], [5, 4], [[], []], [-1] * 9, 2)
    out = impl.forward(q, k, v, torch.tensor([]), meta)
    for piece in (slice(0, 5), slice(5, 9)):
        expected = whole(q[piece], k[piece], v[piece], 4, 2, 16)
        assert torch.allclose(out[piece], expected, atol=1e-5), (out[piece] - expected).abs().max()


def test_prefill_and_decode_views():
    meta = metadata([3, 1], [3, 9], [[0], [1]], [0, 1, 2, 3], 1)
    assert meta.prefill_metadata is meta and meta.decode_metadata is meta and not meta.use_cuda_graph
    assert metadata([1], [4], [[0]], [3], 0).prefill_metadata is None
    assert metadata([4], [4], [[0]], [0, 1, 2, 3], 1).decode_metadata is None


def test_copies_and_swaps_of_blocks():
    shape = PagedTorchBackend.get_kv_cache_shape(4, BLOCK, 2, 3)
    caches = [torch.arange(4.0).view(1, 4, 1, 1, 1).expand(shape).clone() for _ in range(2)]
    PagedTorchBackend.copy_blocks(caches, torch.tensor([[0, 2], [1, 3]]))
    assert all(cache[:, :, 0, 0, 0].tolist() == [[0, 1, 0, 1]] * 2 for cache in caches)
    target = torch.zeros(shape)
    PagedTorchBackend.swap_blocks(caches[0], target, torch.tensor([[1, 0]]))
    PagedTorchBackend.swap_blocks(caches[0], target, torch.empty((0, 2), dtype=torch.int64))
    assert target[:, :, 0, 0, 0].tolist() == [[1, 0, 0, 0]] * 2


@pytest.mark.parametrize("fields, message", [({
    "alibi_slopes": [1.0]
}, "ALiBi"), ({
    "sliding_window": 8
}, "a sliding window"), ({
    "logits_soft_cap": 30.0
}, "a logits soft cap"), ({
    "blocksparse_params": {}
}, "block sparsity"), ({
    "kv_cache_dtype": "fp8"
}, "KV cache dtype fp8")])
def test_what_it_cannot_do_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"does not support {message}; .*VLLM_ATTENTION_BACKEND"):
        PagedTorchImpl(2, 8, 1.0, 1, **fields)


def test_other_refusals():
    with pytest.raises(ValueError, match="3 query heads do not divide among 2 KV heads"):
        PagedTorchImpl(3, 8, 1.0, 2)
    with pytest.raises(NotImplementedError, match="for decoders, not for ENCODER; .*VLLM_ATTENTION_BACKEND"):
        PagedTorchImpl(2, 8, 1.0, 1).forward(*[torch.empty(0)] * 4, None, attn_type=AttentionType.ENCODER)


def test_it_is_not_captured_in_a_graph():
    """On a card, without --enforce-eager: a graph would keep the row lengths of the step in which it was captured."""
    state = PagedTorchBackend.get_state_cls()(runner=None)
    with pytest.raises(ValueError, match="give --enforce-eager"):
        with state.graph_capture(8):
            pass
