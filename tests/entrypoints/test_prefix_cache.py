"""What the API says about the prefix cache, and what it tells the engine, over an engine that a test plays."""

from __future__ import annotations

import asyncio
import pickle
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import zmq

from tests.helpers.fake_engine import FakeEngine, client, ids, post, stream, tokenizer
from vllm.engine.multiprocessing import (
    IPC_INPUT_EXT,
    IPC_OUTPUT_EXT,
    MQEngineDeadError,
    RPCAbortRequest,
    RPCError,
)
from vllm.engine.multiprocessing import client as stock_client
from vllm.engine.multiprocessing.engine import MQLLMEngine
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.overlay.prefix_cache.reset import PrefixCacheIsReset, ResetPrefixCache
from vllm.overlay.serving.engine_client import Engine, _fail
from vllm.overlay.serving.patient_client import PatientClient
from vllm.utils import FlexibleArgumentParser

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]


class Caching(FakeEngine):
    """Reports the cached tokens it is told, one number for each request; an output later, one more count of the same
    request is reported, as it happens with several samples."""

    def __init__(self, *reported: Sequence[int], **options) -> None:
        super().__init__(**options)
        self.reported = [list(counts) for counts in reported]

    async def generate(self, *args, **kwargs):
        counts = self.reported.pop(0)
        async for output in super().generate(*args, **kwargs):
            output.num_cached_tokens = counts.pop(0) if len(counts) > 1 else counts[0]
            yield output


def cached(body: dict) -> int:
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("count", [0, 7])
def test_cached_tokens(path, count):
    """In whole and streamed answers, a miss among them; in every chunk that has usage."""
    assert cached(post(client(Caching([count])), path)) == count
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(client(Caching([count])), path, stream_options=options)
    assert len(chunks) > 2 and [cached(chunk) for chunk in chunks] == [count] * len(chunks)


def test_an_engine_that_says_nothing_has_cached_nothing():
    assert cached(post(client(FakeEngine()))) == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_samples_share_their_prompt(path):
    """Its tokens count once, and so do those that were cached: what the engine said last."""
    body = post(client(Caching([40, 3])), path, n=3)
    assert cached(body) == 3 < body["usage"]["prompt_tokens"] + 40


def test_prompts_add_up():
    body = post(client(Caching([5], [0], [7])), "/v1/completions", prompt=["one", "two", "three"])
    assert cached(body) == 12
    assert body["usage"]["prompt_tokens"] == sum(len(ids(text)) for text in ("one", "two", "three"))


@pytest.mark.parametrize("wanted, path, body", [
    (True, "/v1/chat/completions", {"messages": MESSAGES}), (False, "/v1/chat/completions", {"messages": MESSAGES}),
    (True, "/v1/responses", {"instructions": "Be brief.", "input": MESSAGES[1:]}),
    (True, "/v1/messages", {"system": "Be brief.", "messages": MESSAGES[1:], "max_tokens": 20,
                            "thinking": {"type": "adaptive"}})])
def test_boundaries_go_to_an_engine_that_has_use_for_them(wanted, path, body):
    """By each of the APIs that take messages, the same ones; a completion has none."""
    engine = FakeEngine()
    http = client(engine, boundaries=wanted)
    got = http.post(path, json={"model": "llm", **body})
    assert got.status_code == 200, got.text
    post(http, "/v1/completions")
    tokens = engine.requests[0][0]
    sent, completion = engine.beside
    assert completion is None
    if not wanted:
        assert sent is None
        return
    assert set(sent) == {"boundaries"}
    pieces = [tokenizer().decode(tokens[first:last])
              for first, last in zip((0, *sent["boundaries"]), (*sent["boundaries"], None), strict=True)]
    assert pieces == ["<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\none<|im_end|>\n",
                      "<|im_start|>assistant\ntwo<|im_end|>\n", "<|im_start|>user\nthree<|im_end|>\n",
                      "<|im_start|>assistant\n<think>\n"]


