"""What the prefix cache of hybrid models must reach, by a scheduler without a model (fake_engine.py checks every
restore, capture, move and block)."""
import random
import time

import pytest

from tests.core.fake_engine import BLOCK, FakeEngine
from tests.core.groups import group as plain_group
from tests.core.test_scheduler import scheduler, step
from vllm.overlay.hybrid import ZERO
from vllm.overlay.pictures.prompt_pictures import read_pictures

LENGTHS = [round(20 * 250**(i / 34)) for i in range(35)]


def words(length, seed):
    return random.Random(seed).choices(range(2, 30_000), k=length)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_same_prompt_twice(length):
    engine = FakeEngine()
    prompt = words(length, length)
    assert engine.ask(prompt) == 0
    for _ in range(2):
        cached = engine.ask(prompt)
        lost = length - 1 - cached
        assert lost <= 17 if length > 80 else not cached or cached == 64, f"{cached} of {length} tokens"
    engine.check()


@pytest.mark.parametrize("prefix", [300, 640, 1000, 2500, 6000])
@pytest.mark.parametrize("suffix", [20, 100, 517, 1500, 4000])
def test_a_shared_prefix_and_a_unique_suffix(prefix, suffix):
    """With room, the second sighting loses at most 64 tokens; the third, none but those of its block."""
    engine = FakeEngine(device=400)
    shared = words(prefix, 1)
    found = [engine.ask(shared + words(suffix, 10 + n)) for n in range(3)]
    assert found[0] == 0 and found[1] >= prefix - 64 and found[2] == prefix // BLOCK * BLOCK, found
    engine.check()


@pytest.mark.parametrize("device", [5, 20, 60])
@pytest.mark.parametrize("prefix, suffix", [(300, 4000), (1000, 100), (6000, 4000)])
def test_without_room_the_third_sighting_hits(device, prefix, suffix):
    engine = FakeEngine(device=device)
    shared = words(prefix, 1)
    found = [engine.ask(shared + words(suffix, 10 + n)) for n in range(4)]
    assert found[2] >= prefix // BLOCK * BLOCK, found
    assert found[3] >= prefix // BLOCK * BLOCK, found
    engine.check()


def test_one_slot_is_enough_for_a_conversation():
    engine = FakeEngine(device=1)
    history, before = words(500, 0), 0
    for turn in range(1, 12):
        group = engine.add(history, 40)
        engine.drain()
        if turn > 1:
            assert group.num_cached_tokens >= before - 64, f"turn {turn}: {group.num_cached_tokens} of {before}"
        before = len(history)
        history = list(group.seqs[0].get_token_ids()) + words(random.Random(turn).randrange(20, 500), turn)
    engine.check()


@pytest.mark.parametrize("device", [8, 300])
def test_a_conversation_goes_on_from_the_end_of_its_answer(device):
    engine = FakeEngine(device=device)
    history, before = words(700, 0), 0
    for turn in range(8):
        group = engine.add(history, 100 + turn)
        engine.drain()
        if turn:
            assert before - 17 <= group.num_cached_tokens <= before, f"turn {turn}"
        before = len(group.seqs[0].get_token_ids())
        history = list(group.seqs[0].get_token_ids()) + words(30 + 50 * turn, turn)
    engine.check()


def test_a_template_that_rewrites_the_end_hits_at_the_last_boundary():
    """The answer comes back without its thought, and the generation prompt is gone: messages are what stays."""
    engine = FakeEngine(device=40)
    system, generation = words(900, 0), words(4, 1)
    messages, boundaries = list(system), [len(system)]
    for turn in range(6):
        messages += words(100 + 77 * turn, 10 + turn)
        boundaries.append(len(messages))
        cached = engine.ask(messages + generation, 50, boundaries=boundaries)
        if turn:
            assert cached >= boundaries[-3] - 15, f"turn {turn}: {cached} of {boundaries}"
        messages += words(20, 100 + turn)
        boundaries.append(len(messages))
    assert engine.ask(system + words(300, 99), boundaries=[len(system)]) >= len(system) - 15
    engine.check()


def test_a_b_and_a_again():
    engine = FakeEngine()
    a, b = words(1000, 1), words(1200, 2)
    assert [engine.ask(a), engine.ask(b), engine.ask(a + words(100, 3)), engine.ask(b), engine.ask(a)] == [
        0, 0, 992, 1184, 992]


