"""A non-finite value fails its request with an error that says where, and nothing else: not the other requests of the
step, not the engine, not the prefix cache. It is never a token."""
import asyncio
import math
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.engine_thread import serve_in_thread
from tests.helpers.tiny_models import add, assert_same, greedy, make_engine, model_of, prompt, run
from vllm.overlay.engine import nonfinite
from vllm.overlay.engine.step_failure import NonFiniteLogits

# No two of their sequences ever have the same length, by which a fault finds its row.
PROMPTS = [prompt(length, seed=length) for length in (100, 40, 70)]
TOKENS = 8
LENGTH = 74     # The third prompt and four generated tokens: the fifth token would come from the fault.
FIELDS = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 200}


def pool_of(engine):
    return engine.model_executor.driver_worker.model_runner.state_pool


class Fault:
    """Writes `value` once, in the step in which some row's sequence reaches `length` tokens.

    place: "input" (the embedding, so it reaches states and KV cache), "output" (the last hidden state). back: how many
    tokens before the row's last one.
    """

    def __init__(self, engine, length, place, value=math.nan, back=0):
        self.model = model_of(engine)
        self.length, self.place, self.value, self.back = length, place, value, back
        self.forward, self.embed = self.model.forward, self.model.model.embed_tokens.forward
        self.model.forward = self
        self.done = False

    def __call__(self, input_ids, positions, kv_caches, attn_metadata, *args, **kwargs):
        at = None
        if not self.done and self.length in attn_metadata.seq_lens:
            self.done = True
            at = attn_metadata.query_starts[attn_metadata.seq_lens.index(self.length) + 1] - 1 - self.back
        if at is not None and self.place == "input":
            self.model.model.embed_tokens.forward = lambda ids: self.embed(ids).index_fill(0, torch.tensor([at]),
                                                                                         self.value)
        try:
            hidden = self.forward(input_ids, positions, kv_caches, attn_metadata, *args, **kwargs)
        finally:
            self.model.model.embed_tokens.forward = self.embed
        if at is not None and self.place == "output":
            hidden[at] = self.value
        return hidden

    def remove(self):
        self.model.forward = self.forward
        assert self.done, f"no row ever had {self.length} tokens"


@pytest.fixture
def fault():
    made = []

    def make(*args, **kwargs):
        made.append(Fault(*args, **kwargs))

    yield make
    for one in made:
        one.remove()


def collect(engine):
    """Steps until nothing is left: (last output of each request, failures)."""
    found, failures = {}, []
    for _ in range(1000):
        if not engine.has_unfinished_requests():
            return found, failures
        try:
            found.update({output.request_id: output for output in engine.step()})
        except NonFiniteLogits as failure:
            failures.append(failure)
    raise AssertionError("1000 steps were not enough")


def add_all(engine, params=None):
    for index, tokens in enumerate(PROMPTS):
        add(engine, str(index), tokens, params or greedy(TOKENS))


def assert_empty(engine, blocks=200):
    assert not engine.has_unfinished_requests() and not engine.fanouts._parents and not engine.fanouts._children
    assert engine.scheduler[0].block_manager.get_num_free_gpu_blocks() == blocks
    slots = engine.scheduler[0].slots
    assert slots is None or slots.num_free == 4


@pytest.fixture(scope="module")
def plain(qwen2):
    return run(make_engine(qwen2), PROMPTS, greedy(TOKENS), together=False)


@pytest.fixture(scope="module")
def engine(qwen2):
    return make_engine(qwen2, enable_prefix_caching=True, **FIELDS)


@pytest.fixture(scope="module")
def toy_engine(toy):
    return make_engine(toy, disable_log_stats=False, **FIELDS)


@pytest.fixture(scope="module")
def toy_plain(toy):
    return run(make_engine(toy), PROMPTS, greedy(TOKENS), together=False)


