"""Workers that do not hold the checkpoints that the scheduler means: no request fails, every token is right, and a
counter says that it happened."""
import asyncio

import pytest

from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, prompt, run
from vllm.overlay.engine.step_failure import StepFailed
from vllm.sampling_params import RequestOutputKind

PROMPTS = [prompt(length, seed=length) for length in (100, 260, 180)]
TOKENS = 6
# Of the toy model, in bytes.
SLOT = 2 * (64 * 2 + 64) * 4
FIELDS = {"enable_prefix_caching": True, "max_num_batched_tokens": 64, "max_num_seqs": 4,
          "checkpoint_memory": 40 * SLOT}


@pytest.fixture(scope="module")
def plain(toy):
    return run(make_engine(toy, max_num_batched_tokens=1024), PROMPTS, greedy(TOKENS), together=False)


@pytest.fixture
def warm(toy, plain):
    """Makes an engine that has computed the prompts, and found them again."""
    def make(**arguments):
        engine = make_engine(toy, **{**FIELDS, **arguments})
        assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)
        again = run(engine, PROMPTS, greedy(TOKENS), together=False)
        assert_same(again, plain)
        assert all(output.num_cached_tokens for output in again), cached(again)
        assert stats(engine).failures == 0
        return engine
    return make


def pool_of(engine):
    return engine.model_executor.driver_worker.model_runner.state_pool


def stats(engine):
    return engine.scheduler[0].cache_stats


def cached(outputs):
    return [output.num_cached_tokens for output in outputs]


def nothing_leaks(engine):
    scheduler, blocks = engine.scheduler[0], engine.cache_config.num_gpu_blocks
    assert scheduler.slots.num_free == 4 and scheduler.block_manager.get_num_free_gpu_blocks() == blocks


@pytest.mark.parametrize("together", [True, False])
def test_a_worker_that_lacks_them(warm, plain, together):
    """All are gone: each request is computed cold, leaves new ones, and the next finds those."""
    engine = warm()
    pool_of(engine)._held.clear()
    outputs = run(engine, PROMPTS, greedy(TOKENS), together=together)
    assert_same(outputs, plain)
    assert cached(outputs) == [0, 0, 0] and stats(engine).failures >= 1
    failures = stats(engine).failures
    again = run(engine, PROMPTS, greedy(TOKENS))
    assert_same(again, plain)
    assert all(cached(again)) and stats(engine).failures == failures, (cached(again), stats(engine))
    nothing_leaks(engine)


def test_only_what_is_missing_is_dropped(warm, plain, monkeypatch):
    """The last checkpoint of a prompt is gone: it is computed from the one before."""
    engine = warm()
    before = run(engine, PROMPTS[1:2], greedy(TOKENS))
    store, found = engine.scheduler[0].prefixes.store, []
    hit = store.hit
    monkeypatch.setattr(store, "hit", lambda checkpoint: (found.append(checkpoint.slot), hit(checkpoint)))
    run(engine, PROMPTS[1:2], greedy(TOKENS))
    del pool_of(engine)._held[found[0]]
    outputs = run(engine, PROMPTS[1:2], greedy(TOKENS))
    assert_same(outputs, plain[1:2])
    assert 0 < cached(outputs)[0] < cached(before)[0] and stats(engine).failures == 1, (cached(outputs), cached(before))
    nothing_leaks(engine)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_corrupt_checkpoint(warm, plain, checksums, monkeypatch):
    """With checksums it is computed again. Without them, the negative control, the tokens are wrong."""
    monkeypatch.setenv("VLLM_OVERLAY_CHECKPOINT_CHECKSUMS", "1" if checksums else "0")
    engine = warm()
    pool = pool_of(engine)
    pool.recurrent[:, pool.num_live:] += 3
    outputs = run(engine, PROMPTS, greedy(TOKENS))
    if checksums:
        assert_same(outputs, plain)
        assert stats(engine).failures and cached(outputs) == [0, 0, 0]
        assert all(cached(run(engine, PROMPTS, greedy(TOKENS))))
    else:
        with pytest.raises(AssertionError, match="request 0"):
            assert_same(outputs, plain)
        assert not stats(engine).failures
    nothing_leaks(engine)


