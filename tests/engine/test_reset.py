"""Forgetting the prefix cache, whatever the engine is wrapped in, while requests run; and what its metrics say then."""
import asyncio

import prometheus_client
import pytest

from tests.helpers.engine_thread import serve_in_thread
from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, prompt, run

LONG, OTHER = prompt(200, seed=1), prompt(150, seed=2)
TOKENS = 12
FIELDS = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4,
          "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200, "enable_prefix_caching": True,
          "disable_log_requests": True}


@pytest.fixture(scope="module")
def plain(qwen2):
    return run(make_engine(qwen2), [LONG, OTHER], greedy(TOKENS), together=False)


@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_whoever_runs_goes_on_and_leaves_nothing(qwen2, plain, steps):
    """In the middle of a prompt of 150 tokens in pieces of 64, at its end, and while it generates."""
    engine = make_engine(qwen2, max_num_batched_tokens=64, num_gpu_blocks_override=200, enable_prefix_caching=True)
    (first, second) = (run(engine, [LONG], greedy(TOKENS), tag=tag) for tag in ("a", "b"))
    assert (first[0].num_cached_tokens, second[0].num_cached_tokens) == (0, 192)
    add(engine, "running", OTHER, greedy(TOKENS))
    for _ in range(steps):
        engine.step()
    engine.reset_prefix_cache()
    assert_same([drain(engine)["running"]], plain[1:])
    for tag, cached in (("c", 0), ("d", 192)):
        (again, ) = run(engine, [LONG], greedy(TOKENS), tag=tag)
        assert again.num_cached_tokens == cached
        assert_same([again], plain[:1])
    (once, ) = run(engine, [OTHER], greedy(TOKENS), tag="e")
    assert once.num_cached_tokens == 0, "a request that ran over the reset has left what was computed before it"
    assert engine.scheduler[0].block_manager.get_num_free_gpu_blocks() == 200


async def all_of_it(client, plain):
    """Misses, hits, forgets in the middle of another request, and misses again."""
    async def ask(tokens, name):
        last = None
        async for output in client.generate({"prompt_token_ids": tokens}, greedy(TOKENS), name):
            last = output
            if name == "running" and not begun.done():
                begun.set_result(None)
        return last

    begun = asyncio.get_running_loop().create_future()
    assert [(await ask(LONG, name)).num_cached_tokens for name in "ab"] == [0, 192]
    running = asyncio.ensure_future(ask(OTHER, "running"))
    await begun
    await client.reset_prefix_cache()
    assert_same([await running], plain[1:])
    again = await ask(LONG, "c")
    assert again.num_cached_tokens == 0
    assert_same([again], plain[:1])
    await client.reset_prefix_cache()
    counted = {name: prometheus_client.REGISTRY.get_sample_value(f"vllm:{name}", {"model_name": "m"})
               for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "gpu_prefix_cache_hit_rate")}
    tokens = 3 * len(LONG) + len(OTHER)
    assert counted == {"prefix_cache_queries_total": tokens, "prefix_cache_hits_total": 192,
                       "gpu_prefix_cache_hit_rate": 192 / tokens}, "counts go on over a reset"


def arguments(qwen2):
    from vllm import AsyncEngineArgs
    return AsyncEngineArgs(model=str(qwen2), served_model_name="m", **FIELDS)


def test_the_asynchronous_engine(qwen2, plain):
    from vllm import AsyncLLMEngine
    server = AsyncLLMEngine.from_engine_args(arguments(qwen2))

    async def main():
        await all_of_it(server, plain)
        server.shutdown_background_loop()

    asyncio.run(main())


def test_the_engine_process(qwen2, plain, tmp_path, monkeypatch):
    """The engine behind its sockets, here in a thread, and the client that the server uses."""
    import vllm.engine.multiprocessing.client as stock
    from vllm.engine.multiprocessing.engine import MQLLMEngine
    from vllm.overlay.serving.patient_client import PatientClient
    from vllm.usage.usage_lib import UsageContext
    path = f"ipc://{tmp_path}/engine"
    stop, thread = serve_in_thread(MQLLMEngine.from_engine_args(arguments(qwen2), UsageContext.API_SERVER, path))
    # The client wants a tokenizer, the checkpoint has none, and nothing here needs one.
    monkeypatch.setattr(stock, "init_tokenizer_from_configs", lambda **_: None)

    async def main():
        client = PatientClient(path, arguments(qwen2).create_engine_config())
        await client.setup()
        await all_of_it(client, plain)
        stop.set()
        await client.abort("nobody")    # Something to wake up for.
        client.close()

    asyncio.run(main())
    thread.join(20)
