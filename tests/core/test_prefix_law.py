"""The law with prefix caching and chunked prefill together: whatever happened before or beside it, a request gets the
same tokens.

Each hazard is also run on stock's scheduler and allocator, where the law must break: a test that cannot fail proves
nothing.
"""
import random

import pytest

from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, prompt, run
from vllm.overlay.engine.step_failure import StepFailed

CHUNK = 64
TOKENS = 12
SHARED = prompt(300, seed=1)
# Four share 300 tokens; one ends within a block, one at a block's end, one is shorter than a block.
# How stock breaks: other tokens, or a block table that is too short, which our attention operator refuses.
BROKEN = (AssertionError, StepFailed)
PROMPTS = [SHARED + prompt(n, seed=n) for n in (1, 20, 37, 200)] + [prompt(7, seed=7), prompt(160, seed=8)]


@pytest.fixture(scope="module")
def plain(qwen2):
    """Each prompt alone, whole, without prefix caching: what every other way must give."""
    engine = make_engine(qwen2, max_num_batched_tokens=1024)
    return run(engine, PROMPTS, greedy(TOKENS), together=False)


@pytest.fixture(scope="module")
def engine(qwen2):
    return cached_engine(qwen2)


def cached_engine(model, **arguments):
    return make_engine(
        model, **{
            "max_num_batched_tokens": CHUNK,
            "enable_prefix_caching": True,
            "num_gpu_blocks_override": 200,
            **arguments
        })


def forget(engine):
    """Empties the prefix cache by using every block for something else."""
    blocks = engine.cache_config.num_gpu_blocks
    while blocks > 0:
        length = min(1000, blocks * 16)
        run(engine, [prompt(length, seed=random.randrange(1 << 30))], greedy(1), tag="forget")
        blocks -= length // 16


def test_cold_and_warm_together_and_one_by_one(engine, plain):
    for together in (False, True, True):
        outputs = run(engine, PROMPTS, greedy(TOKENS), together=together)
        assert_same(outputs, plain)
    warm = [output.num_cached_tokens for output in outputs]
    assert warm == [(len(tokens) - 1) // 16 * 16 for tokens in PROMPTS], warm


def test_a_hit_costs_one_step(engine, plain):
    """592 cached tokens of 600 and 43 new ones are one step of 43 tokens; stock takes a step per piece of the cached
    prefix."""
    first, second = prompt(600, seed=3), prompt(600, seed=3)[:592] + prompt(43, seed=4)
    run(engine, [first], greedy(1))
    add(engine, "hit", second, greedy(1))
    steps = []
    while engine.has_unfinished_requests():
        steps.append(engine.scheduler[0])
        done = engine.step()
    assert len(steps) == 1, f"{len(steps)} steps"
    assert done[0].num_cached_tokens == 592


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_abort_in_the_middle_of_a_prompt(engine, plain, steps):
    forget(engine)
    check_abort(engine, plain, steps)


def check_abort(engine, plain, steps):
    add(engine, "leaves", PROMPTS[3], greedy(TOKENS))
    for _ in range(steps):
        engine.step()
    engine.abort_request("leaves")
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)


def test_abort_breaks_stock(qwen2, plain, stock_core):
    with pytest.raises(BROKEN, match="request"):
        check_abort(cached_engine(qwen2), plain, 1)


def preempt_often(engine, times, seed=0):
    """Every second time that a running group wants to go on, it or the youngest is preempted instead."""
    random.seed(seed)
    scheduler = engine.scheduler[0]
    scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, times


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_forced_preemption(engine, plain, seed):
    forget(engine)
    scheduler = engine.scheduler[0]
    before = scheduler.num_cumulative_preemption
    preempt_often(engine, 40, seed)
    outputs = run(engine, PROMPTS, greedy(TOKENS))
    scheduler.enable_artificial_preemption = False
    assert scheduler.num_cumulative_preemption >= before + 20
    assert_same(outputs, plain)
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)


def test_preemption_breaks_stock(qwen2, plain, stock_core):
    engine = cached_engine(qwen2)
    preempt_often(engine, 40)
    with pytest.raises(BROKEN, match="request"):
        assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)


def test_preemption_by_want_of_memory(qwen2, plain):
    """60 blocks hold one and a half of the long prompts: they push each other out until all are done."""
    engine = cached_engine(qwen2, max_model_len=640, num_gpu_blocks_override=60)
    outputs = run(engine, PROMPTS, greedy(TOKENS))
    assert_same(outputs, plain)
    assert engine.scheduler[0].block_manager.get_num_free_gpu_blocks() == 60


def check_long_tail(engine, plain):
    """A partial hit whose tail is longer than a step: stock keeps the hit's block table for the later pieces."""
    run(engine, [SHARED], greedy(1))
    add(engine, "tail", PROMPTS[3], greedy(TOKENS))
    assert_same([drain(engine)["tail"]], [plain[3]])