def test_on_the_host(toy):
    """Few slots on the device and many on the host: prompts are restored from there, and computed again when what they
    need is gone, be it to be restored or to be moved."""
    prompts = [prompt(length, seed=length) for length in (500, 700, 400, 600)]
    fields = {"max_num_batched_tokens": 256, "max_num_seqs": 4}
    plain = run(make_engine(toy, **fields), prompts, greedy(TOKENS))
    fields.update(checkpoint_memory=2 * SLOT, checkpoint_host_memory=90 * SLOT)
    engine = make_engine(toy, **{**FIELDS, **fields})
    pool = pool_of(engine)

    def ask():
        outputs = run(engine, prompts, greedy(TOKENS), together=False)
        assert_same(outputs, plain)
        return cached(outputs)

    assert ask() == [0] * 4 and stats(engine).demoted and stats(engine).host_slots, stats(engine)
    assert all(ask()) and not stats(engine).failures, stats(engine)
    assert pool.host.num_slots == 90
    for gone in (range(pool.num_slots, pool.num_slots + 90), range(pool.num_slots)):
        failures = stats(engine).failures
        for slot in gone:
            pool._held.pop(slot, None)
        ask()
        assert stats(engine).failures > failures, stats(engine)
        assert all(ask()), stats(engine)
    nothing_leaks(engine)


def test_whoever_runs_beside_goes_on(warm, plain):
    """A request in the middle of its answer shares the step with one whose checkpoint is gone: nothing of its stream is
    sent twice, or differently, and neither are draws."""
    engine = warm()
    draws = {"temperature": 1.0, "seed": 11}
    (drawn, ) = run(engine, PROMPTS[2:], greedy(12, **draws))
    (expected, ) = run(engine, PROMPTS[2:], greedy(12))
    for name, fields in (("answers", {}), ("draws", draws)):
        add(engine, name, PROMPTS[2], greedy(12, output_kind=RequestOutputKind.DELTA, **fields))
    streamed = {"answers": [], "draws": []}

    def step():
        for output in engine.step():
            if output.request_id in streamed:
                streamed[output.request_id] += output.outputs[0].token_ids

    while not all(1 < len(tokens) < 8 for tokens in streamed.values()):
        step()
    pool_of(engine)._held.clear()
    add(engine, "misses", PROMPTS[1], greedy(TOKENS))
    while engine.has_unfinished_requests():
        step()
    assert stats(engine).failures
    assert streamed == {"answers": list(expected.outputs[0].token_ids), "draws": list(drawn.outputs[0].token_ids)}
    nothing_leaks(engine)


def test_a_request_that_is_over_before_it_began(warm, plain):
    """Too long for the model, and told so by the same step: it must not wait for ever."""
    engine = warm()
    pool_of(engine)._held.clear()
    add(engine, "long", prompt(1500, seed=1), greedy(TOKENS))
    add(engine, "misses", PROMPTS[1], greedy(TOKENS))
    found = drain(engine)
    assert stats(engine).failures and found["long"].finished and not found["long"].outputs[0].token_ids
    assert_same([found["misses"]], plain[1:2])
    nothing_leaks(engine)


def test_a_scheduler_that_does_not_forget(warm, plain, monkeypatch):
    """The same checkpoint missed twice would be missed for ever: then the requests fail, and the engine lives."""
    engine = warm()
    pool_of(engine)._held.clear()
    monkeypatch.setattr(engine.scheduler[0], "drop_checkpoints", lambda tags: None)
    add(engine, "misses", PROMPTS[1], greedy(TOKENS))
    with pytest.raises(StepFailed, match="CheckpointError: a checkpoint is not where it should be") as caught:
        drain(engine)
    assert caught.value.request_ids == ["misses"] and stats(engine).failures == 1
    monkeypatch.undo()
    engine._missed.clear()
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)
    nothing_leaks(engine)


def test_the_asynchronous_engine(toy, plain):
    """Clients of a server in one process notice nothing."""
    from vllm import AsyncEngineArgs, AsyncLLMEngine
    server = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(
        model=str(toy), skip_tokenizer_init=True, dtype="float32", max_model_len=1024, num_gpu_blocks_override=512,
        disable_log_requests=True, disable_log_stats=True, **FIELDS))

    async def ask(index, name):
        last = None
        async for output in server.generate({"prompt_token_ids": PROMPTS[index]}, greedy(TOKENS), f"{name}{index}"):
            last = output
        return last

    async def main():
        for name in ("cold", "warm", "missed", "again"):
            if name == "missed":
                pool_of(server.engine)._held.clear()
            outputs = await asyncio.gather(*(ask(index, name) for index in range(3)))
            assert_same(outputs, plain)
            assert all(cached(outputs)) == (name in ("warm", "again")), (name, cached(outputs))
        assert stats(server.engine).failures and server.is_running and not server.errored
        await server.check_health()
        server.shutdown_background_loop()

    asyncio.run(main())
