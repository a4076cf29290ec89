"""An exception in a step fails the requests that were in it, whatever the engine is wrapped in, and nothing else."""
import asyncio

import pytest

from tests.helpers.engine_thread import serve_in_thread
from tests.helpers.tiny_models import add, assert_same, drain, greedy, make_engine, prompt, run
from vllm.overlay.engine.step_failure import StepFailed

PROMPTS = [prompt(length, seed=length) for length in (100, 40, 70)]
TOKENS = 6
FIELDS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 200,
    "enable_prefix_caching": True,
    "disable_log_requests": True,
    "disable_log_stats": True
}


class Broken(Exception):
    """What the model raises."""


def break_model(engine, after=0):
    """Makes the model raise once, after that many more forward passes."""
    model = engine.model_executor.driver_worker.model_runner.model
    forward, left = model.forward, [after]

    def raises_once(*args, **kwargs):
        if left[0] == 0:
            model.forward = forward
            raise Broken("no luck")
        left[0] -= 1
        return forward(*args, **kwargs)

    model.forward = raises_once


@pytest.fixture(scope="module")
def plain(qwen2):
    return run(make_engine(qwen2), PROMPTS, greedy(TOKENS), together=False)


@pytest.fixture(scope="module")
def engine(qwen2):
    return make_engine(qwen2,
                       max_num_seqs=2,
                       max_num_batched_tokens=64,
                       num_gpu_blocks_override=200,
                       enable_prefix_caching=True)


@pytest.mark.parametrize("after", range(6))
def test_the_engine_goes_on(engine, plain, after):
    """Two run, one waits; after the failure the waiting one and repeats of the failed ones get the plain tokens."""
    for index, tokens in enumerate(PROMPTS):
        add(engine, str(index), tokens, greedy(TOKENS))
    break_model(engine, after)
    found, failed = {}, []
    while engine.has_unfinished_requests():
        try:
            found.update({output.request_id: output for output in engine.step()})
        except StepFailed as failure:
            failed = failure.request_ids
            assert "Broken: no luck" in str(failure) and "\\n" not in str(failure)
    assert failed and "2" not in failed[2:] and set(failed) | {key
                                                               for key, one in found.items() if one.finished} == {
                                                                   "0", "1", "2"
                                                               }
    for key, output in found.items():
        if output.finished:
            assert_same([output], [plain[int(key)]])
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)
    assert engine.scheduler[0].block_manager.get_num_free_gpu_blocks() == 200


def test_all_samples_of_a_request_fail(engine):
    add(engine, "many", PROMPTS[0], greedy(TOKENS, n=5))
    break_model(engine, 4)
    with pytest.raises(StepFailed) as caught:
        drain(engine)
    assert caught.value.request_ids == ["many"]
    assert not engine.has_unfinished_requests() and not engine.fanouts._parents


def test_a_failure_while_outputs_are_processed(engine, plain, monkeypatch):
    add(engine, "0", PROMPTS[0], greedy(TOKENS))
    add(engine, "1", PROMPTS[1], greedy(TOKENS))
    engine.step()

    def raises(*args, **kwargs):
        raise Broken("in the detokenizer, say")

    monkeypatch.setattr(engine.output_processor, "process_outputs", raises)
    with pytest.raises(StepFailed, match="in the detokenizer"):
        for _ in range(4):
            engine.step()
    monkeypatch.undo()
    drain(engine)
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)


def test_a_failing_scheduler_is_not_survived(engine, monkeypatch):
    """Nobody knows what it leaves behind."""
    add(engine, "0", PROMPTS[0], greedy(TOKENS))

    def raises():
        raise Broken("in the scheduler")

    monkeypatch.setattr(engine.scheduler[0], "_schedule", raises)
    with pytest.raises(Broken):
        engine.step()
    monkeypatch.undo()
    drain(engine)


def test_the_asynchronous_engine(qwen2, plain):
    from vllm import AsyncEngineArgs, AsyncLLMEngine
    server = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(qwen2), **FIELDS))

    async def ask(index):
        last = None
        async for output in server.generate({"prompt_token_ids": PROMPTS[index]}, greedy(TOKENS),
                                            f"{index}-{asyncio.current_task()}"):
            last = output
        return last

    async def main():
        break_model(server.engine, 3)
        results = await asyncio.gather(*(ask(index) for index in range(3)), return_exceptions=True)
        failed = [one for one in results if isinstance(one, Exception)]
        assert 1 <= len(failed) <= 2 and all(isinstance(one, StepFailed) for one in failed), results
        assert server.is_running and not server.errored
        await server.check_health()
        assert_same([await ask(index) for index in range(3)], plain)
        server.shutdown_background_loop()

    asyncio.run(main())


def test_the_engine_process(qwen2, plain, tmp_path):
    """The engine behind its sockets, here in a thread, and the client that the server uses."""
    from vllm import AsyncEngineArgs
    from vllm.engine.multiprocessing.client import MQLLMEngineClient
    from vllm.engine.multiprocessing.engine import MQLLMEngine
    from vllm.usage.usage_lib import UsageContext
    arguments = AsyncEngineArgs(model=str(qwen2), **FIELDS)
    path = f"ipc://{tmp_path}/engine"
    server = MQLLMEngine.from_engine_args(arguments, UsageContext.API_SERVER, path)
    stop, thread = serve_in_thread(server)

    async def main():
        config = arguments.create_engine_config()
        # The client wants a tokenizer, the checkpoint has none, and nothing here needs one.
        import vllm.engine.multiprocessing.client as module
        module.init_tokenizer_from_configs = lambda **_: None
        client = MQLLMEngineClient(path, config)
        await client.setup()

        async def ask(index, name, n=1):
            last = None
            async for output in client.generate(prompt={"prompt_token_ids": PROMPTS[index]},
                                                sampling_params=greedy(TOKENS, n=n),
                                                request_id=name):
                last = output
            return last

        many = await ask(0, "many", n=3)
        assert len(many.outputs) == 3
        break_model(server.engine, 3)
        results = await asyncio.gather(*(ask(index, str(index)) for index in range(3)), return_exceptions=True)
        failed = [one for one in results if isinstance(one, Exception)]
        assert 1 <= len(failed) <= 2 and all(isinstance(one, StepFailed) for one in failed), results
        await client.check_health()
        assert not client.errored
        assert_same([await ask(index, f"again-{index}") for index in range(3)], plain)
        stop.set()
        await client.abort("nobody")    # Something to wake up for.
        client.close()

    asyncio.run(main())
    thread.join(20)


@pytest.mark.parametrize("answers", [True, False])
def test_a_device_that_answers_no_more(engine, monkeypatch, answers):
    """An error that every further call repeats: going on would fail every request for ever."""
    import torch

    def synchronize():
        if not answers:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    add(engine, "0", PROMPTS[0], greedy(TOKENS))
    break_model(engine, 2)
    with pytest.raises(StepFailed if answers else Broken):
        drain(engine)
    monkeypatch.undo()
    # Where nothing was survived, it is still there, and what it should have computed is not.
    engine.scheduler[0].step_failed()
    engine.abort_request("0")
    drain(engine)