@pytest.mark.parametrize("tokens", [256, 2048])
def test_four_at_once_with_one_prefix(tokens):
    """The first computes the prefix, the others wait for it: everything is computed once."""
    engine = FakeEngine(tokens=tokens)
    shared = words(1500, 1)
    groups = [engine.add(shared + words(40, 10 + n), 5) for n in range(4)]
    computed = engine.drain()
    assert [group.num_cached_tokens for group in groups] == [0] + 3 * [1488]
    assert computed == 1540 + 3 * (1540 - 1488) + 4 * 4
    engine.check()


@pytest.mark.parametrize("device", [4, 60])
def test_those_who_cannot_start_yet_say_where_they_part(device):
    """A budget that the first takes whole, a grid wider than 64: only who says so in time finds a checkpoint where the
    prefix ends."""
    engine = FakeEngine(device=device, tokens=512, seqs=4)
    shared = words(5000, 1)
    groups = [engine.add(shared + words(2000, 10 + n)) for n in range(3)]
    engine.drain()
    assert [group.num_cached_tokens for group in groups] == [0, 4992, 4992]
    engine.check()


def test_others_overtake_those_who_wait():
    """The first step's budget is that of the first prompt's first piece, and a little more."""
    engine = FakeEngine(tokens=3030)
    shared = words(3000, 1)
    for n in range(2):
        engine.add(shared + words(40, 10 + n), name=f"shared{n}")
    engine.add(words(50, 7), name="other")
    assert engine.step() == 3030
    assert [group.request_id for group in engine.scheduler.waiting] == ["shared1"]
    assert [group.request_id for group in engine.scheduler.running] == ["shared0", "other"]
    assert engine.drain() == 16 + 44 + 3040 - 2992
    engine.check()


def test_who_waits_goes_on_when_the_other_leaves():
    engine = FakeEngine(tokens=256)
    shared = words(3000, 1)
    first, second = (engine.add(shared + words(40, 10 + n), name=f"shared{n}") for n in range(2))
    for _ in range(3):
        engine.step()
    assert first in engine.scheduler.running and list(engine.scheduler.waiting) == [second]
    engine.abort("shared0")
    engine.step()
    assert second.num_cached_tokens == 3 * 256
    engine.drain()
    engine.check()


def test_a_branch_into_16():
    engine = FakeEngine(seqs=16)
    shared = words(2000, 1)
    engine.ask(shared + words(30, 5))
    groups = [engine.add(shared + words(100, 10 + n), 20) for n in range(16)]
    computed = engine.drain()
    assert [group.num_cached_tokens for group in groups] == 16 * [1984], "the grid point before"
    assert computed == 16 * (116 + 19)
    assert engine.ask(shared + words(100, 9)) == 2000
    engine.check()


def test_samples_of_one_prompt_compute_it_once():
    engine = FakeEngine(seqs=4)
    prompt = words(1000, 1)
    groups = [engine.add(prompt, 10) for _ in range(9)]
    computed = engine.drain()
    assert [group.num_cached_tokens for group in groups] == [0] + 8 * [992]
    assert computed == 1000 + 8 * 8 + 9 * 9


def test_a_hot_prefix_keeps_its_hits_under_a_small_budget():
    """50 long prompts that never come again, between requests with one prefix; eight slots and little KV."""
    engine = FakeEngine(device=8, host=0, blocks=700, length=6000)
    hot = words(1000, 1)
    missed = 0
    for n in range(50):
        cached = engine.ask(hot + words(50, 1000 + n), 3)
        missed += cached < 1000 - 64
        engine.ask(words(4000 + 13 * n, n + 5), 3)
        engine.check()
    assert missed <= 3, f"{missed} of 50 missed"
    assert engine.stats.device_slots == 8


def test_tenants_with_a_salt_share_with_nobody():
    """At once, too: nobody waits for the other's prefix, nor sees that it was there before."""
    engine, tokens = FakeEngine(device=200), words(1200, 0)
    for sight in range(2):
        for salt in (None, "one", "two"):
            cached = engine.ask(tokens, salt=salt)
            assert cached == 0 if sight == 0 else cached >= 1200 - 17, f"{salt}, sight {sight}: {cached}"
            engine.check()
    other = words(600, 1)
    groups = [engine.add(other, salt=salt) for salt in ("one", "two", None, "one")]
    engine.drain()
    counts = [group.num_cached_tokens for group in groups]
    assert counts[:3] == [0, 0, 0] and counts[3] >= 600 - 17, counts
    engine.check()