class TestRows:
    """Which rows count as bad, and how they are told."""

    @staticmethod
    def marked(logits, groups):
        metadata = SimpleNamespace(seq_groups=groups, skip_sampler_cpu_output=False)
        nonfinite.watch(logits, metadata)
        outputs = [SimpleNamespace(outputs=["fine"] * len(groups))]
        nonfinite.mark(outputs, metadata, None)
        return [getattr(one, "reason", one) for one in outputs[0].outputs]

    @staticmethod
    def decoding(row, length):
        return SimpleNamespace(is_prompt=False, seq_ids=[7], sample_indices=[row], prompt_logprob_indices=[],
                               seq_data={7: SimpleNamespace(get_len=lambda: length)})

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(("entries", "bad"), [
        ({3: math.nan}, True), ({3: math.inf}, True), ({0: math.inf, 1: math.nan}, True),
        ({3: -math.inf, 5: math.nan}, True), (dict.fromkeys(range(11), -math.inf), True),
        (dict.fromkeys(range(10), -math.inf), False), ({3: -math.inf}, False), ({3: -1e4, 4: 6e4}, False)])
    def test_values(self, dtype, entries, bad):
        logits = torch.randn(3, 11).to(dtype)
        for column, value in entries.items():
            logits[1, column] = value
        expected = ["fine", "non-finite logits at token position 20" if bad else "fine", "fine"]
        assert self.marked(logits, [self.decoding(row, 20 + row) for row in range(3)]) == expected

    def test_prompts(self):
        """Two pieces of prompts that want prompt logprobs (rows 0 to 4, and 5 to 7 without a sample), one decode."""
        def piece(rows, sample, seq_len, query_len):
            return SimpleNamespace(is_prompt=True, seq_ids=[0], seq_len=seq_len, query_len=query_len,
                                   prompt_logprob_indices=rows, sample_indices=sample)
        groups = [piece([0, 1, 2, 3], [4], 30, 5), piece([5, 6, 7], [], 19, 3), self.decoding(8, 9)]
        for row, index, position in ((0, 0, 25), (3, 0, 28), (4, 0, 29), (5, 1, 16), (7, 1, 18), (8, 2, 8)):
            logits = torch.zeros(9, 5)
            logits[row, 2] = math.nan
            expected = ["fine"] * 3
            expected[index] = f"non-finite logits at token position {position}"
            assert self.marked(logits, groups) == expected, row


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["input", "output"])
def test_one_of_three_fails(engine, plain, fault, place, value):
    fault(engine, LENGTH, place, value)
    add_all(engine)
    found, failures = collect(engine)
    assert [(one.request_ids, str(one)) for one in failures] == [(["2"], "non-finite logits at token position 73")]
    assert_same([found["0"], found["1"]], plain[:2])
    assert list(found["2"].outputs[0].token_ids) == list(plain[2].outputs[0].token_ids)[:4] and not found["2"].finished
    assert_empty(engine)
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)


@pytest.mark.parametrize("place", ["input", "output"])
def test_the_first_token_fails(engine, plain, fault, place):
    """And with it all that the prompt's step would have left in the prefix cache."""
    fault(engine, 70, place)
    fresh = [prompt(length, seed=length + (1 if place == "input" else 2)) for length in (100, 40, 70)]
    for index, tokens in enumerate(fresh):
        add(engine, str(index), tokens, greedy(TOKENS))
    found, failures = collect(engine)
    assert [str(one) for one in failures] == ["non-finite logits at token position 69"]
    assert sorted(found) == ["0", "1"]
    again = run(engine, fresh, greedy(TOKENS), together=False)
    assert [one.num_cached_tokens for one in again] == [96, 32, 0]
    assert_same([found["0"], found["1"]], again[:2])


def test_without_the_check_it_would_be_a_token(engine, plain, fault, monkeypatch):
    monkeypatch.setattr(nonfinite, "watch", lambda logits, metadata: None)
    fault(engine, LENGTH, "output")
    add_all(engine)
    found, failures = collect(engine)
    assert not failures and found["2"].finished and len(found["2"].outputs[0].token_ids) == TOKENS
    assert list(found["2"].outputs[0].token_ids) != list(plain[2].outputs[0].token_ids)


@pytest.mark.parametrize("params", [
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "seed": 5, "logprobs": None},
    {"temperature": 0.8, "min_p": 0.05, "seed": 9, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"temperature": 0.7, "seed": 3, "min_tokens": 3, "stop_token_ids": [5], "frequency_penalty": 0.7}], ids=str)
def test_the_others_draw_what_they_draw_alone(engine, fault, params):
    params = greedy(TOKENS, **params)
    alone = run(engine, PROMPTS, params, together=False)
    fault(engine, LENGTH, "output")
    add_all(engine, params)
    found, failures = collect(engine)
    assert len(failures) == 1
    for index in (0, 1):
        assert list(found[str(index)].outputs[0].token_ids) == list(alone[index].outputs[0].token_ids)


def test_masks_are_legal(engine, plain):
    """A mask that leaves one token, and one of the model's own entries at -inf."""
    class Only:
        def __call__(self, _, logits):
            mask = torch.full_like(logits, -math.inf)
            mask[42] = 0
            return logits + mask
    out, = run(engine, PROMPTS[:1], greedy(3, logits_processors=[Only()]))
    assert list(out.outputs[0].token_ids) == [42] * 3
    head = model_of(engine).logits_processor
    first, get_logits = plain[0].outputs[0].token_ids[0], head._get_logits
    head._get_logits = lambda *args: get_logits(*args).index_fill(1, torch.tensor([first]), -math.inf)
    try:
        out, = run(engine, PROMPTS[:1], greedy(3))
    finally:
        del head._get_logits
    assert len(out.outputs[0].token_ids) == 3 and first not in out.outputs[0].token_ids


