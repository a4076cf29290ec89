"""Random requests, aborts, preemptions, failed steps, lost checkpoints and resets on small pools: whatever happens, no
slot or block is lost or has two owners, and nothing is restored, read or written that is not what it should be.

`fake_engine.py` objects in every step; `check` looks at the books between steps.
"""
import random
from dataclasses import replace

import pytest

from tests.core.fake_engine import FakeEngine
from vllm.overlay.hybrid.slots import SlotTable
from vllm.overlay.prefix_cache.allocator import ComputedBlockAllocator
from vllm.overlay.prefix_cache.checkpoints import CheckpointStore

# Prompts are made of these pieces, so that they share beginnings, and part within blocks.
PIECES = [random.Random(n).choices(range(2, 900), k=length)
          for n, length in enumerate((5, 16, 30, 64, 90, 150, 200, 333))]


def make_prompt(chance):
    """Token ids, and ends of some of the pieces that they are made of."""
    tokens, ends = [], []
    for _ in range(chance.randrange(1, 5)):
        tokens += chance.choice(PIECES)
        if chance.random() < 0.5:
            ends.append(len(tokens))
    return tokens, ends


def make_engine(chance):
    engine = FakeEngine(device=chance.choice([1, 2, 5, 12, 60]), host=chance.choice([0, 1, 3, 20]),
                        blocks=chance.choice([75, 90, 150, 1000]), seqs=chance.choice([1, 3, 6]),
                        tokens=chance.choice([7, 40, 64, 128, 300, 2048]), length=1150)
    # So that checkpoints of such short prompts are worth moving to the host.
    engine.store.policy = engine.scheduler.prefixes.policy = replace(engine.store.policy, demoted_above=20)
    return engine


def do_something(engine, chance, histories):
    """One operation and, mostly, one step."""
    scheduler = engine.scheduler
    what = chance.random()
    if what < 0.35 and len(engine.groups) < 12:
        tokens, ends = make_prompt(chance)
        if histories and chance.random() < 0.4:
            # The next turn of a conversation; or the same again; or a turn before.
            history = chance.choice(histories)
            tokens = (history[:chance.choice([len(history), chance.randrange(1, len(history) + 1)])]
                      + chance.choice(PIECES))[:1000]
            ends = []
        answer = chance.choice([1, 2, 17, 40, 200])
        params = {"prompt_logprobs": 0} if chance.random() < 0.1 else {}
        engine.add(tokens[:1150 - answer], answer, boundaries=ends, **params)
    elif what < 0.40 and engine.groups:
        engine.abort(chance.choice(sorted(engine.groups)))
    elif what < 0.45 and scheduler.running:
        scheduler.recompute(chance.sample(list(scheduler.running), chance.randrange(1, len(scheduler.running) + 1)))
    elif what < 0.47 and scheduler.running:
        group = chance.choice(list(scheduler.running))
        scheduler.distrust(group)
        engine.abort(group.request_id)
    elif what < 0.48:
        scheduler.reset_prefix_cache()
    elif what < 0.50 and engine.worker.tags:
        engine.lose(chance.choice(sorted(engine.worker.tags)))
    before = set(engine.groups.values())
    poison = chance.choice(list(scheduler.running)) if scheduler.running and chance.random() < 0.02 else None
    engine.step(chance.choice(["early", "late"]) if chance.random() < 0.03 else "", poison)
    for group in before - set(engine.groups.values()):
        histories.append(list(group.seqs[0].get_token_ids()))
        del histories[:-8]


def play(chance, operations):
    engine, histories = make_engine(chance), []
    for _ in range(operations):
        do_something(engine, chance, histories)
        engine.check()
    engine.drain(5000)
    engine.check()
    return engine


@pytest.mark.parametrize("seed", range(40))
def test_random_operations(seed):
    """10,000 in all."""
    chance = random.Random(seed)
    engine = play(chance, 250)
    print(engine.stats)
    assert engine.stats.queries and (engine.stats.taken or engine.store.num_slots < 3)


def _keep_without_kv(monkeypatch):
    monkeypatch.setattr(CheckpointStore, "drop_kv", lambda self, content: None)


def _believe_in_failed_steps(monkeypatch):
    monkeypatch.setattr(CheckpointStore, "rollback", lambda self: self.commit(lambda content: True))


def _share_what_is_known(monkeypatch):
    allocate = ComputedBlockAllocator.allocate_prefix

    def shared(self, ids, chain, shared):
        return allocate(self, ids, chain, next((index for index, one in enumerate(chain) if not self.has(one)),
                                               (len(ids) - 1) // self._block_size))

    monkeypatch.setattr(ComputedBlockAllocator, "allocate_prefix", shared)


def _drop_restores(monkeypatch):
    allocate = SlotTable.allocate
    monkeypatch.setattr(SlotTable, "allocate", lambda self, seq_id, init=0, tag=0: allocate(self, seq_id))


def _capture_one_token_late(monkeypatch):
    orders = SlotTable.orders
    monkeypatch.setattr(SlotTable, "orders", lambda self, seq_id, captures=(): orders(
        self, seq_id, tuple((max(1, offset - 1), slot, tag) for offset, slot, tag in captures)))


@pytest.mark.parametrize("breaks", [_keep_without_kv, _believe_in_failed_steps, _share_what_is_known, _drop_restores,
                                    _capture_one_token_late])
def test_what_is_broken_is_noticed(breaks, monkeypatch):
    breaks(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(20):
            play(random.Random(seed), 250)
