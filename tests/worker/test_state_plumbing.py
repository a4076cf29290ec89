"""Recurrent state from the scheduler's slots to the model, with a toy recurrence that any mistake shows in."""
from contextlib import contextmanager

import pytest
import torch

from tests.helpers import toy_recurrent
from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, prompt, run
from vllm.overlay.hybrid import KEEP, StatePool

PROMPTS = [prompt(length, seed=length) for length in (1, 2, 3, 17, 64, 130, 200, 301)]
TOKENS = 10


@pytest.fixture(scope="module")
def plain(toy):
    return run(make_engine(toy, max_num_batched_tokens=1024), PROMPTS, greedy(TOKENS), together=False)


def runner_of(engine):
    return engine.model_executor.driver_worker.model_runner


def test_the_plain_run_is_right(toy, plain):
    """Against the same recurrence computed over the whole sequence by transformers, without caches."""
    for tokens, output in zip(PROMPTS, plain, strict=True):
        answer = list(output.outputs[0].token_ids)
        logprobs = toy_recurrent.reference_logits(toy, tokens + answer)[len(tokens) - 1:-1].log_softmax(-1)
        for place, token in enumerate(answer):
            assert logprobs[place].max() - logprobs[place][token] < 1e-4, (len(tokens), place)
            assert abs(output.outputs[0].logprobs[place][token].logprob - logprobs[place][token]) < 1e-4, (len(tokens),
                                                                                                           place)


@pytest.mark.parametrize("budget", [1, 2, 3, 16, 64, 129])
def test_pieces_of_any_size(toy, plain, budget):
    engine = make_engine(toy, max_num_batched_tokens=budget, max_num_seqs=1)
    assert_same(run(engine, PROMPTS[-3:], greedy(TOKENS)), plain[-3:])


@pytest.mark.parametrize("seqs", [2, 3, 8])
def test_batches_in_few_slots(toy, plain, seqs):
    engine = make_engine(toy, max_num_batched_tokens=40, max_num_seqs=seqs)
    for _ in range(2):
        assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)
    assert runner_of(engine).state_pool.num_slots == seqs and engine.scheduler[0].slots.num_free == seqs


def test_whole_prompts(toy, plain):
    engine = make_engine(toy, enable_chunked_prefill=False, max_num_batched_tokens=1024, max_num_seqs=3)
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)


@pytest.mark.parametrize("seed", [0, 1])
def test_preempted(toy, plain, seed):
    import random
    random.seed(seed)
    engine = make_engine(toy, max_num_batched_tokens=64, max_num_seqs=4)
    scheduler = engine.scheduler[0]
    scheduler.enable_artificial_preemption, scheduler.artificial_preempt_cnt = True, 40
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)
    assert scheduler.num_cumulative_preemption > 20


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_aborted(toy, plain, steps):
    engine = make_engine(toy, max_num_batched_tokens=64, max_num_seqs=2)
    add(engine, "stays", PROMPTS[5], greedy(TOKENS))
    add(engine, "leaves", PROMPTS[7], greedy(TOKENS))
    for _ in range(steps):
        engine.step()
    engine.abort_request("leaves")
    add(engine, "comes", PROMPTS[6], greedy(TOKENS))
    found = drain(engine)
    assert_same([found["stays"], found["comes"]], [plain[5], plain[6]])
    assert engine.scheduler[0].slots.num_free == 2


def broken(model, plain, **arguments):
    """Whether the law breaks for some prompt."""
    engine = make_engine(model, max_num_batched_tokens=64, max_num_seqs=2, **arguments)
    try:
        assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)
    except AssertionError:
        return True
    return False


def test_without_zeroing_the_law_breaks(toy, plain, monkeypatch):
    monkeypatch.setattr(StatePool, "apply_init", lambda self, slots, inits: None)
    assert broken(toy, plain)


