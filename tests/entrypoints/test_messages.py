"""POST /v1/messages over a scripted engine: the message, and the events that build it."""

from __future__ import annotations

import base64
import hashlib
import json

import anthropic
import httpx2
import pytest

from tests.helpers.api_specs import assert_valid
from tests.helpers.fake_engine import EOS, FakeEngine, application, client, ids, named_events, tokenizer

PATH = "/v1/messages"
TOOL = {"name": "f", "description": "Does it.", "input_schema": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
CALL = ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n北京 \"x\"\n</parameter>\n"
        "</function>\n</tool_call>")
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
USER = [{"role": "user", "content": "hi"}]


def asked(**body) -> dict:
    return {"model": "llm", "max_tokens": 2000, "messages": USER, **body}


def create(engine: FakeEngine, /, **body) -> dict:
    response = client(engine).post(PATH, json=asked(**body))
    assert response.status_code == 200, response.text
    assert_valid(response.json(), "Message", "anthropic")
    return response.json()


def events_of(engine: FakeEngine, /, **body) -> list[dict]:
    """The events of a stream; asserts that each says its own name."""
    return named_events(client(engine).post(PATH, json=asked(stream=True, **body)))


def comparable(blocks: list[dict]) -> list[dict]:
    return [{name: value for name, value in block.items() if name not in ("id", "caller")} for block in blocks]


def thinking(text: str) -> dict:
    signature = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return {"type": "thinking", "thinking": text, "signature": signature}


def text(words: str) -> dict:
    return {"type": "text", "text": words, "citations": None}


def use(**arguments) -> dict:
    return {"type": "tool_use", "name": "f", "input": arguments}


def cut(words: str) -> int:
    return len(ids(words))


# name: (answer, request, content, stop_reason, stop_sequence)
CASES = {
    "silent about thought": ("Yes.", {}, [text("Yes.")], "end_turn", None),
    "thought and answer": ("Hm. 🎉\n</think>\n\nYes.", THINK, [thinking("Hm. 🎉"), text("Yes.")], "end_turn", None),
    "adaptive": ("Hm.\n</think>\n\nYes.", {"thinking": {"type": "adaptive"}}, [thinking("Hm."), text("Yes.")],
                 "end_turn", None),
    "disabled": ("Yes.", {"thinking": {"type": "disabled"}}, [text("Yes.")], "end_turn", None),
    "by the template's variable": ("Hm.\n</think>\n\nYes.", {"chat_template_kwargs": {"enable_thinking": True}},
                                   [thinking("Hm."), text("Yes.")], "end_turn", None),
    "a thought without its text": ("Hm.\n</think>\n\nYes.", {"thinking": {"type": "adaptive", "display": "omitted"}},
                                   [{**thinking("Hm."), "thinking": ""}, text("Yes.")], "end_turn", None),
    "cut in the thought": ("Hm hm hm", {"thinking": {"type": "adaptive"}, "max_tokens": 2},
                           [thinking(tokenizer().decode(ids("Hm hm hm")[:2]))], "max_tokens", None),
    "words and calls": (f"Look.\n{CALL}\n{CALL}", {"tools": [TOOL]},
                        [text("Look."), use(a=1, b='北京 "x"'), use(a=1, b='北京 "x"')], "tool_use", None),
    "one call at a time": (f"{CALL}\n{CALL}", {"tools": [TOOL], "tool_choice": {
        "type": "auto", "disable_parallel_tool_use": True}}, [use(a=1, b='北京 "x"')], "tool_use", None),
    "cut in a text": (CALL, {"tools": [TOOL], "max_tokens": cut(CALL[:CALL.index(" \"x")])}, [use(a=1, b="北京")],
                      "max_tokens", None),
    "cut behind a value": (CALL, {"tools": [TOOL], "max_tokens": cut(CALL[:CALL.index("<parameter=b>")])}, [use(a=1)],
                           "max_tokens", None),
    "cut before a value": (CALL, {"tools": [TOOL], "max_tokens": cut(CALL[:CALL.index("\n<parameter")])}, [use()],
                           "max_tokens", None),
    "a stop sequence": ("a b STOP c", {"stop_sequences": ["STOP"]}, [text("a b ")], "stop_sequence", "STOP"),
    "a control token as stop sequence": ("Hm.</think>Yes.", {**THINK, "stop_sequences": ["</think>"]},
                                         [thinking("Hm.")], "stop_sequence", "</think>"),
    "nothing": ("", {}, [], "end_turn", None),
}


