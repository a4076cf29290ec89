"""The pool, the orders of a step and the book of slots, each against a plain model."""
import pickle
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.overlay.hybrid import (
    KEEP,
    ZERO,
    CheckpointError,
    SequenceOrders,
    StatePool,
    StateSpec,
    StateStep,
    StepOrders,
    get_state_step,
    host_states,
    set_state_step,
)
from vllm.overlay.hybrid.slots import SlotTable

SPEC = StateSpec(num_layers=3, conv_shape=(5, 3), conv_dtype=torch.bfloat16, recurrent_shape=(2, 4, 6))
CPU = torch.device("cpu")


def fill(pool, slot, value):
    for tensor in pool._state(slot):
        tensor[:] = value


def pool_of(live=3, device=3, host=2):
    """A pool whose slot s holds s + 1 everywhere, and whose checkpoints have the tag 100 + s."""
    pool = StatePool(SPEC, live, CPU, device, host)
    for slot in range(live + device + host):
        fill(pool, slot, slot + 1)
        if slot >= live:
            pool.captured(slot, 100 + slot)
    return pool


def content(pool):
    found = []
    for slot in range(pool.num_slots + pool.host.num_slots):
        conv, recurrent = pool._state(slot)
        values = {conv.float().nan_to_num(-1).unique().item(), recurrent.nan_to_num(-1).unique().item()}
        assert len(values) == 1, f"slot {slot} holds {values}"
        found.append(int(values.pop()))
    return found


def orders_of(rows, moves=(), lengths=None):
    return StepOrders.collect(rows, lengths or [8] * len(rows), len(rows), moves)


def forward(step, values):
    """Stands for the model: (row, offset) -> what is captured."""
    for row, offset, slot in step.captures:
        fill(step.pool, slot, values[row, offset])
    step.end()


def test_shapes_and_bytes():
    pool = StatePool(SPEC, 4, CPU, 2, 3)
    assert pool.conv.shape == (3, 6, 5, 3) and pool.conv.dtype == torch.bfloat16
    assert pool.recurrent.shape == (3, 6, 2, 4, 6) and pool.recurrent.dtype == torch.float32
    assert SPEC.slot_bytes == 3 * (5 * 3 * 2 + 2 * 4 * 6 * 4)
    assert pool.nbytes == 6 * SPEC.slot_bytes == pool.conv.numel() * 2 + pool.recurrent.numel() * 4
    assert content(pool) == [0] * 9 and (pool.num_live, pool.num_slots, pool.host.num_slots) == (4, 6, 3)
    for counts, spec in (((0, CPU), SPEC), ((1, CPU, -1), SPEC), ((1, CPU), SPEC._replace(num_layers=0))):
        with pytest.raises(ValueError, match="a state pool of"):
            StatePool(spec, *counts)


def test_host_states_lie_apart():
    """Slots over several allocations, of a size that no alignment fits: each has its own bytes."""
    spec = SPEC._replace(conv_dtype=torch.float32, conv_shape=(3, 3))
    host = host_states.HostStates(spec, 37, pin=False)
    for slot in range(37):
        conv, recurrent = host[slot]
        assert conv.shape == (3, 3, 3) and recurrent.shape == (3, 2, 4, 6) and not conv.any() and not recurrent.any()
        conv[:], recurrent[:] = slot + 1, -slot - 1
    for slot in range(37):
        conv, recurrent = host[slot]
        assert (conv == slot + 1).all() and (recurrent == -slot - 1).all(), slot


@pytest.mark.parametrize("count, row", [(1, 100), (530, 16 << 20), (529, 16_056_384), (3, 3 << 30), (7, 1 << 30)])
def test_pinned_memory_is_taken_in_powers_of_two(count, row):
    """PyTorch rounds each allocation up: together they lose less than a tenth, or a row."""
    pieces = list(host_states._pieces(count, row))
    taken = sum(1 << (rows * row - 1).bit_length() for rows in pieces)
    assert sum(pieces) == count and min(pieces) > 0
    assert taken <= 1.1 * count * row or len(pieces) == count, (pieces, taken / (count * row))
    assert max(pieces) * row <= max(host_states._PIECE, row)


