"""Stock's chat handler and its callers, over a scripted engine: the answers are those of our own route."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from tests.helpers.fake_engine import (
    SMALL,
    USER,
    FakeEngine,
    application,
    client,
    comparable,
    gathered,
    post,
    stream,
    tokenizer,
)
from tests.helpers.tokenizer import tokenizer_folder
from vllm.entrypoints.openai import api_server_stock, run_batch
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ErrorResponse
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat
from vllm.entrypoints.openai.serving_engine import BaseModelPath, LoRAModulePath
from vllm.utils import FlexibleArgumentParser

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ANSWER = "Hm.\n</think>\n\nLook.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
REQUESTS = [{"tools": TOOLS}, {"max_completion_tokens": 5, "nosuch": {"a": 1}}, {"n": 2, "tools": None, "stop": "k"},
            {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "content": "4", "tool_call_id": "1"}], "tools": TOOLS, "tool_choice": "none"}]


class OwnEngine(FakeEngine):
    """What stock's callers ask of an engine besides. policy: of its scheduler."""

    policy = "fcfs"
    priority: int | None = None

    async def get_tokenizer(self, *_):
        await asyncio.sleep(0)
        return tokenizer()

    async def get_model_config(self):
        return model_config()

    async def get_scheduler_config(self):
        return SimpleNamespace(policy=self.policy)

    def generate(self, *args, priority=0, **more):
        self.priority = priority
        return super().generate(*args, **more)


def model_config(**changes):
    return SimpleNamespace(**{"model": str(tokenizer_folder(small=SMALL)), "revision": None, "hf_config": None,
                              "max_model_len": 4096, "max_logprobs": 20, "embedding_mode": False, **changes})


def handler(engine: FakeEngine, config=None, **arguments) -> OpenAIServingChat:
    """As stock's callers make it."""
    return OpenAIServingChat(engine, config or model_config(), [BaseModelPath("llm", "/model")], "helper", **{
        "lora_modules": None, "prompt_adapters": None, "request_logger": None, "chat_template": None, **arguments})


def request(**fields) -> ChatCompletionRequest:
    return ChatCompletionRequest(**{"model": "llm", "messages": USER, **fields})


@pytest.mark.parametrize("fields", REQUESTS, ids=str)
async def test_the_answer_is_our_routes(fields):
    with client(FakeEngine(ANSWER), response_role="helper") as http:
        expected = post(http, **fields)
    whole = (await handler(OwnEngine(ANSWER)).create_chat_completion(request(**fields))).model_dump()
    assert [comparable(one) for one in whole["choices"]] == [comparable(one) for one in expected["choices"]]
    assert whole["usage"] == expected["usage"]
    assert whole.keys() == expected.keys() and whole["choices"][0].keys() == expected["choices"][0].keys()


async def test_a_stream_is_text():
    events = [event async for event in await handler(OwnEngine(ANSWER)).create_chat_completion(
        request(stream=True, tools=TOOLS))]
    assert events[-1] == "data: [DONE]\n\n"
    with client(FakeEngine(ANSWER), response_role="helper") as http:
        expected = comparable(gathered(stream(http, tools=TOOLS)))
    assert comparable(gathered([json.loads(event[6:]) for event in events[:-1]])) == expected


async def test_a_stream_that_is_closed_is_aborted():
    engine = OwnEngine(ANSWER, delay=0.01)
    events = await handler(engine).create_chat_completion(request(stream=True))
    await anext(events)
    await events.aclose()
    assert len(engine.aborted) == 1


@pytest.mark.parametrize(("fields", "code", "param"), [
    ({"model": "other"}, 404, "model"),
    ({"messages": None}, 400, "messages"),
    ({"temperature": "warm"}, 400, "temperature"),
    ({"max_tokens": 5000}, 400, "max_tokens"),
])
async def test_what_cannot_be_served(fields, code, param):
    engine = OwnEngine()
    answer = await handler(engine).create_chat_completion(request(**fields))
    assert isinstance(answer, ErrorResponse) and (answer.code, answer.param) == (code, param), answer
    assert engine.requests == []


async def test_our_own_failure():
    answer = await handler(OwnEngine(ANSWER, error=KeyError("secret"), error_after=2)).create_chat_completion(request())
    assert isinstance(answer, ErrorResponse) and answer.code == 500 and "secret" not in answer.message, answer
    assert "chatcmpl-" in answer.message


async def test_the_models_sampling_defaults(tmp_path):
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.5, "top_k": 7}')
    engine = OwnEngine()
    await handler(engine, model_config(model=str(tmp_path))).create_chat_completion(request(top_k=3))
    params = engine.requests[0][1]
    assert (params.temperature, params.top_k) == (0.5, 3)
    file.write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object"):
        handler(engine, model_config(model=str(tmp_path)))


