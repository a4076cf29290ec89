"""The pool, the orders and the book of slots, each against a plain model."""
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.overlay.hybrid import (
    KEEP,
    ZERO,
    SequenceOrders,
    StatePool,
    StateSpec,
    StateStep,
    StepOrders,
    get_state_step,
    set_state_step,
)
from vllm.overlay.hybrid.slots import SlotTable

SPEC = StateSpec(num_layers=3, conv_shape=(5, 3), conv_dtype=torch.bfloat16, recurrent_shape=(2, 4, 6))


def numbered_pool(slots=6):
    """A pool whose slot s holds s + 1 everywhere."""
    pool = StatePool(SPEC, slots, torch.device("cpu"))
    for slot in range(slots):
        pool.conv[:, slot] = pool.recurrent[:, slot] = slot + 1
    return pool


def content(pool):
    for slot in range(pool.num_slots):
        values = {pool.conv[:, slot].float().unique().item(), pool.recurrent[:, slot].unique().item()}
        assert len(values) == 1, f"slot {slot} holds {values}"
    return [int(pool.recurrent[0, slot, 0, 0, 0]) - 0 for slot in range(pool.num_slots)]


def test_shapes_and_bytes():
    pool = StatePool(SPEC, 6, torch.device("cpu"))
    assert pool.conv.shape == (3, 6, 5, 3) and pool.conv.dtype == torch.bfloat16
    assert pool.recurrent.shape == (3, 6, 2, 4, 6) and pool.recurrent.dtype == torch.float32
    assert SPEC.slot_bytes == 3 * (5 * 3 * 2 + 2 * 4 * 6 * 4)
    assert pool.nbytes == 6 * SPEC.slot_bytes == pool.conv.numel() * 2 + pool.recurrent.numel() * 4
    assert content(pool) == [0] * 6
    for slots, spec in ((0, SPEC), (1, SPEC._replace(num_layers=0))):
        with pytest.raises(ValueError, match="a state pool of"):
            StatePool(spec, slots, torch.device("cpu"))


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(6)), st.lists(st.sampled_from([KEEP, ZERO, 0, 1, 2, 3, 4, 5]), min_size=1, max_size=6))
def test_init_orders(slots, inits):
    """All sources are read before anything is written, a slot that is zeroed or overwritten in the same step too."""
    pool = numbered_pool()
    expected = list(range(1, 7))
    for slot, init in zip(slots, inits):  # noqa: B905
        expected[slot] = {KEEP: slot + 1, ZERO: 0}.get(init, init + 1)
    pool.apply_init(slots[:len(inits)], inits)
    assert content(pool) == expected


@pytest.mark.parametrize("slots, inits", [([6], [KEEP]), ([0], [6]), ([-1], [ZERO]), ([0], [-3])])
def test_orders_beyond_the_pool(slots, inits):
    pool = numbered_pool()
    with pytest.raises(IndexError, match="in a pool of 6"):
        pool.apply_init(slots, inits)
    assert content(pool) == list(range(1, 7)), "nothing may be carried out of a step that cannot be"


def test_a_step():
    pool = numbered_pool()
    orders = StepOrders.collect([SequenceOrders(2, ZERO, ((64, 4, 7), (70, 5, 8))), SequenceOrders(0)], [70, 1], 1)
    assert orders == StepOrders([2, 0], [ZERO, KEEP], [0, 0], [(0, 64, 4, 7), (0, 70, 5, 8)], [70, 1], 1, [])
    step = StateStep.begin(pool, orders)
    assert content(pool) == [1, 2, 0, 4, 5, 6]
    assert step.live_slots.tolist() == [2, 0] and step.query_start_loc == [0, 70, 71]
    assert (step.num_prefills, step.captures, step.pool) == (1, ((0, 64, 4), (0, 70, 5)), pool)
    with pytest.raises(RuntimeError), set_state_step(step):
        assert get_state_step() is step
        raise RuntimeError
    assert get_state_step() is None
    with pytest.raises(IndexError, match="capture to state slot 6"):
        StateStep.begin(pool, orders._replace(captures=[(0, 1, 6, 1)]))


@pytest.mark.parametrize("orders, lengths, message", [
    ([SequenceOrders(0)], [1, 1], "1 rows in a step of 2"),
    ([SequenceOrders(0), SequenceOrders(0)], [1, 1], "the same slot"),
    ([SequenceOrders(0, KEEP, ((1, 1, 7), )), SequenceOrders(1)], [1, 1], "the same slot"),
    ([SequenceOrders(0, KEEP, ((1, 2, 7), (2, 2, 8)))], [3], "the same slot"),
    ([SequenceOrders(0, KEEP, ((4, 2, 7), ))], [3], "after 4 tokens of row 0, whose piece has 3"),
    ([SequenceOrders(0, KEEP, ((0, 2, 7), ))], [3], "after 0 tokens"),
    ([SequenceOrders(0, 1), SequenceOrders(1)], [1, 1], r"slots \[1\] are of running rows"),
])
def test_orders_that_contradict_each_other(orders, lengths, message):
    with pytest.raises(ValueError, match=message):
        StepOrders.collect(orders, lengths, len(orders))


@pytest.mark.parametrize("moves, message", [
    ([(3, 0, 7)], "the same slot"),
    ([(3, 2, 7)], "the same slot"),
    ([(3, 5, 7), (4, 5, 8)], "the same slot"),
    ([(0, 5, 7)], r"slots \[0\] are of running rows"),
])
def test_moves_that_contradict_the_step(moves, message):
    with pytest.raises(ValueError, match=message):
        StepOrders.collect([SequenceOrders(0, KEEP, ((1, 2, 9), ))], [1], 1, moves)


def test_orders_travel_between_processes():
    import pickle
    orders = StepOrders.collect([SequenceOrders(2, 4, ((1, 3, 9), ), 8)], [1], 0, ((3, 5, 6), ))
    assert pickle.loads(pickle.dumps(orders)) == orders


@pytest.mark.parametrize("seed", range(5))
def test_slots_against_a_plain_model(seed):
    chance = random.Random(seed)
    table, owned = SlotTable(8), {}
    for sequence in range(2000):
        if chance.random() < 0.5:
            if len(owned) == 8:
                with pytest.raises(RuntimeError, match="no state slot is free"):
                    table.allocate(sequence)
            else:
                init = chance.choice([ZERO, 3])
                owned[sequence] = [table.allocate(sequence, init), init]
                with pytest.raises(RuntimeError, match="already owns"):
                    table.allocate(sequence)
        elif owned and chance.random() < 0.5:
            leaving = chance.choice(sorted(owned))
            table.free(leaving)
            table.free(leaving)
            del owned[leaving]
            with pytest.raises(KeyError):
                table.orders(leaving)
        elif owned:
            running = chance.choice(sorted(owned))
            slot, init = owned[running]
            assert table.orders(running) == SequenceOrders(slot, init)
            owned[running][1] = KEEP
        slots = [slot for slot, _ in owned.values()]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(8)) and table.num_free == 8 - len(slots)