def test_memory_that_cannot_be_pinned(monkeypatch):
    empty, said = torch.empty, []

    def refuse(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(host_states.logger, "warning", lambda line, *args: said.append(line % args))
    host = host_states.HostStates(SPEC, 3, pin=True)
    assert not host.pinned and len(said) == 1 and "no memory can be pinned (CUDA error: out of memory)" in said[0]
    assert host[2][0].shape == (3, 5, 3)


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(3)), st.lists(st.sampled_from([KEEP, ZERO, 3, 4, 5, 6, 7]), min_size=1, max_size=3))
def test_init_orders(slots, inits):
    """Zeroed, kept, or copied from any checkpoint, on the device or the host."""
    pool = pool_of()
    expected = list(range(1, 9))
    for slot, init in zip(slots, inits):  # noqa: B905
        expected[slot] = {KEEP: slot + 1, ZERO: 0}.get(init, init + 1)
    pool.apply_init(slots[:len(inits)], inits)
    assert content(pool) == expected


@pytest.mark.parametrize("row, moves", [
    (SequenceOrders(3), ()), (SequenceOrders(-1, ZERO), ()), (SequenceOrders(0, 8), ()), (SequenceOrders(0, 1), ()),
    (SequenceOrders(0, -3), ()), (SequenceOrders(0, KEEP, ((1, 1, 9), )), ()),
    (SequenceOrders(0, KEEP, ((1, 6, 9), )), ()),
    (SequenceOrders(0), ((2, 6, 102), )), (SequenceOrders(0), ((6, 7, 106), )), (SequenceOrders(0), ((3, 4, 103), )),
    (SequenceOrders(0), ((3, 8, 103), )),
])
def test_orders_beyond_the_pool(row, moves):
    """Live slots, checkpoints on the device and on the host are each for their own use."""
    pool = pool_of()
    with pytest.raises(IndexError, match="slot -?[0-9] in a pool of 3 live slots, 3 for checkpoints on the dev"):
        StateStep.begin(pool, orders_of([SequenceOrders(2, ZERO), row], moves))
    assert content(pool) == list(range(1, 9)), "nothing may be carried out of a step that cannot be"


def test_a_step():
    pool = pool_of()
    orders = StepOrders.collect([SequenceOrders(2, ZERO, ((64, 4, 7), (70, 5, 8))), SequenceOrders(0)], [70, 1], 1)
    assert orders == StepOrders([2, 0], [ZERO, KEEP], [0, 0], [(0, 64, 4, 7), (0, 70, 5, 8)], [70, 1], 1, [])
    step = StateStep.begin(pool, orders)
    assert content(pool) == [1, 2, 0, 4, 5, 6, 7, 8]
    assert step.live_slots.tolist() == [2, 0] and step.query_start_loc == [0, 70, 71]
    assert (step.num_prefills, step.captures, step.pool) == (1, ((0, 64, 4), (0, 70, 5)), pool)
    with pytest.raises(RuntimeError), set_state_step(step):
        assert get_state_step() is step
        raise RuntimeError
    assert get_state_step() is None


def test_one_slot_is_restored_moved_and_captured_in_one_step():
    """Also where the host's slot that the move fills is restored from. All sources first."""
    pool = pool_of()
    rows = [SequenceOrders(0, 4, ((8, 4, 50), ), 104), SequenceOrders(1, 7, (), 107)]
    step = StateStep.begin(pool, orders_of(rows, [(4, 7, 104)]))
    assert content(pool) == [5, 8, 3, 4, 5, 6, 7, 5]
    assert pool.fault(4, 104) and pool.fault(4, 50) and pool.fault(7, 107), "neither the old nor yet the new"
    assert pool.fault(7, 104) is None, "what was moved is there, whatever becomes of the step"
    forward(step, {(0, 8): 90})
    assert content(pool) == [5, 8, 3, 4, 90, 6, 7, 5] and pool.fault(4, 50) is None
    assert pool.fault(4, 104) == "state slot 4 holds checkpoint 50"


def test_a_failed_forward_pass_leaves_no_checkpoint():
    pool = pool_of()
    StateStep.begin(pool, orders_of([SequenceOrders(0, ZERO, ((8, 5, 60), ))]))
    assert pool.fault(5, 60) == "state slot 5 holds nothing" and pool.fault(5, 105) == "state slot 5 holds nothing"
    assert pool.fault(4, 104) is None