@pytest.mark.parametrize("together", [1, 5, 1000])
@pytest.mark.parametrize("case", CASES)
def test_streamed_and_whole(case, together):
    """The events build, block by block and delta by delta, what the whole message is."""
    answer, request, content, reason, sequence = CASES[case]
    whole = create(FakeEngine(answer, together=together), **request)
    assert (comparable(whole["content"]), whole["stop_reason"], whole["stop_sequence"]) == (content, reason, sequence)
    events = events_of(FakeEngine(answer, together=together), **request)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    start = events[0]["message"]
    assert_valid(start, "Message", "anthropic")
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert comparable(built(events)) == content
    assert events[-2]["usage"] == whole["usage"]
    assert {name: events[-2]["delta"][name] for name in ("stop_reason", "stop_sequence")} == {
        "stop_reason": reason, "stop_sequence": sequence}


def built(events: list[dict]) -> list[dict]:
    """The blocks as a client builds them from events; asserts their order."""
    blocks: list[dict] = []
    json_text = ""
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks), event
            blocks.append(dict(event["content_block"]))
            is_open, json_text = True, ""
            assert not blocks[-1].get("text") and not blocks[-1].get("thinking") and not blocks[-1].get("input")
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1, event
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                json_text += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                assert delta[name], f"an empty delta: {event}"
                blocks[-1][name] += delta[name]
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == len(blocks) - 1, event
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = anthropic_input(json_text)
    assert not is_open
    return blocks


def anthropic_input(json_text: str) -> dict:
    """What a client makes of the deltas of a call: of a cut one, what is complete."""
    if not json_text:
        return {}
    for ending in ("", '"}', "}"):
        try:
            return json.loads(json_text + ending)
        except ValueError:
            continue
    raise AssertionError(f"no beginning of an object: {json_text}")


def test_usage():
    """What the cache held is counted beside what was computed."""
    answer = "Hm.\n</think>\n\nYes."
    engine = FakeEngine(answer, cached=7)
    usage = create(engine, **THINK)["usage"]
    prompt = len(engine.requests[0][0])
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt - 7, 7)
    assert usage["output_tokens"] == len(ids(answer)) + 1
    assert usage["output_tokens_details"] == {"thinking_tokens": len(ids("Hm.\n</think>"))}
    start = events_of(FakeEngine(answer, cached=7), **THINK)[0]["message"]["usage"]
    assert (start["input_tokens"], start["cache_read_input_tokens"]) == (prompt - 7, 7)


def test_count_tokens():
    engine = FakeEngine()
    http = client(engine)
    request = {"model": "llm", "messages": USER, "system": "Be brief.", "tools": [TOOL]}
    counted = http.post(f"{PATH}/count_tokens", json=request)
    assert counted.status_code == 200 and not engine.requests, counted.text
    http.post(PATH, json={**request, "max_tokens": 5})
    assert counted.json() == {"input_tokens": len(engine.requests[0][0])}


def prompt_of(path: str, **body) -> str:
    engine = FakeEngine("x")
    response = client(engine).post(path, json={"model": "llm", **body})
    assert response.status_code == 200, response.text
    return tokenizer().decode(engine.requests[0][0])


CHAT_TOOL = {"type": "function", "function": {"name": "f", "description": "Does it.",
                                              "parameters": TOOL["input_schema"]}}
SYSTEM = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=a1b2;"},
          {"type": "text", "text": "You are X.", "cache_control": {"type": "ephemeral"}},
          {"type": "text", "text": "Help."}]


