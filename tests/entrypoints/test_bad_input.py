"""What cannot be served: the status, OpenAI's error object, the field's name; never a 5xx, never a request to the
engine."""

from __future__ import annotations

import json

import pytest

from tests.helpers.fake_engine import USER, FakeEngine, client, post, stream
from vllm.overlay.engine.step_failure import NonFiniteLogits

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def refused(path, body, status=400, **changes):
    """The error object of a refused request."""
    engine = FakeEngine()
    response = client(engine, **changes).post(path, json=body)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert not engine.requests, "the engine was asked"
    return error


@pytest.mark.parametrize(("body", "param"), [
    ({}, "messages"), ({"model": "llm"}, "messages"), ({"model": "llm", "messages": []}, "messages"),
    ({"model": "llm", "messages": [{"content": "x"}]}, "messages[0].role"),
    ({"model": "llm", "messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": USER}, "model"),
    ({"model": "llm", "messages": USER, "max_tokens": -1}, "max_tokens"),
    ({"model": "llm", "messages": USER, "top_p": 1.1}, "top_p"),
    ({"model": "llm", "messages": USER, "temperature": "x"}, "temperature"),
    ({"model": "llm", "messages": USER, "response_format": {"type": "json_array"}}, "response_format.type"),
    ({"model": "llm", "messages": USER, "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "wat"}}}}, "response_format.json_schema.schema"),
    ({"model": "llm", "messages": USER, "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"model": "llm", "messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"model": "llm", "messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"model": "llm", "messages": USER, "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"model": "llm", "messages": USER, "stop_token_ids": [99999]}, "stop_token_ids"),
    ({"model": "llm",
      "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y"}}]}]},
     "messages[0].content[0].image_url"),
])
def test_chat(body, param):
    assert refused(CHAT, body)["param"] == param


@pytest.mark.parametrize(("body", "param"), [
    ({"model": "llm"}, "prompt"), ({"prompt": "x"}, "model"),
    ({"model": "llm", "prompt": "x", "logprobs": 21}, "logprobs"),
    ({"model": "llm", "prompt": ""}, "prompt"), ({"model": "llm", "prompt": "x", "guided_regex": "("}, "guided_regex"),
])
def test_completions(body, param):
    assert refused(TEXT, body)["param"] == param


@pytest.mark.parametrize("raw", [
    b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"model": "llm", "messages": "\xc3\x28"}', b"[" * 100_000,
    b"9" * 10_000,
    b'{"model": "llm", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"model": "llm", "messages": [{"role": "user", "content": "x"}], "seed": 1e999}',
    b'{"model": "llm", "messages": [{"role": "user", "content": "x"}], "top_p": 123' + b"0" * 400 + b"}",
])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bodies_that_are_not_what_they_should_be(path, raw):
    response = client(FakeEngine()).post(path, content=raw)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_limits_are_named_with_both_numbers():
    long = [{"role": "user", "content": "word " * 100}]
    error = refused(CHAT, {"model": "llm", "messages": long}, max_model_len=64)
    assert "maximum context length is 64 tokens" in error["message"], error
    assert error["code"] == "context_length_exceeded", error
    assert any(word.isdigit() and int(word) > 100 for word in error["message"].split()), error
    error = refused(TEXT, {"model": "llm", "prompt": "word " * 100}, max_model_len=64)
    assert "maximum context length" in error["message"] and error["param"] == "prompt", error
    error = refused(CHAT, {"model": "llm", "messages": USER, "max_tokens": 4097})
    assert "4097" in error["message"] and "maximum context length is 4096" in error["message"], error


def test_tools_where_the_server_cannot_read_calls():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for changes in ({"auto_tools": False}, {"tool_call_parser": None}):
        error = refused(CHAT, {"model": "llm", "messages": USER, "tools": tools}, **changes)
        assert "--enable-auto-tool-choice" in error["message"] and error["param"] == "tool_choice"
    assert post(client(FakeEngine("x"), auto_tools=False), tools=tools, tool_choice="none")


def test_a_conversation_that_the_template_refuses():
    error = refused(CHAT, {"model": "llm", "messages": USER}, chat_template="{{ raise_exception('not like this') }}")
    assert "not like this" in error["message"] and error["param"] == "messages"