@pytest.mark.parametrize("rows, moves, tags", [
    ([SequenceOrders(0, 4, (), 99)], [], [99]),
    ([SequenceOrders(0, 7, (), 106)], [], [106]),
    ([SequenceOrders(0, ZERO)], [(5, 7, 104)], [104]),
    ([SequenceOrders(0, 4, (), 104), SequenceOrders(1, 3, (), 1)], [(5, 6, 2)], [1, 2]),
])
def test_a_checkpoint_that_is_another(rows, moves, tags):
    pool = pool_of()
    with pytest.raises(CheckpointError, match="a checkpoint is not where it should be: checkpoint [0-9]+: ") as caught:
        StateStep.begin(pool, orders_of(rows, moves))
    assert caught.value.tags == tags and content(pool) == list(range(1, 9)), "nothing may be written"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.tags == tags and str(copy) == str(caught.value)


def test_the_ranks_agree():
    """Asked only by a step that restores or moves; what another rank lacks is missing here, too."""
    pool, asked = pool_of(), []

    def agree(here):
        asked.append(list(here))
        return [True, False]

    StateStep.begin(pool, orders_of([SequenceOrders(0, KEEP, ((1, 3, 9), )), SequenceOrders(1)]), agree)
    assert not asked
    with pytest.raises(CheckpointError, match="checkpoint 105: another rank does not hold it$") as caught:
        StateStep.begin(pool, orders_of([SequenceOrders(0, 4, (), 104)], [(5, 6, 105)]), agree)
    assert asked == [[True, True]] and caught.value.tags == [105] and content(pool) == list(range(1, 9))


def test_checksums(monkeypatch):
    """One changed bit is found, on the device and on the host, after a move, in either tensor; without checksums it is
    not looked for."""
    for on in ("1", "0"):
        monkeypatch.setenv("VLLM_OVERLAY_CHECKPOINT_CHECKSUMS", on)
        for slot in (4, 6):
            for part in (0, 1):
                pool = pool_of()
                StateStep.begin(pool, orders_of([SequenceOrders(0, ZERO)], [(4, 6, 104)]))
                orders = orders_of([SequenceOrders(0, slot, (), 104)])
                StateStep.begin(pool, orders)
                memory = pool._state(slot)[part]
                memory[1].view(-1).view(torch.uint8)[3] ^= 1
                if on == "0":
                    StateStep.begin(pool, orders)
                    continue
                with pytest.raises(CheckpointError, match=f"checkpoint 104: the checksum of state slot {slot} differs"):
                    StateStep.begin(pool, orders)


@pytest.mark.parametrize("slot", [4, 7])
def test_what_a_slot_held_does_not_shine_through(slot):
    """Live slots and targets of moves full of NaN: zeroed and restored states have none of it, and the restored one is
    the source, bit for bit, from the device and from the host alike."""
    pool = pool_of()
    generator = torch.Generator().manual_seed(1)
    saved = [torch.randn(tensor.shape, generator=generator).to(tensor.dtype) for tensor in pool._state(4)]
    for tensor, value in zip(pool._state(4), saved, strict=True):
        tensor.copy_(value)
    for poisoned in (0, 1, 7):
        fill(pool, poisoned, float("nan"))
    StateStep.begin(pool, orders_of([SequenceOrders(2, ZERO)], [(4, 7, 104)]))
    StateStep.begin(pool, orders_of([SequenceOrders(0, slot, (), 104), SequenceOrders(1, ZERO)]))
    for found, zero, value in zip(pool._state(0), pool._state(1), saved, strict=True):
        assert torch.equal(found, value) and not zero.any()