@pytest.mark.parametrize(("request_body", "messages"), [
    ({"system": "Be brief.", "messages": USER}, [{"role": "system", "content": "Be brief."}, *USER]),
    ({"system": SYSTEM, "messages": USER}, [{"role": "system", "content": "You are X.\n\nHelp."}, *USER]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {
        "type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]}]}, [{"role": "user", "content": "ab"}]),
    ({"messages": [*USER, {"role": "system", "content": "Note."}, {"role": "user", "content": "go"}]},
     [*USER, {"role": "system", "content": "Note."}, {"role": "user", "content": "go"}]),
    ({"messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Look."}, {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "d", "name": "f", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "one"},
            {"type": "tool_result", "tool_use_id": "d", "is_error": True, "content": [{"type": "text", "text": "two"}]},
            {"type": "text", "text": "and now?"}]}]},
     [{"role": "user", "content": "go"},
      {"role": "assistant", "content": "Look.", "reasoning_content": "Hm.", "tool_calls": [
          {"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "f", "arguments": {}}}]},
      {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}, {"role": "user", "content": "and now?"}]),
    ({"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c"}]}]},
     [{"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [
         {"function": {"name": "f", "arguments": {"a": 1}}}]}, {"role": "tool", "content": ""}]),
    ({"messages": [{"role": "user", "content": [
        {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}},
        {"type": "search_result", "title": "S", "source": "u", "content": [{"type": "text", "text": "found"}]}]}]},
     [{"role": "user", "content": "T\nDS\nfound"}]),
])
def test_the_prompt_is_that_of_the_same_chat(request_body, messages):
    assert prompt_of(PATH, max_tokens=9, tools=[TOOL], **request_body) == prompt_of(
        "/v1/chat/completions", messages=messages, tools=[CHAT_TOOL], enable_thinking=False)


def test_an_answer_that_is_begun_is_continued():
    messages = [*USER, {"role": "assistant", "content": "I am"}]
    assert prompt_of(PATH, max_tokens=9, messages=messages).endswith("</think>\n\nI am")
    assert create(FakeEngine(" a model."), messages=messages)["content"] == [text(" a model.")]


def test_the_content_as_history_begins_the_next_prompt():
    """The blocks that a client sends back render as what was generated: the cache stays good."""
    answer = f"Hm.\n</think>\n\nLook.\n\n{CALL}"
    engine = FakeEngine(answer)
    request = asked(messages=[{"role": "user", "content": "go"}], tools=[TOOL], **THINK)
    content = client(engine).post(PATH, json=request).json()["content"]
    request["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "ok"}]}]
    client(engine).post(PATH, json=request)
    first, second = (tokens for tokens, _, _ in engine.requests)
    generated = first + ids(answer) + [EOS]
    assert second[:len(generated)] == generated, tokenizer().decode(second)


def test_limits_and_choices_reach_the_chat_request():
    engine = FakeEngine("x")
    create(engine, max_tokens=7, temperature=0.25, top_k=3, top_p=0.5, tools=[TOOL], tool_choice={"type": "none"},
           metadata={"user_id": "u"}, service_tier="auto", context_management={}, never_heard_of=[1])
    params = engine.requests[0][1]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (7, 0.25, 3, 0.5)
    assert params.logit_bias == {ids("<tool_call>")[0]: -100.0}


@pytest.mark.parametrize("fields", [
    {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
    {"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}},
    {"tools": [{**TOOL, "strict": True}]}, {**THINK, "max_tokens": 3000},
])
def test_forms_and_budgets_reach_the_chat_request(fields):
    engine = FakeEngine("x")
    create(engine, **fields)
    assert engine.requests[0][1].constraint is not None


@pytest.mark.parametrize(("body", "named"), [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens is 1000000"), ({"messages": None}, "messages"), ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"), ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"), ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": ["x"]}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}, {
        "type": "text", "text": 5}]}]}, "messages[0].content[1].text"),
    ({"messages": [*USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}, {
        "type": "text", "text": 5}]}, *USER]}, "messages[1].content[1].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": 5}]}]}]},
     "messages[0].content[0].content[0].text"),
    ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[1].content[0].name"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
     "messages[0].content[0].source"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].image_url"),
    ({"system": 5}, "system"), ({"system": [{"type": "text", "text": 5}]}, "system[0].content[0].text"),
    ({"tools": "x"}, "tools"), ({"tools": [5]}, "tools[0]"), ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}, {"input_schema": {}}]}, "tools[1].name"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"stop_sequences": "x"}, "stop_sequences"), ({"stop_sequences": ["x", ""]}, "stop_sequences"),
    ({"temperature": 3}, "temperature"), ({"thinking": {"type": "perhaps"}}, "thinking.type"),
    ({"thinking": 5}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "wat"}}}}, "output_config.format"),
    ({"model": None}, "model"),
])
def test_refused_in_anthropics_form(body, named):
    engine = FakeEngine()
    response = client(engine).post(PATH, json=asked(**body))
    assert response.status_code == 400, response.text
    error = response.json()
    assert_valid(error, "ErrorResponse", "anthropic")
    assert error["error"]["type"] == "invalid_request_error" and named in error["error"]["message"], error
    assert not engine.requests