@pytest.mark.parametrize("budget", [256, 64])
def test_prompt_logprobs(qwen2, fault, budget):
    """Found in the piece where it is, though that piece may give no token."""
    engine = make_engine(qwen2, **{**FIELDS, "max_num_batched_tokens": budget})
    fault(engine, 100 if budget == 256 else 64, "output", back=(99 if budget == 256 else 63) - 10)
    add(engine, "a", PROMPTS[0], greedy(TOKENS, prompt_logprobs=1))
    if budget == 64:
        add(engine, "b", PROMPTS[1], greedy(TOKENS))
    found, failures = collect(engine)
    assert [str(one) for one in failures] == ["non-finite logits at token position 10"]
    assert sorted(found) == ([] if budget == 256 else ["b"])
    assert_empty(engine)


@pytest.mark.parametrize("trusting", [False, True])
def test_the_prefix_cache_is_not_poisoned(qwen2, plain, fault, trusting, monkeypatch):
    """The fault is in the first piece of a prompt, whose blocks are in the cache when its last piece shows it. A second
    request has taken them from there; a third, which comes after, must not."""
    engine = make_engine(qwen2, enable_prefix_caching=True, **{**FIELDS, "max_num_batched_tokens": 64})
    if trusting:
        monkeypatch.setattr(engine.scheduler[0], "distrust", lambda group: None)
    fault(engine, 64, "input", back=50)
    tokens = PROMPTS[0]
    add(engine, "a", tokens, greedy(TOKENS))
    engine.step()
    add(engine, "b", tokens[:64] + prompt(60, seed=7), greedy(TOKENS))
    engine.step()
    scheduler = engine.scheduler[0]
    assert [group.request_id for group in scheduler.running] == ["b"] and scheduler.running[0].num_cached_tokens == 64
    add(engine, "c", tokens, greedy(TOKENS))
    found, failures = collect(engine)
    # Who trusts finds the last piece, too, and so is done before the second one.
    at = {"a": 99, **({"c": 99} if trusting else {}), "b": 123}
    assert [(one.request_ids, str(one)) for one in failures] == [
        ([name], f"non-finite logits at token position {place}") for name, place in at.items()]
    if not trusting:
        assert found["c"].num_cached_tokens == 0
        assert_same([found["c"]], plain[:1])
        again, = run(engine, [tokens], greedy(TOKENS))
        assert again.num_cached_tokens == 96, "what was computed well is cached as ever"
        assert_same([again], plain[:1])
        assert_empty(engine)


def test_blocks_with_nan_in_them_can_be_used_again(qwen2, plain, fault):
    """So few blocks that the next requests get those of the failed one, partly filled."""
    engine = make_engine(qwen2, **{**FIELDS, "num_gpu_blocks_override": 16}, max_model_len=256)
    fault(engine, 100, "input", back=99)
    add(engine, "0", PROMPTS[0], greedy(TOKENS))
    _, failures = collect(engine)
    assert [str(one) for one in failures] == ["non-finite logits at token position 99"]
    cache = engine.model_executor.driver_worker.cache_engine[0].gpu_cache[1]
    assert torch.isnan(cache).any()
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)
    assert_empty(engine, 16)


def test_all_samples_of_a_request_fail(engine, plain, fault):
    fault(engine, LENGTH, "input")
    add(engine, "many", PROMPTS[2], greedy(TOKENS, n=5))
    add(engine, "one", PROMPTS[0], greedy(TOKENS))
    found, failures = collect(engine)
    assert [(one.request_ids, str(one)) for one in failures] == [(["many"], "non-finite logits at token position 73")]
    assert_same([found["one"]], plain[:1])
    assert_empty(engine)
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), plain)


@pytest.mark.parametrize(("where", "layer"), [("state 0", 2), ("state 1", 3), ("tail 1", 3), ("input", 2),
                                              ("output", None)])
def test_the_layer_is_named(toy_engine, toy_plain, fault, where, layer):
    """The toy's linear layers are its layers 2 and 3."""
    engine, pool = toy_engine, pool_of(toy_engine)
    add_all(engine)
    found = {}
    if " " not in where:
        fault(engine, LENGTH, where)
    else:
        for _ in range(3):
            found.update({output.request_id: output for output in engine.step()})
        group = next(one for one in engine.scheduler[0].running if one.request_id == "2")
        slot = engine.scheduler[0].slots._slots[group.seqs[0].seq_id]
        kind, ordinal = where.split()
        (pool.recurrent if kind == "state" else pool.conv)[int(ordinal), slot] = math.nan
    rest, failures = collect(engine)
    found.update(rest)
    place = "no non-finite recurrent state" if layer is None else f"first seen in the recurrent state of layer {layer}"
    position = 72 if " " in where else 73
    assert [str(one) for one in failures] == [f"non-finite logits at token position {position} ({place})"]
    assert failures[0].request_ids == ["2"]
    assert_same([found["0"], found["1"]], toy_plain[:2])
    assert_empty(engine)
    assert_same(run(engine, PROMPTS, greedy(TOKENS)), toy_plain)