def test_long_tail_after_a_partial_hit(engine, plain):
    forget(engine)
    check_long_tail(engine, plain)


def test_long_tail_breaks_stock(qwen2, plain, stock_core):
    with pytest.raises(BROKEN, match="request"):
        check_long_tail(cached_engine(qwen2), plain)


def test_a_prompt_goes_on_beside_a_decoding_sequence(qwen2, plain):
    """A budget of one block, of which a decoding sequence takes a token: stock gives the prompt nothing until that one
    ends."""
    engine = cached_engine(qwen2, max_num_batched_tokens=16)
    add(engine, "long", PROMPTS[4], greedy(400))
    engine.step()
    add(engine, "r1", PROMPTS[1], greedy(TOKENS))
    found = {}
    for _ in range(60):
        found.update({output.request_id: output for output in engine.step()})
        if "r1" in found and found["r1"].finished:
            break
    assert "r1" in found and found["r1"].finished, "the prompt did not get through in 60 steps"
    assert not found["long"].finished
    assert_same([found["r1"]], [plain[1]])
    engine.abort_request("long")


def test_the_same_prompt_while_it_is_being_computed(engine, plain):
    """A second request of the same prompt arrives after the first piece and must not read blocks that are not there
    yet."""
    forget(engine)
    add(engine, "a", PROMPTS[3], greedy(TOKENS))
    engine.step()
    add(engine, "b", PROMPTS[3], greedy(TOKENS))
    found = drain(engine)
    assert_same([found["a"], found["b"]], [plain[3], plain[3]])


def test_an_answer_grows_into_a_prompt_that_is_being_computed(engine, plain):
    """While A decodes, B's prompt is A's prompt and whole answer, not yet computed: A's full blocks must stay A's
    own."""
    forget(engine)
    answer = list(run(engine, [PROMPTS[2]], greedy(60))[0].outputs[0].token_ids)
    expected = run(engine, [PROMPTS[2]], greedy(60))
    forget(engine)
    add(engine, "a", PROMPTS[2], greedy(60))
    for _ in range(8):
        engine.step()
    add(engine, "b", PROMPTS[2] + answer + prompt(300, seed=5), greedy(1))
    assert_same([drain(engine)["a"]], expected)


def test_prompt_logprobs_are_complete_on_a_warm_cache(engine):
    params = greedy(2, prompt_logprobs=0)
    cold, warm = (run(engine, [PROMPTS[1]], params)[0] for _ in range(2))
    assert warm.num_cached_tokens == 0
    assert len(warm.prompt_logprobs) == len(PROMPTS[1])
    for place, (a, b) in enumerate(zip(cold.prompt_logprobs[1:], warm.prompt_logprobs[1:], strict=True), 1):
        token = PROMPTS[1][place]
        assert abs(a[token].logprob - b[token].logprob) < 1e-5, f"token {place}: {a} and {b}"


def test_nothing_is_leaked(engine):
    scheduler = engine.scheduler[0]
    assert not engine.has_unfinished_requests()
    assert scheduler.block_manager.get_num_free_gpu_blocks() == engine.cache_config.num_gpu_blocks
    assert not scheduler.block_manager.block_tables
    assert not scheduler.block_manager._chains and not scheduler.block_manager._entered
    assert not scheduler.prefixes._running and not scheduler.prefixes._starts


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules(qwen2, plain, seed):
    """Requests, aborts and preemptions at random; every request that stays gets the plain tokens."""
    chance = random.Random(seed)
    engine = cached_engine(qwen2,
                           max_num_batched_tokens=chance.choice([16, 48, 64, 100]),
                           max_num_seqs=chance.choice([2, 3, 8]),
                           num_gpu_blocks_override=chance.choice([70, 100, 512]))
    wanted, found, waiting = {}, {}, [(f"q{n}", chance.randrange(len(PROMPTS))) for n in range(24)]
    preempt_often(engine, 20, seed)
    while waiting or engine.has_unfinished_requests():
        if waiting and chance.random() < 0.4:
            request_id, which = waiting.pop()
            wanted[request_id] = which
            add(engine, request_id, PROMPTS[which], greedy(TOKENS))
        if wanted and chance.random() < 0.1:
            leaving = chance.choice(sorted(wanted))
            engine.abort_request(leaving)
            if leaving not in found or not found[leaving].finished:
                del wanted[leaving]
        found.update({output.request_id: output for output in engine.step()})
    ids = sorted(wanted)
    assert_same([found[one] for one in ids], [plain[wanted[one]] for one in ids])
    assert engine.scheduler[0].block_manager.get_num_free_gpu_blocks() == engine.cache_config.num_gpu_blocks
