"""/openapi.json: valid, and true of what the server takes."""

from __future__ import annotations

import jsonschema
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as how
from hypothesis import strategies as st

from tests.helpers.fake_engine import USER, FakeEngine, client

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | (
    st.text(max_size=5))
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.text(max_size=5), inner, max_size=3), max_leaves=4)
# What a request has that is valid and silent about everything else.
LEAST = {
    "/v1/chat/completions": {"model": "llm", "messages": USER},
    "/v1/completions": {"model": "llm", "prompt": "hi"},
    "/v1/responses": {"model": "llm", "input": "hi"},
    "/v1/messages": {"model": "llm", "messages": USER, "max_tokens": 5},
    "/tokenize": {"prompt": "hi"},
}
# Checked, but not by a rule that a schema of one field could state.
BEYOND_A_SCHEMA = frozenset({
    "tools", "tool_choice", "functions", "function_call", "logit_bias", "best_of", "n", "min_tokens", "logprobs",
    "top_logprobs", "prompt_logprobs", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "chat_template", "chat_template_kwargs", "reasoning", "reasoning_effort",
    "thinking", "stream_options", "logprob_token_ids", "use_beam_search", "prompt_embeds", "stop",
    "stop_token_ids", "allowed_token_ids", "request_id", "suffix", "modalities", "truncate_prompt_tokens", "echo",
    "continue_final_message", "output_config", "output_format", "text", "previous_response_id",
    "conversation", "prompt", "background", "input", "messages", "enable_thinking", "guided_json_object",
    "thinking_token_budget", "thinking_budget", "include", "guided_whitespace_pattern", "max_completion_tokens",
    "system"})


@pytest.fixture(scope="module")
def http():
    return client(FakeEngine("x"), arguments=["--disable-log-requests"], log_requests=False)


@pytest.fixture(scope="module")
def document(http):
    return http.get("/openapi.json").json()


def body_of(document, path) -> dict:
    return document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def test_the_document(document):
    assert document["openapi"].startswith("3.1")
    for path, least in LEAST.items():
        schema = body_of(document, path)
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(least, schema)
        for name in least:
            missing = {key: value for key, value in least.items() if key != name}
            assert not jsonschema.Draft202012Validator(schema).is_valid(missing), (path, name)
    assert "get" in document["paths"]["/v1/models"]
    assert "429" in document["paths"]["/v1/messages"]["post"]["responses"]


def test_what_else_it_says_is_true(http, document):
    """Found by schemathesis: an empty answer, methods, a field that has no meaning, and what is too long or large."""
    assert "content" not in document["paths"]["/health"]["get"]["responses"]["200"] and not http.get("/health").content
    for path in ("/health", "/version", "/v1/models", "/v1/models/llm"):
        assert http.delete(path).headers["allow"] == "GET, HEAD", path
    assert http.get("/tokenize").headers["allow"] == "POST"
    for body, status in (({"tokens": [5], "model": "llm"}, 200), ({"tokens": [5], "model": {}}, 200),
                         ({"tokens": []}, 200), ({"tokens": {}}, 400), ({"tokens": ""}, 400),
                         ({"tokens": [10**7]}, 400)):
        valid = jsonschema.Draft202012Validator(body_of(document, "/detokenize")).is_valid(body)
        response = http.post("/detokenize", json=body)
        assert (response.status_code, valid) == (status, status == 200), (body, response.text)
    # A limit that does not fit the context is refused only where something is generated.
    for path, status in (("/v1/chat/completions", 400), ("/v1/chat/completions/render", 200)):
        body = {**LEAST["/v1/chat/completions"], "max_tokens": 10**7}
        valid = jsonschema.Draft202012Validator(body_of(document, path)).is_valid(body)
        assert (http.post(path, json=body).status_code, valid) == (status, status == 200), path
    # Fields that are not read are not in it.
    assert "stop" not in body_of(document, "/v1/messages")["properties"]
    long = {**LEAST["/v1/completions"], "request_id": "x" * 129}
    assert not jsonschema.Draft202012Validator(body_of(document, "/v1/completions")).is_valid(long)
    assert http.post("/v1/completions", json=long).status_code == 400


ABSENT = object()
EMPTY = (None, "", [], {}, 0, False, ABSENT)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def changed(held: dict, where: tuple, value) -> dict:
    """The value at a path of keys replaced, or taken away."""
    key, *rest = where
    if rest:
        return {**held, key: changed(held[key], tuple(rest), value)}
    return {name: old for name, old in held.items() if name != key} | ({} if value is ABSENT else {key: value})


@pytest.mark.parametrize("path, field", [
    ("/v1/chat/completions", "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages"),
    ("/v1/messages", "system")])
def test_what_is_empty_in_messages(http, document, path, field):
    """Histories hold everything; the document says what of it is refused."""
    judge, wrong = jsonschema.Draft202012Validator(body_of(document, path)), []
    part, made = {"type": "text", "text": "hi"}, []
    for value in EMPTY:
        parts = [[changed(part, (name, ), value)] for name in part] + [[value]] * (value is not ABSENT)
        if field == "system":
            made += parts + [value] * (value is not ABSENT)
            continue
        made += [[{"role": "user", "content": one}] for one in parts]
        made += [[changed({"role": role, "content": "hi"}, ("content", ), value)] for role in ("user", "assistant")]
        made.append([changed({"role": "user", "content": "hi"}, ("role", ), value)])
        if path == "/v1/chat/completions":
            made += [[{"role": "assistant", "tool_calls": [changed(CALL, where, value)]}] for where in (
                ("id", ), ("type", ), ("function", ), ("function", "name"), ("function", "arguments"))]
            made += [[changed({"role": role, "content": "hi"}, (name, ), value)] for role, name in (
                ("assistant", "tool_calls"), ("tool", "tool_call_id"), ("tool", "content"))]
    for messages in made:
        body = {**LEAST[path], field: messages}
        status = http.post(path, json=body).status_code
        if status not in (200, 400) or (status == 200) is not judge.is_valid(body):
            wrong.append((status, messages))
    assert not wrong, wrong


@pytest.mark.parametrize("path", LEAST)
@how(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_one_field_of_any_value(http, document, path, data):
    """Whatever it is: no 5xx; and where the schema tells all of the rule, what is valid is served, the rest refused by
    name."""
    schema = body_of(document, path)
    name = data.draw(st.sampled_from(sorted(set(schema["properties"]) - {"model"})))
    value = data.draw(JSON)
    body = {**LEAST[path], name: value}
    response = http.post(path, json=body)
    assert response.status_code in (200, 400), (name, value, response.text[:300])
    if name in BEYOND_A_SCHEMA:
        return
    valid = jsonschema.Draft202012Validator(schema).is_valid(body)
    assert (response.status_code == 200) is valid, (name, value, schema["properties"][name], response.text[:300])
    if not valid:
        assert name in response.json()["error"]["message"], (name, value, response.text)


@pytest.mark.parametrize("path", [*LEAST, "/detokenize", "/v1/chat/completions/render", "/v1/responses/input_tokens",
                                  "/v1/messages/count_tokens"])
@how(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bodies_of_any_kind(http, path, data):
    """Never a 5xx, never anything but JSON."""
    names = ["model", "messages", "prompt", "input", "tokens", "max_tokens", "stream", "tools", "system", "stop"]
    body = data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=5) | JSON)
    response = http.post(path, json=body)
    assert response.status_code in (200, 400, 404), (body, response.text[:300])
    assert response.headers["content-type"].startswith(("application/json", "text/event-stream"))
