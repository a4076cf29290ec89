"""Paged attention against the query loop: prompts, pieces and decode rows, with poison wherever nothing may be read."""
import random
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from tests.overlay.kernels.helpers import (
    DTYPES,
    NAN,
    ROUNDING,
    assert_close,
    no_host_sync,
    recorded,
    relative_error,
    runnable,
    starts_of,
)
from vllm.overlay.kernels import paged_attention as op
from vllm.overlay.kernels.paged_attention import torch_impl

BACKENDS = runnable(op.backends)


class Cache:
    """Sequences in a cache of scattered blocks. Unused positions hold NaN, unused table entries garbage."""

    def __init__(self, seed, seq_lens, kv_heads, size, block_size, dtype=torch.float32):
        gen = torch.Generator().manual_seed(seed)
        needed = [-(-length // block_size) for length in seq_lens]
        order = torch.randperm(sum(needed) + 2, generator=gen).tolist()
        self.keys = torch.full((len(order), block_size, kv_heads, size), NAN, dtype=dtype)
        self.values = self.keys.clone()
        self.tables = torch.full((len(seq_lens), max(needed, default=0) + 2), 10**9)
        self.block_size = block_size
        for row, length in enumerate(seq_lens):
            for block in range(needed[row]):
                self.tables[row, block] = order.pop()
            keys, values = (torch.randn(length, kv_heads, size, generator=gen).to(dtype) for _ in range(2))
            if length:
                op.backends.load("reference").write_kv(keys, values, self.keys, self.values, self.slots(row, length))

    def slots(self, row, length):
        positions = torch.arange(length)
        blocks = self.tables[row, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size


def run(q, cache, starts, seq_lens, backend="torch", scale=None):
    scale = q.shape[2]**-0.5 if scale is None else scale
    return op.backends.load(backend).paged_attention(q, cache.keys, cache.values, cache.tables, starts, seq_lens, scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(24))
def test_random_steps_equal_the_reference(seed, backend, monkeypatch):
    rng = random.Random(seed)
    kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 5])
    size, block_size, dtype = rng.choice([1, 8, 33, 256]), rng.choice([1, 3, 16]), DTYPES[seed % 3]
    lengths = [rng.choice([0, 1, 1, 2, 3, 17]) for _ in range(rng.randint(1, 6))]
    seq_lens = [length + rng.choice([0, 1, 15, 16, 40]) for length in lengths]
    if seed % 2:
        # Several tiles even at these lengths, one query at a time.
        monkeypatch.setattr(torch_impl, "_TILE", 8)
        monkeypatch.setattr(torch_impl, "_SCORES_CPU", 64)
        monkeypatch.setattr(torch_impl, "_DECODE_ELEMENTS_CPU", 3 * block_size * kv_heads * size)
    cache, starts = Cache(seed, seq_lens, kv_heads, size, block_size, dtype), starts_of(lengths)
    gen = torch.Generator().manual_seed(seed)
    q = torch.randn(starts[-1], kv_heads * group, size, generator=gen).to(dtype)
    what = f"lengths {lengths} of {seq_lens}, heads {kv_heads}x{group}, size {size}, blocks of {block_size}, {dtype}"
    want = run(q, cache, starts, seq_lens, "reference")
    assert_close(run(q, cache, starts, seq_lens, backend), want, ROUNDING[dtype], what)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype, kv_heads, group, size", [
    (torch.float32, 1, 4, 33), (torch.bfloat16, 2, 3, 24), (torch.float16, 3, 7, 8), (torch.float32, 1, 1, 256)])
def test_contexts_of_several_tiles(backend, dtype, kv_heads, group, size):
    """Decode rows over more than one tile, with a length of exactly one and one more, and threads that share a row."""
    seq_lens = [2000, 512, 1, 513, 1300]
    cache = Cache(7, seq_lens, kv_heads, size, 7, dtype)
    gen = torch.Generator().manual_seed(7)
    q = (3 * torch.randn(5, kv_heads * group, size, generator=gen)).to(dtype)
    starts = starts_of([1] * 5)
    want = run(q, cache, starts, seq_lens, "reference")
    assert_close(run(q, cache, starts, seq_lens, backend), want, ROUNDING[dtype], "together")
    alone = op.backends.load(backend).paged_attention(q[:1], cache.keys, cache.values, cache.tables[:1], [0, 1],
                                                      seq_lens[:1], size**-0.5)
    assert_close(alone, want[:1], ROUNDING[dtype], "alone")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype, kv_heads, group, size", [
    (torch.float32, 1, 4, 33), (torch.bfloat16, 2, 3, 24), (torch.float16, 1, 1, 256)])
