"""The heap evictor gives up the same blocks as stock's scan, in the time of a heap."""
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.core.evictor_v2 import EvictionPolicy, LRUEvictor, make_evictor


def ours():
    return make_evictor(EvictionPolicy.LRU)


@pytest.mark.parametrize("seed", range(200))
def test_same_order_as_stock(seed):
    """Bursts of frees with rising time stamps, as the block manager makes them; lengths within a burst differ."""
    chance = random.Random(seed)
    heap, stock = ours(), LRUEvictor()
    present, next_block = [], 0
    for stamp in range(20):
        for length in chance.sample(range(1, 60), chance.randrange(1, 8)):
            for evictor in (heap, stock):
                evictor.add(next_block, 1000 + next_block, 16 * length, float(stamp))
            present.append(next_block)
            next_block += 1
        for _ in range(chance.randrange(0, 4)):
            if present and chance.random() < 0.3:
                taken = present.pop(chance.randrange(len(present)))
                heap.remove(taken)
                stock.remove(taken)
            elif present:
                expected = stock.evict()
                assert heap.evict() == expected
                present.remove(expected[0])
        assert heap.num_blocks == stock.num_blocks == len(present)


def test_16k_blocks_of_one_time_stamp():
    """Stock takes about 12 s; the bound is generous for a busy machine."""
    heap = ours()
    for block in range(16_384):
        heap.add(block, block, 16 * (block + 1), 1.0)
    start = time.perf_counter()
    order = [heap.evict()[0] for _ in range(16_384)]
    seconds = time.perf_counter() - start
    assert order == list(range(16_383, -1, -1))
    assert seconds < 1, f"{seconds:.2f} s"


def test_an_update_moves_a_block_back():
    heap = ours()
    for block in range(3):
        heap.add(block, 10 + block, 16, float(block))
    heap.update(0, 5.0)
    assert [heap.evict() for _ in range(3)] == [(1, 11), (2, 12), (0, 10)]
    with pytest.raises(ValueError, match="no unused block"):
        heap.evict()
    with pytest.raises(ValueError, match="not in the evictor"):
        heap.remove(0)
    with pytest.raises(KeyError):
        heap.update(0, 6.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "evict", "remove", "update"]), st.integers(0, 30), st.integers(0, 5)),
             max_size=200))
def test_against_a_plain_list(operations):
    heap, model = ours(), {}
    for arrival, (kind, block, stamp) in enumerate(operations):
        if kind == "add" and block not in model:
            heap.add(block, -block, block % 3, float(stamp))
            model[block] = (stamp, -(block % 3), arrival)
        elif kind == "remove" and block in model:
            heap.remove(block)
            del model[block]
        elif kind == "update" and block in model:
            heap.update(block, float(stamp))
            model[block] = (stamp, *model[block][1:])
        elif kind == "evict" and model:
            expected = min(model, key=lambda one: model[one])
            assert heap.evict() == (expected, -expected)
            del model[expected]
        assert heap.num_blocks == len(model) and all(one in heap for one in model)
        assert len(heap._heap) <= 2 * len(model) + 65