def test_a_budget_above_the_limit_is_served():
    """qwen-code sends 32,000 of 8,000 with every request. The limit ends the thought, so no grammar has to."""
    engine = FakeEngine("Hm.\n</think>\n\nYes.")
    got = create(engine, thinking={"type": "enabled", "budget_tokens": 32000})
    assert comparable(got["content"]) == [thinking("Hm."), text("Yes.")], got
    params = engine.requests[0][1]
    assert (params.max_tokens, params.constraint) == (2000, None)


def test_what_clients_look_for_in_errors():
    """Claude Code shortens a conversation when it reads these words, and takes the numbers from them."""
    http = client(FakeEngine(), max_model_len=64)
    response = http.post(PATH, json=asked(messages=[{"role": "user", "content": "word " * 100}], max_tokens=5))
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error", error
    words = error["message"].split()
    assert words[:4] == ["prompt", "is", "too", "long:"] and words[-3:] == [">", "64", "maximum"], error
    assert int(words[4]) > 100
    for path, status, kind in ((PATH, 404, "not_found_error"), (f"{PATH}/batches", 404, "not_found_error")):
        response = http.post(path, json=asked(model="claude-x"))
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind), response.text
    response = http.post(PATH, content="{")
    assert response.status_code == 400 and response.json()["type"] == "error", response.text


def test_a_failure_in_the_stream_is_its_last_event():
    events = events_of(FakeEngine("abc", error=RuntimeError("boom"), error_after=1))
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert events[-1]["request_id"] in events[-1]["error"]["message"] and "boom" not in str(events[-1])
    response = client(FakeEngine("abc", error=RuntimeError("boom"))).post(PATH, json=asked())
    assert response.status_code == 500 and response.json()["error"]["type"] == "api_error"
    assert_valid(response.json(), "ErrorResponse", "anthropic")


def test_api_keys():
    http = client(FakeEngine(), arguments=["--api-key", "secret"])
    for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "Bearer wrong"}):
        response = http.post(PATH, json=asked(), headers=headers)
        assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error", response.text
    for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
        assert http.post(PATH, json=asked(), headers=headers).status_code == 200, headers


async def test_anthropic_package():
    """Its own accumulation of a stream gives the message that it parses."""
    engine = FakeEngine(f"Hm.\n</think>\n\nLook.\n{CALL}", together=3)
    api = anthropic.AsyncAnthropic(base_url="http://testserver", api_key="none", max_retries=0, http_client=(
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=application(engine)))))
    request = {"model": "llm", "max_tokens": 2000, "messages": USER, "tools": [TOOL], **THINK}
    answer = await api.messages.create(**request)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert answer.content[2].input == {"a": 1, "b": '北京 "x"'} and answer.stop_reason == "tool_use"
    async with api.messages.stream(**request) as stream:
        assert "".join([piece async for piece in stream.text_stream]) == "Look."
        final = await stream.get_final_message()
    assert [(block.type, getattr(block, "input", None)) for block in final.content] == [
        (block.type, getattr(block, "input", None)) for block in answer.content]
    assert (final.stop_reason, final.usage.output_tokens) == (answer.stop_reason, answer.usage.output_tokens)
    assert (await api.messages.count_tokens(model="llm", messages=USER)).input_tokens > 5
    with pytest.raises(anthropic.BadRequestError):
        await api.messages.create(**{**request, "max_tokens": 5000})
    with pytest.raises(anthropic.NotFoundError):
        await api.messages.create(**{**request, "model": "other"})