def test_with_slots_exchanged_the_law_breaks(toy, plain, monkeypatch):
    from vllm.overlay.hybrid.state_orders import StepOrders
    collect = StepOrders.collect.__func__

    def exchanged(cls, orders, query_lens, num_prefills, moves):
        step = collect(cls, orders, query_lens, num_prefills, moves)
        return step._replace(live_slots=step.live_slots[::-1]) if step.inits.count(KEEP) == 2 else step

    monkeypatch.setattr(StepOrders, "collect", classmethod(exchanged))
    assert broken(toy, plain)


def test_what_the_model_is_told(toy):
    engine = make_engine(toy, max_num_batched_tokens=20, max_num_seqs=3)
    model = runner_of(engine).model
    assert model.steps == [None], "memory is profiled without state"
    model.steps.clear()
    add(engine, "a", PROMPTS[3], greedy(4))
    engine.step()
    add(engine, "b", PROMPTS[4], greedy(4))
    engine.step()
    first, second = model.steps
    pool = runner_of(engine).state_pool
    assert first.pool is pool and second.pool is pool
    assert (first.query_start_loc, first.num_prefills, first.captures) == ([0, 17], 1, ())
    assert (second.query_start_loc, second.num_prefills) == ([0, 19,
                                                              20], 1), "the new prompt comes before the decoding row"
    assert second.live_slots.dtype == torch.long and second.live_slots.tolist()[1] == first.live_slots.item()
    from vllm.overlay.hybrid import get_state_step
    assert get_state_step() is None


def test_prefixes_are_restored(toy, plain):
    """Of the states after 64 tokens, and the last whole block, of each prompt."""
    engine = make_engine(toy, enable_prefix_caching=True)
    for cached in (0, 1, 1):
        outputs = run(engine, PROMPTS, greedy(TOKENS))
        assert_same(outputs, plain)
        assert [output.num_cached_tokens for output in outputs] == [cached * hit for hit in (0, 0, 0, 0, 0, 128, 192,
                                                                                            288)]
    assert engine.scheduler[0].slots.num_free == 8


def test_a_wrong_checkpoint_breaks_the_law(toy, plain, monkeypatch):
    """Negative control: restored is what another slot holds, or nothing."""
    apply = StatePool.apply_init
    for wrong in (lambda self, slots, inits: None,
                  lambda self, slots, inits: apply(self, slots, [init + 1 if init > 8 else init for init in inits])):
        engine = make_engine(toy, enable_prefix_caching=True)
        run(engine, PROMPTS, greedy(TOKENS))
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match="request"):
            patch.setattr(StatePool, "apply_init", wrong)
            assert_same(run(engine, PROMPTS[5:], greedy(TOKENS)), plain[5:])


def test_prefix_caching_needs_pieces(toy):
    from vllm import EngineArgs
    from vllm.overlay.hybrid.plan import plan_slots
    config = EngineArgs(str(toy), skip_tokenizer_init=True, enable_prefix_caching=True, max_model_len=1024,
                        max_num_batched_tokens=1024).create_engine_config()
    assert config.scheduler_config.chunked_prefill_enabled
    config.scheduler_config.chunked_prefill_enabled = False
    with pytest.raises(ValueError, match=r"^prefix caching without chunked prefill .* not supported"):
        plan_slots(config.model_config, config.cache_config, config.scheduler_config, config.parallel_config)


def test_the_pool_counts_against_the_kv_budget(toy, monkeypatch):
    from vllm.overlay.runtime import platform_cpu
    engine = make_engine(toy, max_num_seqs=5)
    pool = runner_of(engine).state_pool
    assert pool.nbytes == 5 * toy_recurrent.LAYERS * (64 * 2 + 64) * 4
    assert pool.nbytes == pool.conv.numel() * 4 + pool.recurrent.numel() * 4
    rss = platform_cpu.resident_memory()
    big = StatePool(pool.spec._replace(recurrent_shape=(64, 128, 128)), 16, torch.device("cpu"))
    assert platform_cpu.resident_memory(
    ) - rss > 0.9 * big.recurrent.numel() * 4, "memory that is only promised is not taken"