async def test_stocks_arguments_decide():
    ours = handler(OwnEngine("a"), model_config(max_model_len=77, max_logprobs=2), chat_template="{{ 'hi' }}",
                   enable_auto_tools=True, tool_parser="qwen3_coder", return_tokens_as_token_ids=True)
    whole = await ours.create_chat_completion(request(logprobs=True, tools=TOOLS))
    assert whole.choices[0].message.role == "helper"
    assert whole.usage.prompt_tokens == len(tokenizer()("hi").input_ids)
    assert whole.choices[0].logprobs.content[0].token.startswith("token_id:")
    refused = await ours.create_chat_completion(request(max_tokens=78))
    assert "77" in refused.message
    refused = await ours.create_chat_completion(request(logprobs=True, top_logprobs=3))
    assert "top_logprobs" in refused.message
    with pytest.raises(ValueError, match="LoRA"):
        handler(OwnEngine(), lora_modules=[LoRAModulePath("l", "/l")])


@pytest.mark.parametrize(("policy", "priority"), [("fcfs", 0), ("priority", 7)])
async def test_priorities(policy, priority):
    engine = OwnEngine()
    engine.policy = policy
    await handler(engine).create_chat_completion(request(priority=7))
    assert engine.priority == priority


@pytest.mark.parametrize(("kinds", "caching", "told"), [
    (["linear_attention", "attention"], True, True), (["linear_attention"], False, False), (["attention"], True, False),
    (None, True, False)])
async def test_ends_of_messages(kinds, caching, told):
    """An engine of this process is told of them where it has use for them."""
    engine = OwnEngine()
    engine.engine = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching))
    config = model_config(hf_config=SimpleNamespace(layers_block_type=kinds))
    await handler(engine, config).create_chat_completion(request())
    assert [beside is not None for beside in engine.beside] == [told], engine.beside


async def test_many_at_once_share_a_service(monkeypatch):
    from vllm.entrypoints.openai import serving_chat
    made = []
    original = serving_chat.standalone_service
    monkeypatch.setattr(serving_chat, "standalone_service", lambda *a, **b: made.append(original(*a, **b)) or made[-1])
    ours = handler(OwnEngine("a"))
    await asyncio.gather(*(ours.create_chat_completion(request()) for _ in range(5)))
    assert len(made) == 1


def test_our_route_goes_through_the_handler():
    app = application(FakeEngine(ANSWER))
    ours = app.state.openai_serving_chat
    assert type(ours) is OpenAIServingChat
    asked = []
    original = ours.answer
    ours.answer = lambda body, *rest: asked.append(body) or original(body, *rest)
    with TestClient(app) as http:
        post(http)
        stream(http, nosuch=1)
    assert [body.get("nosuch") for body in asked] == [None, 1]


def test_stocks_own_server():
    """Its routes, its start of them, our handler: what it answers is what our server answers."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", "/model", "--served-model-name", "llm", "--enable-auto-tool-choice", "--tool-call-parser",
         "qwen3_coder"])
    engine = OwnEngine(ANSWER)
    app = api_server_stock.build_app(args)
    api_server_stock.init_app_state(engine, model_config(), app.state, args)
    with TestClient(app) as stocks, client(FakeEngine(ANSWER)) as ours:
        for fields in REQUESTS:
            one, other = post(stocks, **fields), post(ours, **fields)
            assert [comparable(c) for c in one["choices"]] == [comparable(c) for c in other["choices"]]
            assert gathered(stream(stocks, **fields)).keys() == gathered(stream(ours, **fields)).keys()
        refused = stocks.post("/v1/chat/completions", json={"model": "llm", "messages": []})
        assert refused.status_code == 400 and "messages" in refused.json()["message"], refused.text


async def test_a_batch_file(tmp_path, monkeypatch):
    """Stock's runner over lines of which only some can be answered: each gets its own answer."""
    engine = OwnEngine(ANSWER)
    monkeypatch.setattr(run_batch.AsyncLLMEngine, "from_engine_args", lambda *_, **__: engine)
    bodies = [{"model": "llm", "messages": USER, **fields} for fields in REQUESTS]
    bodies += [{"model": "llm", "messages": USER, "stream": True}, {"messages": 3}, {}]
    source, result = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions",
                                          "body": body}) + "\n\n" for i, body in enumerate(bodies)))
    monkeypatch.setattr("sys.argv", ["run_batch", "-i", str(source), "-o", str(result), "--model", "/model",
                                     "--served-model-name", "llm"])
    await run_batch.main(run_batch.parse_args())
    lines = [json.loads(one) for one in result.read_text().splitlines()]
    assert [one["custom_id"] for one in lines] == [str(i) for i in range(len(bodies))]
    with client(FakeEngine(ANSWER)) as http:
        for body, answered in zip(bodies[:len(REQUESTS)], lines, strict=False):
            expected = post(http, **body)
            made = answered["response"]["body"]
            assert [comparable(one) for one in made["choices"]] == [comparable(one) for one in expected["choices"]]
            assert made["usage"] == expected["usage"] and answered["error"] is None
    assert [one["response"]["status_code"] for one in lines[len(REQUESTS):]] == [400, 400, 400]
    assert "stream" in lines[-3]["error"] and "messages" in lines[-2]["error"]["message"], lines[-3:]