def test_two_tenants_with_equal_texts_and_other_pictures():
    from tests.helpers.pictures import SETTINGS, picture, pictured
    engine = FakeEngine()
    found = {}
    for tenant, seed in (("one", 0), ("other", 1), ("one", 0), ("other", 1)):
        prompt = pictured(100, picture(16, 20, seed=seed), 200)
        cached = engine.ask(prompt["prompt_token_ids"], pictures=read_pictures(prompt, SETTINGS))
        found.setdefault(tenant, []).append((cached, len(prompt["prompt_token_ids"])))
    (first, length), (again, _) = found["one"]
    assert first == 0 and again == (length - 1) // BLOCK * BLOCK
    (first, length), (again, _) = found["other"]
    assert first in (64, 96) and again == (length - 1) // BLOCK * BLOCK, found
    engine.check()


def test_a_cold_prompt_is_cut_where_the_warm_one_begins():
    """So that both compute the same last piece."""
    engine = FakeEngine(tokens=512)
    prompt = words(1000, 1)
    pieces = []
    for _ in range(2):
        engine.add(prompt)
        pieces.append([])
        while engine.scheduler.has_unfinished_seqs():
            pieces[-1].append(engine.step())
    assert pieces == [[512, 480, 8], [8]]


def test_prompt_logprobs_compute_everything_and_leave_checkpoints():
    engine = FakeEngine()
    prompt = words(500, 1)
    assert engine.ask(prompt, prompt_logprobs=0) == 0
    assert engine.ask(prompt, prompt_logprobs=0) == 0
    assert engine.ask(prompt) == 496
    assert engine.stats.misses == {"prompt_logprobs": 2}
    engine.check()


def test_misses_say_why():
    engine = FakeEngine(device=4)
    engine.ask(words(60, 1))
    engine.ask(words(700, 2))
    engine.ask(words(40, 3) + words(700, 2))
    engine.store.clear()
    engine.ask(words(700, 2))
    assert engine.stats.misses == {"short": 1, "cold": 2, "no_checkpoint": 1}
    engine.ask(words(700, 2))
    assert (engine.stats.restored, engine.stats.hits, engine.stats.queries) == (1, 688, 60 + 700 + 740 + 700 + 700)


def test_the_log_says_what_was_restored_and_why_not_more(caplog):
    import logging
    caplog.set_level(logging.DEBUG, "vllm")
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    try:
        engine = FakeEngine(device=2)
        engine.ask(words(640, 1), name="a")
        engine.ask(words(500, 1) + words(300, 2), name="b")
    finally:
        logger.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records if "from the prefix cache" in record.getMessage()]
    assert said == ["a: 0 of 640 tokens from the prefix cache: no KV is known beyond 0",
                    "b: 0 of 800 tokens from the prefix cache: KV is known up to 496, but there is no checkpoint "
                    "beyond 0"]


@pytest.mark.parametrize("steps", [1, 3, 5, 30, 70])
def test_a_preempted_sequence_goes_on_from_its_best_checkpoint(steps):
    engine = FakeEngine(tokens=256)
    group = engine.add(words(900, 1), 100)
    for _ in range(steps):
        engine.step()
    done = group.seqs[0].data.get_num_computed_tokens()
    engine.scheduler.recompute([group])
    engine.step()
    again = group.seqs[0].data.get_num_computed_tokens()
    assert done - again < 64 + 16 if done < 900 else again > done, (done, again)
    assert engine.worker.restored == 1
    assert group.num_cached_tokens == 0, "of the prompt, when it was first admitted"
    engine.drain()
    engine.check()


def test_while_it_generates_a_sequence_keeps_one_slot_of_its_own():
    engine = FakeEngine(device=50)
    engine.add(words(200, 1), 300)
    used = []
    while engine.scheduler.has_unfinished_seqs():
        engine.step()
        used.append(engine.stats.device_slots)
    assert max(used) == used[-1] == 3 + 1, "grid points at 64, 128 and 192, which is the prompt's last block, too"


def test_demoted_checkpoints_are_restored_from_the_host():
    engine = FakeEngine(device=4, host=20, blocks=3000)
    prompts = [words(1000, n) for n in range(10)]
    for prompt in prompts:
        engine.ask(prompt)
        engine.check()
    assert engine.stats.demoted and engine.worker.moved == engine.stats.demoted
    assert [engine.ask(prompt) for prompt in prompts] == 10 * [992]
    assert engine.stats.evicted < 30
    engine.check()


def test_kv_and_checkpoints_go_together():
    """KV for two prompts: the third takes the oldest's, whose checkpoints go with it."""
    engine = FakeEngine(device=100, blocks=130)
    for n in range(3):
        engine.ask(words(1000, n))
        engine.check()
    assert engine.stats.dropped
    held = engine.stats.device_slots
    assert held <= 2 * 17, "no slot is kept by what cannot be found"
    assert engine.ask(words(1000, 2)) == 992