def test_outputs_processed_one_step_late(toy, toy_plain, fault, monkeypatch):
    """As on a card: a step is scheduled before the outputs of the last one are processed."""
    from vllm.config import ModelConfig
    monkeypatch.setattr(ModelConfig, "verify_async_output_proc", lambda *args: None)
    engine = make_engine(toy, **FIELDS)
    late = engine._advance_to_next_step
    steps = []
    monkeypatch.setattr(engine, "_advance_to_next_step", lambda *args: (steps.append(1), late(*args)))
    add_all(engine)
    fault(engine, LENGTH, "output")
    lengths = set()
    forward = model_of(engine).forward
    monkeypatch.setattr(model_of(engine), "forward", lambda *args, **kwargs: (
        lengths.update((kwargs.get("attn_metadata") or args[3]).seq_lens), forward(*args, **kwargs))[1])
    found, failures = collect(engine)
    monkeypatch.undo()
    assert steps, "outputs were not processed late"
    assert [one.request_ids for one in failures] == [["2"]] and "position 73 " in str(failures[0])
    assert LENGTH in lengths and LENGTH + 1 not in lengths, "no further step was spent on it"
    assert_same([found["0"], found["1"]], toy_plain[:2])
    assert_empty(engine)


SERVER = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, "enable_prefix_caching": True,
          "disable_log_requests": True, "disable_log_stats": True, **FIELDS}


async def three_streams(generate, tag):
    """[tokens as they came, and the exception at the end if any] of each prompt."""
    from vllm.sampling_params import RequestOutputKind

    async def one(index):
        tokens = []
        try:
            params = greedy(TOKENS, output_kind=RequestOutputKind.DELTA)
            async for output in generate({"prompt_token_ids": PROMPTS[index]}, params, f"{tag}{index}"):
                tokens += output.outputs[0].token_ids
        except NonFiniteLogits as failure:
            tokens.append((failure.request_ids, str(failure)))
        return tokens

    return await asyncio.gather(*(one(index) for index in range(3)))


def expected_streams(plain, tag=None):
    tokens = [list(output.outputs[0].token_ids) for output in plain]
    if tag is not None:
        tokens[2] = [*tokens[2][:4], ([f"{tag}2"], "non-finite logits at token position 73")]
    return tokens


def test_a_stream_of_the_asynchronous_engine(qwen2, plain):
    from vllm import AsyncEngineArgs, AsyncLLMEngine
    server = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(qwen2), **SERVER))

    async def main():
        fault = Fault(server.engine, LENGTH, "output")
        assert await three_streams(server.generate, "f") == expected_streams(plain, "f")
        fault.remove()
        assert server.is_running and not server.errored
        await server.check_health()
        assert await three_streams(server.generate, "g") == expected_streams(plain)
        server.shutdown_background_loop()

    asyncio.run(main())
    assert_empty(server.engine)


def test_a_stream_of_the_engine_process(qwen2, plain, tmp_path, monkeypatch):
    """The engine behind its sockets, here in a thread, and the client that the server uses."""
    import vllm.engine.multiprocessing.client as module
    from vllm import AsyncEngineArgs
    from vllm.engine.multiprocessing.engine import MQLLMEngine
    from vllm.usage.usage_lib import UsageContext
    monkeypatch.setattr(module, "init_tokenizer_from_configs", lambda **_: None)
    arguments = AsyncEngineArgs(model=str(qwen2), **SERVER)
    path = f"ipc://{tmp_path}/engine"
    server = MQLLMEngine.from_engine_args(arguments, UsageContext.API_SERVER, path)
    engine = server.engine
    stop, thread = serve_in_thread(server)

    async def main():
        client = module.MQLLMEngineClient(path, arguments.create_engine_config())
        await client.setup()

        def generate(tokens, params, name):
            return client.generate(prompt=tokens, sampling_params=params, request_id=name)

        fault = Fault(engine, LENGTH, "output")
        assert await three_streams(generate, "f") == expected_streams(plain, "f")
        fault.remove()
        await client.check_health()
        assert not client.errored
        assert await three_streams(generate, "g") == expected_streams(plain)
        stop.set()
        await client.abort("nobody")    # Something to wake up for.
        client.close()

    asyncio.run(main())
    thread.join(20)
    assert_empty(engine)