@pytest.mark.parametrize("path, body", [
    ("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "one"}),
    ("/v1/completions", {"prompt": [1, 2, 3]}), ("/v1/responses", {"input": "one"}),
    ("/v1/messages", {"messages": MESSAGES[1:], "max_tokens": 20})])
def test_a_salt_goes_to_the_engine(path, body):
    engine = FakeEngine()
    http = client(engine)
    for salt in ("tenant 1", None, ""):
        got = http.post(path, json={"model": "llm", **body, "cache_salt": salt})
        assert got.status_code == 200, got.text
        assert (engine.beside[-1] or {}).get("cache_salt") == (salt or None)
    refused = http.post(path, json={"model": "llm", **body, "cache_salt": 7})
    assert refused.status_code == 400 and "cache_salt" in refused.json()["error"]["message"], refused.text


def test_reset_is_served_where_it_was_asked_for():
    engine = FakeEngine()
    without = client(engine).post("/reset_prefix_cache")
    assert (without.status_code, engine.resets) == (404, 0) and without.json()["error"], without.text
    http = client(engine, ["--enable-reset-prefix-cache"])
    done = http.post("/reset_prefix_cache")
    assert (done.status_code, done.content, engine.resets) == (200, b"", 1)
    assert http.get("/reset_prefix_cache").status_code == 405
    engine.healthy = RuntimeError("the engine is gone")
    failed = http.post("/reset_prefix_cache")
    assert failed.status_code == 500 and "error" in failed.json(), failed.text


def test_reset_needs_the_key_that_requests_need():
    engine = FakeEngine()
    http = client(engine, ["--enable-reset-prefix-cache", "--api-key", "secret"])
    assert http.post("/reset_prefix_cache").status_code == 401 and not engine.resets
    assert http.post("/reset_prefix_cache", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_help_names_the_option():
    text = " ".join(make_arg_parser(FlexibleArgumentParser()).format_help().split())
    assert "--enable-reset-prefix-cache serve POST /reset_prefix_cache" in text, text[-3000:]


class EngineEnd:
    """The engine's end of the sockets between it and a client; `answer` is what stock would send as outputs."""

    def __init__(self, path: str) -> None:
        self.context = zmq.Context()
        self.input, self.output = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.input.bind(path + IPC_INPUT_EXT)
        self.output.bind(path + IPC_OUTPUT_EXT)

    def answer(self, outputs) -> None:
        self.output.send(pickle.dumps(outputs))


@pytest.fixture
async def ends(monkeypatch):
    """(a client, the engine's end)."""
    monkeypatch.setattr(stock_client, "init_tokenizer_from_configs", lambda **_: None)
    config = SimpleNamespace(model_config=None, decoding_config=None, scheduler_config=None, parallel_config=None,
                             lora_config=None)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        engine = EngineEnd(f"ipc://{folder}/x")
        made = PatientClient(f"ipc://{folder}/x", config)
        yield made, engine
        made.close()
        engine.context.destroy(linger=0)


async def received(engine: EngineEnd):
    return pickle.loads(await asyncio.get_running_loop().run_in_executor(None, engine.input.recv))


async def test_reset_waits_for_the_engines_answer(ends):
    made, engine = ends
    waiting = asyncio.ensure_future(made.reset_prefix_cache())
    message = await received(engine)
    assert isinstance(message, ResetPrefixCache)
    engine.answer([PrefixCacheIsReset("another")])
    await asyncio.sleep(0.1)
    assert not waiting.done()
    engine.answer([PrefixCacheIsReset(message.request_id)])
    await asyncio.wait_for(waiting, 5)
    assert not made.output_queues


async def test_reset_of_an_engine_that_ends(ends):
    """Whoever waits hears of it, in each of the ways in which it is noticed; and nobody begins to wait."""
    made, engine = ends
    waiting = asyncio.ensure_future(made.reset_prefix_cache())
    message = await received(engine)
    engine.answer(RPCError(message.request_id, False, ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        await asyncio.wait_for(waiting, 5)
    waiting = asyncio.ensure_future(made.reset_prefix_cache())
    await received(engine)
    _fail(Engine(made), "killed")
    with pytest.raises(RuntimeError, match="^killed$"):
        await asyncio.wait_for(waiting, 5)
    made._errored_with = RuntimeError("dead")
    with pytest.raises(MQEngineDeadError):
        await made.reset_prefix_cache()
    assert not made.output_queues


def test_the_engines_process_answers_when_it_is_done():
    """An abort is an abort."""
    done = []
    engine = object.__new__(MQLLMEngine)
    engine.engine = SimpleNamespace(reset_prefix_cache=lambda: done.append("reset"), abort_request=done.append)
    engine.log_requests = False
    engine._send_outputs = done.append
    engine._handle_abort_request(ResetPrefixCache("r"))
    engine._handle_abort_request(RPCAbortRequest("a"))
    assert done == ["reset", [PrefixCacheIsReset("r")], "a"]