def test_disagreement_is_an_error(toy, qwen2):
    from vllm.overlay.engine.step_failure import StepFailed
    engine = make_engine(toy)
    scheduler = engine.scheduler[0]
    scheduler.slots, slots = None, scheduler.slots
    add(engine, "a", PROMPTS[3], greedy(2))
    with pytest.raises(StepFailed, match="without state orders"):
        engine.step()
    scheduler.slots = slots
    add(engine, "b", PROMPTS[3], greedy(2))
    slots._free.append(99)
    with pytest.raises(StepFailed, match="slot 99 in a pool of 8"):
        engine.step()
    assert scheduler.slots.num_free == 9
    from vllm.overlay.hybrid.plan import allocate_pool
    cache = engine.cache_config
    with pytest.raises(RuntimeError, match="has no recurrent state, but the scheduler planned 8"):
        allocate_pool(torch.nn.Linear(1, 1), cache, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"^too little memory: 8 slots of recurrent state and 0 .* --max-num-seqs$"):
        allocate_pool(runner_of(engine).model, cache, torch.device("cpu"), free=100)
    cache.num_state_slots = 0
    with pytest.raises(RuntimeError, match="has recurrent state, but the scheduler planned 0"):
        allocate_pool(runner_of(engine).model, cache, torch.device("cpu"))


def test_checkpoints_reach_the_model(toy):
    """What the prefix cache orders: save a state inside a piece, and start another sequence from it; move it to the
    host, and start a third from there, with the same result, bit for bit."""
    tokens, tail = PROMPTS[5], prompt(9, seed=99)
    engine = make_engine(toy, max_num_batched_tokens=256, max_num_seqs=4)
    runner, slots = runner_of(engine), engine.scheduler[0].slots
    embedding, orders = runner.model.model.embed_tokens, slots.orders
    pool = runner.state_pool = StatePool(runner.state_pool.spec, 4, torch.device("cpu"), 1, 2)
    slots.orders = lambda seq_id, captures: orders(seq_id, ((100, 4, 7), ))
    run(engine, [tokens], greedy(1))
    saved = (pool.conv[:, 4].clone(), pool.recurrent[:, 4, 0, 0].clone())
    empty = (torch.zeros(toy_recurrent.LAYERS, 64, 2), torch.zeros(toy_recurrent.LAYERS, 64))
    assert_close(saved, states_after(embedding, tokens[:100], *empty))
    started = []
    for init, moves in ((4, ((4, 6, 7), )), (6, ())):
        slots.orders = lambda seq_id, captures, init=init: orders(seq_id)._replace(init=init, init_tag=7)
        pool.recurrent[:, 0] = pool.conv[:, 0] = float("nan")
        with moving(engine, moves):
            add(engine, f"from {init}", tail, greedy(1))
            engine.step()
        started.append((pool.conv[:, 0].clone(), pool.recurrent[:, 0, 0, 0].clone()))
        assert_close(started[-1], states_after(embedding, tail, *saved))
        pool.recurrent[:, 4] = pool.conv[:, 4] = float("nan")       # From the host it does not matter any more.
    assert all(map(torch.equal, *started))


@contextmanager
def moving(engine, moves):
    """Steps that also move checkpoints to the host."""
    scheduler = engine.scheduler[0]
    schedule = scheduler.schedule

    def with_moves():
        metadata, *others = schedule()
        metadata[0].state_moves = moves
        return metadata, *others

    scheduler.schedule = with_moves
    try:
        yield
    finally:
        del scheduler.schedule


def states_after(embedding, tokens, conv, recurrent):
    """(convolution tails, states) of all layers after `tokens`, from those before."""
    x, tails, states = embedding.weight[torch.tensor(tokens)].detach(), [], []
    for layer in range(toy_recurrent.LAYERS):
        x, tail, state = toy_recurrent.recur(x, conv[layer], recurrent[layer])
        tails.append(tail)
        states.append(state)
    return torch.stack(tails), torch.stack(states)


def assert_close(found, expected):
    for name, one, other in zip(("convolution tails", "recurrent states"), found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5), f"{name} differ by {(one - other).abs().max()}"