@pytest.mark.parametrize("orders, lengths, moves, message", [
    ([SequenceOrders(0)], [1, 1], (), "1 rows in a step of 2"),
    ([SequenceOrders(0), SequenceOrders(0)], [1, 1], (), "the same slot"),
    ([SequenceOrders(0, KEEP, ((1, 1, 7), )), SequenceOrders(1)], [1, 1], (), "the same slot"),
    ([SequenceOrders(0, KEEP, ((1, 2, 7), (2, 2, 8)))], [3], (), "the same slot"),
    ([SequenceOrders(0, KEEP, ((4, 2, 7), ))], [3], (), "after 4 tokens of row 0, whose piece has 3"),
    ([SequenceOrders(0, KEEP, ((0, 2, 7), ))], [3], (), "after 0 tokens"),
    ([SequenceOrders(0)], [1], ((3, 5, 7), (4, 5, 8)), "the same slot"),
])
def test_orders_that_contradict_each_other(orders, lengths, moves, message):
    with pytest.raises(ValueError, match=message):
        orders_of(orders, moves, lengths)


def test_orders_travel_between_processes():
    orders = StepOrders.collect([SequenceOrders(2, 4, ((1, 3, 9), ), 8)], [1], 0, ((3, 5, 6), ))
    assert pickle.loads(pickle.dumps(orders)) == orders


class Scheduler:
    """What a scheduler may believe after any orders that it gave: (tag, value) of each checkpoint slot."""

    def __init__(self, chance):
        self.chance, self.tag, self.held = chance, 0, {}

    def step(self):
        """Random orders, and the values that they leave in live slots 0 and 1: (rows, moves, captures)."""
        chance, known = self.chance, sorted(self.held)
        moves, targets, here = [], [6, 7], [slot for slot in known if slot < 6]
        for source in chance.sample(here, chance.randint(0, len(here))):
            if targets and chance.random() < 0.5:
                moves.append((source, targets.pop(chance.randrange(len(targets))), self.held[source][0]))
        rows, captures, free = [], [], chance.sample([3, 4, 5], 3)
        for live in (0, 1):
            init = chance.choice([KEEP, ZERO, *known])
            taken = []
            for offset in range(1, chance.choice([1, 2, 3])):
                if free:
                    self.tag += 1
                    taken.append((offset, free.pop(), self.tag))
            captures += [(live, *one) for one in taken]
            rows.append(SequenceOrders(live, init, tuple(taken), self.held[init][0] if init >= 0 else 0))
        return rows, moves, captures


@pytest.mark.parametrize("seed", range(3))
def test_random_steps_against_a_plain_model(seed, monkeypatch):
    """Restores, moves, captures and failures in any order: what a scheduler believes is there is there, what it does
    not is refused, and nothing else changes."""
    monkeypatch.setenv("VLLM_OVERLAY_CHECKPOINT_CHECKSUMS", "1")
    chance = random.Random(seed)
    pool, scheduler, live = StatePool(SPEC, 3, CPU, 3, 2), Scheduler(chance), [0, 0, 0]
    done = Counter()
    for number in range(1, 1500):
        rows, moves, captures = scheduler.step()
        orders = orders_of(rows, moves)
        if chance.random() < 0.1:
            wrong = [row for row, order in enumerate(rows) if order.init >= 0]
            if wrong:
                tags = list(orders.init_tags)
                tags[wrong[0]] += 1
                with pytest.raises(CheckpointError):
                    StateStep.begin(pool, orders._replace(init_tags=tags))
                done["refused"] += 1
        step = StateStep.begin(pool, orders)
        before = dict(scheduler.held)
        for row in rows:
            live[row.live_slot] = {KEEP: live[row.live_slot], ZERO: 0}.get(row.init, before.get(row.init, (0, 0))[1])
        for source, target, tag in moves:
            scheduler.held[target] = (tag, before[source][1])
        for _, _, slot, _ in captures:
            scheduler.held.pop(slot, None)
        if chance.random() < 0.9:
            values = {(row, offset): (number + offset) % 200 for row, offset, _, _ in captures}
            forward(step, values)
            scheduler.held.update({slot: (tag, values[row, offset]) for row, offset, slot, tag in captures})
            done["captured"] += len(captures)
        done.update(moved=len(moves), restored=sum(row.init >= 0 for row in rows))
        found = content(pool)
        assert found[:3] == live, (number, found, live)
        for slot, (tag, value) in scheduler.held.items():
            assert pool.fault(slot, tag) is None and found[slot] == value, (number, slot, found, scheduler.held)
        assert {slot for slot in range(3, 8) if pool._held.get(slot)} == scheduler.held.keys()
    assert min(done[key] for key in ("refused", "captured", "moved", "restored")) > 100, done


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