def test_pieces_over_several_tiles(backend, dtype, kv_heads, group, size):
    """Pieces that begin and end within and at the borders of tiles, and span several blocks of queries."""
    lengths, seq_lens = [150, 64, 2, 30], [150, 128, 130, 600]
    cache, starts = Cache(12, seq_lens, kv_heads, size, 7, dtype), starts_of(lengths)
    q = torch.randn(starts[-1], kv_heads * group, size, generator=torch.Generator().manual_seed(12)).to(dtype)
    want = run(q, cache, starts, seq_lens, "reference")
    assert_close(run(q, cache, starts, seq_lens, backend), want, ROUNDING[dtype], f"{lengths} of {seq_lens}")


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_native_results_depend_neither_on_the_threads_nor_on_the_batch():
    """Bit for bit: the same request gets the same tokens."""
    lengths, seq_lens = [1, 1, 37, 1, 2, 1], [3000, 70, 900, 1025, 1500, 640]
    cache, starts = Cache(8, seq_lens, 2, 40, 16, torch.bfloat16), starts_of(lengths)
    q = torch.randn(starts[-1], 10, 40, generator=torch.Generator().manual_seed(8)).bfloat16()
    with threads(1):
        want = run(q, cache, starts, seq_lens, "native")
    for count in (2, 3, 5, 13):
        with threads(count):
            assert torch.equal(run(q, cache, starts, seq_lens, "native"), want), count
            for row, (start, end) in enumerate(pairwise(starts)):
                alone = op.backends.load("native").paged_attention(q[start:end], cache.keys, cache.values,
                                                                   cache.tables[row:row + 1].int(), [0, end - start],
                                                                   [seq_lens[row]], 40**-0.5)
                assert torch.equal(alone, want[start:end]), (count, row)


def test_native_pieces_are_the_whole_bit_for_bit():
    cache = Cache(11, [333], 2, 24, 16, torch.bfloat16)
    q = torch.randn(333, 14, 24, generator=torch.Generator().manual_seed(11)).bfloat16()
    whole, borders = run(q, cache, [0, 333], [333], "native"), [0, 2, 69, 192, 256, 333]
    pieces = [run(q[start:end], cache, [0, end - start], [end], "native") for start, end in pairwise(borders)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"] + ["reference"])
def test_what_is_not_finite_is_passed_on(backend):
    """A NaN in one row's key spoils that row's heads of that KV head, and nothing else; so does an infinite value."""
    seq_lens = [600, 600, 5]
    cache = Cache(9, seq_lens, 2, 16, 4)
    cache.keys.view(-1, 2, 16)[cache.slots(0, 600)[550], 0, 3] = NAN
    cache.values.view(-1, 2, 16)[cache.slots(1, 600)[599], 1, 7] = float("inf")
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(9))
    got = run(q, cache, [0, 1, 2, 3], seq_lens, backend)
    assert got[0, :2].isnan().all() and got[0, 2:].isfinite().all()
    assert got[1, :2].isfinite().all() and (got[1, 2:, 7] == float("inf")).all()
    assert got[1, 2:].isfinite().sum() == 30 and got[2].isfinite().all()


