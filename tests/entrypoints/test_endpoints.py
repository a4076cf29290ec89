"""The small endpoints, and the openai package as a client."""

from __future__ import annotations

import json
from concurrent.futures import Future

import openai
import pytest
from starlette.testclient import TestClient

from tests.helpers.fake_engine import USER, FakeEngine, application, client, ids, tokenizer
from vllm.version import __version__

TOOLS = [{"type": "function",
          "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def test_models():
    http = client(FakeEngine(), max_model_len=262144)
    body = http.get("/v1/models").json()
    assert [(model["id"], model["max_model_len"], model["object"]) for model in body["data"]] == [
        ("llm", 262144, "model"), ("alias", 262144, "model")]
    assert http.get("/v1/models/alias").json() == body["data"][1]
    assert http.get("/v1/models/other").status_code == 404


def test_version():
    response = client(FakeEngine()).get("/version")
    assert response.json() == {"version": __version__} and response.headers["content-type"] == "application/json"


def test_health():
    engine = FakeEngine()
    assert client(engine).get("/health").status_code == client(engine).head("/health").status_code == 200
    engine.healthy = RuntimeError("its loop has ended")
    response = client(engine).get("/health")
    assert response.status_code == 503 and "its loop has ended" in response.json()["error"]["message"]


def test_health_of_a_server_whose_engine_is_gone():
    """From the moment that the server knows, not from the client's next heartbeat."""
    app = application(FakeEngine())
    app.state.failed = Future()
    assert TestClient(app).get("/health").status_code == 200
    app.state.failed.set_result("it was killed by signal 9")
    response = TestClient(app).get("/health")
    assert response.status_code == 503 and "killed by signal 9" in response.json()["error"]["message"], response.text


@pytest.mark.parametrize("path", ["/get_model_info", "/get_server_info"])
def test_what_other_servers_answer_is_not_there(path):
    """The platform's harness asks these before /version, and takes the first that answers for what we are."""
    assert client(FakeEngine()).get(path).status_code == 404


def test_metrics():
    response = client(FakeEngine()).get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")


def openai_client(engine: FakeEngine, **changes) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client(engine, **changes),
                         max_retries=0)


def test_openai_package_chat():
    api = openai_client(FakeEngine("Hm.\n</think>\n\nYes."))
    answer = api.chat.completions.create(model="llm", messages=USER)
    assert answer.choices[0].message.content == "Yes."
    assert answer.choices[0].message.reasoning_content == "Hm."
    chunks = list(api.chat.completions.create(model="llm", messages=USER, stream=True,
                                              stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Yes."
    assert chunks[-1].usage == answer.usage
    assert [model.id for model in api.models.list()] == ["llm", "alias"]


def test_openai_package_tools():
    api = openai_client(FakeEngine(CALL))
    request = {"model": "llm", "messages": USER, "tools": TOOLS, "extra_body": {"enable_thinking": False}}
    call = api.chat.completions.create(**request).choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments, call.type) == ("f", '{"a": 1}', "function")
    with api.chat.completions.stream(**request) as events:
        final = events.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'


def test_openai_package_completions():
    api = openai_client(FakeEngine("b c"))
    assert api.completions.create(model="llm", prompt="a").choices[0].text == "b c"
    assert "".join(chunk.choices[0].text
                   for chunk in api.completions.create(model="llm", prompt="a", stream=True)) == "b c"


def test_openai_package_errors():
    api = openai_client(FakeEngine("x"), max_model_len=64)
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="llm", messages=[{"role": "user", "content": "word " * 100}])
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="other", messages=USER)
    failing = openai_client(FakeEngine("abc", error=RuntimeError("x"), error_after=1))
    with pytest.raises(openai.APIError, match="failed on request"):
        list(failing.chat.completions.create(model="llm", messages=USER, stream=True))


def test_tokenize_and_detokenize():
    http = client(FakeEngine())
    body = http.post("/tokenize", json={"model": "llm", "prompt": "héllo", "unknown": 1}).json()
    assert body == {"count": len(ids("héllo")), "max_model_len": 4096, "tokens": ids("héllo"), "token_strs": None}
    strings = http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()["token_strs"]
    assert strings == tokenizer().convert_ids_to_tokens(ids("héllo")), strings
    chat = http.post("/tokenize", json={"model": "llm", "messages": USER}).json()
    assert http.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {
        "prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"}
    for path, wrong in (("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/detokenize", {}), ("/tokenize", []),
                        ("/detokenize", {"tokens": [10**9]}), ("/detokenize", {"tokens": ["a"]})):
        response = http.post(path, json=wrong)
        assert response.status_code == 400, f"{path} {wrong}: {response.text}"


def test_render_is_what_generation_reads():
    """Of any chat request: the text and the ids that the engine gets, and nothing is generated."""
    engine = FakeEngine(CALL)
    http = client(engine)
    for fields in ({}, {"enable_thinking": False, "tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"},
                   {"messages": [*USER, {"role": "assistant", "content": "I am"}], "continue_final_message": True},
                   {"messages": [{"role": "user", "content": "a\ud83c"}], "preserve_thinking": True}):
        body = json.dumps({"model": "llm", "messages": USER, "max_tokens": 5, **fields})
        rendered = http.post("/v1/chat/completions/render", content=body)
        assert rendered.status_code == 200 and not engine.requests, rendered.text
        assert http.post("/v1/chat/completions", content=body).status_code == 200
        (tokens, _, _) = engine.requests.pop()
        assert rendered.json() == {"prompt": tokenizer().decode(tokens), "prompt_token_ids": tokens}
    for wrong in ({}, {"messages": USER}, {"model": "other", "messages": USER}, []):
        assert http.post("/v1/chat/completions/render", json=wrong).status_code in (400, 404)


def test_what_can_be_read_can_be_asked_for_without_its_body():
    http = client(FakeEngine())
    for path in ("/v1/models", "/v1/models/llm", "/version", "/health"):
        assert http.head(path).status_code == http.get(path).status_code == 200, path
    assert http.head("/v1/models/other").status_code == 404


def test_apis_of_other_models_are_not_there_and_say_so():
    for path in ("/v1/embeddings", "/v1/rerank", "/v1/audio/speech", "/v1/images/generations", "/v1/moderations",
                 "/v2"):
        response = client(FakeEngine()).post(path, json={"model": "llm", "input": "x"})
        error = response.json()["error"]
        assert response.status_code == 404 and set(error) == {"message", "type", "param", "code"}, response.text
        assert path in error["message"] and "/v1/chat/completions" in error["message"], error
        assert error["code"] == "unknown_url"


def test_tokenize_runs_no_template_of_the_request():
    """A template is a program: it needs --trust-request-chat-template here as it does in chat."""
    response = client(FakeEngine()).post("/tokenize", json={"messages": USER, "chat_template": "{{ 1 / 0 }}"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")