def test_paths_and_methods():
    http = client(FakeEngine())
    for method, path, status in (("GET", "/nothing", 404), ("GET", CHAT, 405), ("GET", "/get_model_info", 404),
                                 ("GET", "/get_server_info", 404), ("POST", "/v1/embeddings", 404)):
        response = http.request(method, path)
        assert response.status_code == status, f"{method} {path}: {response.text}"
        assert response.json()["error"]["message"], response.text


def test_the_engine_refuses():
    """A ValueError before the first token is the request's fault; the client hears why."""
    engine = FakeEngine(error=ValueError("no room for 3 pictures"))
    response = client(engine).post(CHAT, json={"model": "llm", "messages": USER})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"] == "no room for 3 pictures", response.text


@pytest.mark.parametrize("error", [RuntimeError("boom"), ValueError("boom"), AssertionError()])
def test_the_engine_fails(error):
    """A 500 that names the request and says nothing of the inside; a stream ends with the error and [DONE]."""
    engine = FakeEngine("abc", error=error, error_after=1)
    http = client(engine)
    response = http.post(CHAT, json={"model": "llm", "messages": USER})
    body = response.json()["error"]
    assert response.status_code == 500 and body["type"] == "server_error", response.text
    assert "chatcmpl-" in body["message"] and "boom" not in body["message"], body
    chunks = stream(http)
    assert chunks[-1]["error"]["code"] == "internal_error", chunks
    assert chunks[-1]["error"]["message"].split("request ")[1].startswith(chunks[0]["id"])
    assert len(engine.aborted) == 2


def test_values_that_are_not_finite():
    """The one failure of the inside that a client hears of: what it got so far is right, and the model is at fault."""
    reason = "non-finite logits at token position 12 (first seen in the recurrent state of layer 4)"
    http = client(FakeEngine("abc", error=NonFiniteLogits(reason, ["x"]), error_after=1))
    response = http.post(CHAT, json={"model": "llm", "messages": USER})
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error", response.text
    assert response.json()["error"]["message"].endswith(f": {reason}."), response.text
    for path in (CHAT, "/v1/completions"):
        chunks = stream(http, path)
        assert chunks[-1]["error"]["message"].endswith(f": {reason}."), chunks


def test_api_keys():
    http = client(FakeEngine(), arguments=["--api-key", "secret"])
    body = {"model": "llm", "messages": USER}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer "}):
        response = http.post(CHAT, json=body, headers=headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key", headers
    assert http.post(CHAT, json=body, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert http.get("/health").status_code == 200
    assert http.get("/v1/models").status_code == 401
    assert http.get("/v1/models", headers={"authorization": "bearer secret"}).status_code == 200
    several = client(FakeEngine(), arguments=["--api-key", "one", "two"])
    for key, status in (("one", 200), ("two", 200), ("three", 401), ("one two", 401)):
        response = several.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == status, key


def test_errors_are_json_whatever_was_asked():
    response = client(FakeEngine()).post(CHAT, content="{",
                                         headers={"Content-Type": "text/plain", "Accept": "text/event-stream"})
    assert response.headers["content-type"] == "application/json"
    json.loads(response.text)


def test_too_high_a_limit_is_named_as_the_client_wrote_it():
    for path, prompt in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
        error = refused(path, {"model": "llm", **prompt, "max_completion_tokens": 10**9})
        assert error["param"] == "max_completion_tokens" and "max_completion_tokens is" in error["message"]
    assert refused(TEXT, {"model": "llm", "prompt": "x", "min_tokens": 10**9})["param"] == "min_tokens"


@pytest.mark.parametrize("body", [
    {"tools": [{"type": "function", "function": {"name": "a\ud800"}}],
     "tool_choice": {"type": "function", "function": {"name": "a\ud800"}}},
    {"messages": [*USER, {"role": "assistant", "content": "a\ud800"}], "continue_final_message": True, "echo": True},
])
def test_half_a_character_that_comes_back(body):
    """JSON can escape it, UTF-8 cannot carry it: the answer has a replacement character."""
    raw = json.dumps({"model": "llm", "messages": USER, "max_tokens": 100, **body})
    call = "</think><tool_call>\n<function=a\ufffd>\n</function>\n</tool_call>"
    response = client(FakeEngine(call)).post(CHAT, content=raw)
    assert response.status_code == 200, response.text
    assert "a\ufffd" in response.text