@pytest.mark.parametrize("block", [-1, 10**9])
def test_native_refuses_a_block_outside_the_cache(block):
    cache = Cache(10, [9], 1, 8, 4)
    cache.tables[0, 1] = block
    for queries in (1, 3):
        with pytest.raises(IndexError, match=f"block {block} in a cache of 5"):
            run(torch.zeros(queries, 2, 8), cache, [0, queries], [9], "native")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_prompt_gives_the_same_however_it_is_cut(seed, backend, monkeypatch):
    monkeypatch.setattr(torch_impl, "_TILE", 16)
    rng = random.Random(seed)
    total = 75
    cache = Cache(seed, [total], 2, 16, 4)
    q = torch.randn(total, 4, 16, generator=torch.Generator().manual_seed(seed))
    whole = run(q, cache, [0, total], [total], backend)
    at, pieces, cuts = 0, [], []
    while at < total:
        length = min(rng.choice([1, 2, 3, 16, 30]), total - at)
        pieces.append(run(q[at:at + length], cache, [0, length], [at + length], backend))
        at += length
        cuts.append(at)
    assert_close(torch.cat(pieces), whole, 1e-6, f"cut at {cuts}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_gives_the_same_alone_and_in_a_batch(backend):
    lengths, seq_lens = [9, 1, 1, 20, 1], [30, 50, 7, 20, 1]
    cache, starts = Cache(0, seq_lens, 2, 16, 4), starts_of(lengths)
    q = torch.randn(starts[-1], 6, 16, generator=torch.Generator().manual_seed(0))
    together = run(q, cache, starts, seq_lens, backend)
    for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        alone = op.backends.load(backend).paged_attention(q[start:end], cache.keys, cache.values,
                                                          cache.tables[row:row + 1], [0, end - start],
                                                          [seq_lens[row]], 16**-0.5)
        assert_close(together[start:end], alone, 1e-6, f"row {row}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_beyond_float16_are_fine(backend):
    """Queries and keys of size 300 at head size 256 give scores of 2e7 before scaling; float16 ends at 65504."""
    cache = Cache(1, [40], 1, 256, 16, torch.float16)
    cache.keys *= 100
    q = (100 * torch.randn(8, 2, 256, generator=torch.Generator().manual_seed(1))).half()
    want = run(q, cache, [0, 8], [40], "reference")
    assert_close(run(q, cache, [0, 8], [40], backend), want, ROUNDING[torch.float16], "large scores")
    assert_close(run(q[7:], cache, [0, 1], [40], backend), want[7:], ROUNDING[torch.float16], "one query")


@pytest.mark.parametrize("queries, bound", [(1, torch_impl._DECODE_ELEMENTS_CPU), (40, torch_impl._SCORES_CPU)])
def test_memory_does_not_grow_with_the_context(queries, bound):
    """Neither the scores of all queries against the whole context nor a copy of its keys exists at once."""
    context, heads, size = 30000, 16, 32
    keys = torch.zeros(context // 16 + 3, 16, 2, size)
    tables = torch.arange(keys.shape[0])[None]
    q = torch.zeros(queries, heads, size)
    with recorded() as recorder:
        torch_impl.paged_attention(q, keys, keys, tables, [0, queries], [context + queries], 1.0)
    untiled = max(context * 2 * size, queries * heads * context)
    assert recorder.largest <= bound < untiled, (recorder.largest, bound, untiled)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_does_not_wait_for_the_device(backend, monkeypatch):
    seq_lens = [50, 7, 1, 33]
    cache = Cache(2, seq_lens, 2, 16, 4)
    q = torch.randn(4, 4, 16)
    module = op.backends.load(backend)
    slots = cache.slots(0, 4)
    with no_host_sync(monkeypatch):
        module.write_kv(q[:, :2], q[:, 2:], cache.keys, cache.values, slots)
        module.paged_attention(q, cache.keys, cache.values, cache.tables, [0, 1, 2, 3, 4], seq_lens, 0.25)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored_as", DTYPES)
def test_write_stores_what_it_got_and_nothing_else(dtype, stored_as, backend):
    gen = torch.Generator().manual_seed(0)
    # v is a view whose rows are not contiguous, k one whose rows are apart.
    k, v = torch.randn(7, 2, 3, 13, generator=gen).to(dtype)[:, 1], torch.randn(7, 13, 3, generator=gen).to(dtype).mT
    caches = [torch.full((4, 3, 3, 13), NAN, dtype=stored_as) for _ in range(2)]
    slots = torch.tensor([11, 0, 5, 4, 7, 1, 9])
    op.backends.load(backend).write_kv(k, v, *caches, slots)
    for cache, stored in zip(caches, (k, v), strict=True):
        flat = cache.view(12, 3, 13)
        assert torch.equal(flat[slots], stored.to(stored_as))
        assert flat[[2, 3, 6, 8, 10]].isnan().all()


@pytest.mark.parametrize("slot", [-1, 12])
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_write_refuses_a_slot_outside_the_cache(slot, backend):
    cache = torch.zeros(4, 3, 1, 2)
    with pytest.raises(IndexError):
        op.backends.load(backend).write_kv(torch.ones(1, 1, 2), torch.ones(1, 1, 2), cache, cache.clone(),
                                           torch.tensor([slot]))
    assert not cache.any()


@pytest.mark.parametrize("fault", ["future seen", "scale missing", "heads swapped"])
def test_the_comparison_notices(fault):
    cache = Cache(3, [20], 2, 16, 4)
    q = torch.randn(20, 4, 16, generator=torch.Generator().manual_seed(3))
    want = run(q, cache, [0, 20], [20], "reference")
    if fault == "future seen":
        got = torch.cat([run(q[t:t + 1], cache, [0, 1], [min(t + 2, 20)]) for t in range(20)])
    elif fault == "scale missing":
        got = run(q, cache, [0, 20], [20], scale=1.0)
    else:
        got = run(q.flip(1), cache, [0, 20], [20])
    assert relative_error(got, want) > 0.01


@pytest.mark.parametrize("change, message", [
    ({"seq_lens": [3]}, "row 0 has 4 queries in a sequence of 3"),
    ({"seq_lens": [13]}, "row 0 has 13 positions and a table of 3 blocks of 4"),
    ({"query_start_loc": [0, 3]}, "paged_attention: 4 tokens"),
    ({"seq_lens": [4, 4]}, "paged_attention: 4 tokens"),
    ({"q": torch.zeros(4, 3, 8)}, "paged_attention: q"),
    ({"q": torch.zeros(4, 2, 6)}, "paged_attention: q"),
])
def test_what_does_not_fit_is_refused(change, message):
    cache = torch.zeros(5, 4, 2, 8)
    arguments = {"q": torch.zeros(4, 2, 8), "key_cache": cache, "value_cache": cache,
                 "block_tables": torch.zeros(1, 3, dtype=torch.int64), "query_start_loc": [0, 4], "seq_lens": [4],
                 "scale": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        op.paged_attention(**arguments)
    with pytest.raises(ValueError, match="write_kv: k"):
        op.write_kv(torch.zeros(4, 1, 8), torch.zeros(4, 1, 8), cache, cache, torch.arange(4))


def test_the_public_function_runs_the_default_back_end():
    cache = Cache(4, [9, 5], 1, 8, 4)
    q = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(4))
    got = op.paged_attention(q, cache.keys, cache.values, cache.tables.int(), [0, 2, 3], [9, 5], 0.3)
    assert_close(got, run(q, cache, [0, 2, 3], [9, 5], "reference", 0.3), 1e-6, "out")