def test_kv_that_no_checkpoint_needs_goes_first():
    engine = FakeEngine(device=1, blocks=130)
    old = words(600, 0)
    engine.ask(old)
    (kept, ) = engine.store._by_tag.values()
    kept.hits = 50
    engine.ask(words(1200, 1))
    assert engine.store.find(engine.store.tree.root.children.popitem()[1].edge, 37) is kept
    engine.ask(words(1200, 2))
    assert kept.slot is not None, "the blocks of the second prompt are younger, but nobody can use them"


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_failed_step_leaves_nothing(when):
    engine = FakeEngine(device=6, host=6)
    for n in range(3):
        engine.ask(words(800, n))
    engine.add(words(900, 7))
    assert engine.step(when) is None
    engine.check()
    assert engine.ask(words(900, 7)) == 0
    assert engine.ask(words(900, 7)) == 896
    engine.check()


def test_a_step_that_misses_a_checkpoint_is_computed_again():
    engine = FakeEngine()
    prompt = words(800, 1)
    engine.ask(prompt)
    (lost, ) = [one for one in engine.store._by_tag.values() if one.position == 784]
    engine.worker.tags[lost.slot] = -1
    group = engine.add(prompt, 5, name="a")
    assert engine.step() is None
    assert [one.request_id for one in engine.scheduler.waiting] == ["a"] and group.num_cached_tokens is None
    engine.drain()
    assert group.num_cached_tokens == 768, "the grid point before it"
    assert (engine.stats.queries, engine.stats.hits) == (1600, 768)
    engine.check()


def test_what_a_distrusted_request_used_is_not_used_again():
    engine = FakeEngine()
    shared = words(1000, 1)
    engine.ask(shared)
    engine.ask(shared + words(300, 2))
    bad = engine.add(shared + words(300, 3), 50, name="bad")
    for _ in range(20):
        engine.step()
    assert bad.num_cached_tokens
    engine.scheduler.distrust(bad)
    engine.abort("bad")
    engine.check()
    assert not engine.store._by_tag, "all of them began with what it read"
    assert engine.ask(shared) == 0
    assert engine.ask(shared) == 992
    engine.check()


@pytest.mark.parametrize("steps", [0, 2, 30])
def test_reset_forgets_all_and_running_requests_go_on(steps):
    engine = FakeEngine(tokens=512)
    prompt = words(1500, 1)
    engine.ask(prompt[:800])
    group = engine.add(prompt, 60)
    for _ in range(steps):
        engine.step()
    engine.scheduler.reset_prefix_cache()
    engine.check()
    assert not engine.store._by_tag and not engine.scheduler.block_manager.gpu._cached_blocks
    engine.drain()
    assert len(group.seqs[0].get_token_ids()) == 1560
    assert engine.ask(prompt) == (1488 if steps == 0 else 0), "what ran when it was reset leaves nothing behind"
    assert engine.ask(prompt) == 1488
    engine.check()


def test_prompts_of_250k_tokens_cost_little(monkeypatch):
    """16 K blocks each: scheduling stays linear, and a step beside them costs next to nothing. In CPU seconds."""
    engine = FakeEngine(blocks=17_000, length=262_144, tokens=16_384, device=300, seqs=8)
    prompt = words(250_000, 1)
    spent = []
    schedule = engine.scheduler.schedule

    def timed():
        start = time.process_time()
        found = schedule()
        spent.append(time.process_time() - start)
        return found

    monkeypatch.setattr(engine.scheduler, "schedule", timed)
    assert engine.ask(prompt, 40) == 0
    cold = list(spent)
    for n in range(2):
        engine.add(prompt + words(100 + 16 * n, n), 100)
    for n in range(12):
        engine.add([n, *prompt[1:]], 1, name=f"waits{n}")
    spent.clear()
    for _ in range(25):
        engine.step()
    assert len(engine.scheduler.running) == 2 and len(engine.scheduler.waiting) == 12
    assert engine.stats.restored == 2
    print(f"cold: {max(cold):.3f} at most, {sum(cold):.3f} in all; two warm: {max(spent):.3f}, then "
          f"{max(spent[5:]):.4f} a step")
    assert sum(cold) < 2 and max(spent) < 4 and max(spent[5:]) < 0.1


def test_without_checkpoint_slots_nothing_is_restored():
    """KV alone is no hit for a model with state."""
    one = scheduler(slots=4, caching=True, tokens=200, blocks=200)
    assert one.prefixes is None
    for name in "ab":
        one.add_seq_group(plain_group(range(160), request_id=name))
        tokens, orders = step(one)[name]
        assert tokens == 160 and orders.init == ZERO
