"""POST /v1/responses over a scripted engine: the response object and the events that build it."""

from __future__ import annotations

import openai
import pytest

from tests.helpers.api_specs import assert_valid, spec
from tests.helpers.fake_engine import EOS, FakeEngine, client, ids, named_events, post, tokenizer
from vllm.overlay.serving.responses.sealed import unsealed

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "f", "description": "Does it.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}
CALL = ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n北京 \"x\"\n</parameter>\n"
        "</function>\n</tool_call>")
ARGUMENTS = '{"a": 1, "b": "北京 \\"x\\""}'
THINKING_OFF = {"reasoning": {"effort": "none"}}
# Events of OpenAI's that the Open Responses schema names otherwise.
UNLISTED = ("response.reasoning_text.delta", "response.reasoning_text.done", "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done")


def create(engine: FakeEngine, /, **body) -> dict:
    response = client(engine).post(PATH, json={"model": "llm", "input": "hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events_of(engine: FakeEngine, /, **body) -> list[dict]:
    """The events of a stream; asserts that they are well formed and numbered, and that each says its own name."""
    events = named_events(client(engine).post(PATH, json={"model": "llm", "input": "hi", "stream": True, **body}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        if event["type"] not in UNLISTED and not is_extension(event.get("item") or event.get("response", {})):
            errors = spec("openresponses").validate_sse_event(event["type"], event)
            assert not errors, f"{errors}\n{event}"
    return events


def is_extension(thing: dict) -> bool:
    """Whether an item or response is of OpenAI's that the Open Responses schema does not have."""
    listed = thing.get("output", []) + thing.get("tools", [])
    return thing.get("type") == "custom_tool_call" or any(
        item["type"] in ("custom_tool_call", "custom", "namespace") for item in listed)


def comparable(items: list[dict]) -> list[dict]:
    """Items without what is made up: ids."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def message(text: str, status: str = "completed") -> dict:
    return {"type": "message", "status": status, "role": "assistant",
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]}


def reasoning(text: str, status: str = "completed") -> dict:
    return {"type": "reasoning", "status": status, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def function_call(arguments: str = ARGUMENTS, status: str = "completed") -> dict:
    return {"type": "function_call", "status": status, "name": "f", "arguments": arguments}


# name: (answer, request, output items, status)
CASES = {
    "thought and answer": ("Hm. 🎉\n</think>\n\nYes.", {}, [reasoning("Hm. 🎉"), message("Yes.")], "completed"),
    "no thought": ("Yes.", THINKING_OFF, [message("Yes.")], "completed"),
    "a thought that is not shown": ("Hm.\n</think>\n\nYes.", {"include_reasoning": False}, [message("Yes.")],
                                    "completed"),
    "cut in the thought": ("Hm hm hm", {"max_output_tokens": 2}, [reasoning(tokenizer().decode(ids("Hm hm hm")[:2]),
                                                                            "incomplete")], "incomplete"),
    "words and calls": (f"Hm.\n</think>\n\nLook.\n{CALL}\n{CALL}", {"tools": [TOOL]},
                        [reasoning("Hm."), message("Look."), function_call(), function_call()], "completed"),
    "words behind a call": (f"{CALL}\n\nDone.", {"tools": [TOOL], **THINKING_OFF}, [function_call(), message("Done.")],
                            "completed"),
    "one call at a time": (f"{CALL}\n{CALL}", {"tools": [TOOL], "parallel_tool_calls": False, **THINKING_OFF},
                           [function_call()], "completed"),
    "a cut call": (CALL, {"tools": [TOOL], "max_output_tokens": len(ids(CALL[:CALL.index(" \"x")])), **THINKING_OFF},
                   [function_call('{"a": 1, "b": "北京', "incomplete")], "incomplete"),
    "free text": ("<tool_call>\n<function=g>\n<parameter=input>\nls\n-l \"x\"\n</parameter>\n</function>\n</tool_call>",
                  {"tools": [{"type": "custom", "name": "g"}], **THINKING_OFF},
                  [{"type": "custom_tool_call", "status": "completed", "name": "g", "input": 'ls\n-l "x"'}],
                  "completed"),
    "a namespace": (CALL.replace("=f>", "=n__f>"), {"tools": [{"type": "namespace", "name": "n", "tools": [TOOL]}],
                                                    **THINKING_OFF},
                    [{**function_call(), "namespace": "n"}], "completed"),
    "stop strings": ("a b STOP c", {"stop": ["STOP"], **THINKING_OFF}, [message("a b ")], "completed"),
    "nothing": ("", THINKING_OFF, [], "completed"),
}


@pytest.mark.parametrize("together", [1, 5, 1000])
@pytest.mark.parametrize("case", CASES)
def test_streamed_and_whole(case, together):
    """The events build, item by item and delta by delta, what the whole response is."""
    answer, request, items, status = CASES[case]
    whole = create(FakeEngine(answer, together=together), **request)
    assert (comparable(whole["output"]), whole["status"]) == (items, status)
    if not is_extension(whole):
        assert_valid(whole, "ResponseResource", "openresponses")
    events = events_of(FakeEngine(answer, together=together), **request)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{status}"
    last = events[-1]["response"]
    assert comparable(last["output"]) == items and last["usage"] == whole["usage"]
    assert {name: last[name] for name in last if name not in ("id", "output", "created_at", "completed_at")} == {
        name: whole[name] for name in whole if name not in ("id", "output", "created_at", "completed_at")}
    assert comparable(built(events)) == items
    assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}


def built(events: list[dict]) -> list[dict]:
    """The items as a client builds them from events; asserts their order and that every ``done`` repeats the deltas."""
    items: list[dict] = []
    parts: list[str] = []
    open_item: dict | None = None
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None and event["output_index"] == len(items), event
            open_item, parts = event["item"], []
            assert open_item["status"] == "in_progress" and not open_item.get("content"), open_item
        elif kind.endswith(".delta"):
            assert event["item_id"] == open_item["id"] and event["output_index"] == len(items), event
            assert event["delta"], f"an empty delta: {event}"
            parts.append(event["delta"])
        elif kind.endswith(("text.done", "arguments.done", "input.done")):
            assert event.get("text", event.get("arguments", event.get("input"))) == "".join(parts), event
        elif kind == "content_part.done":
            assert event["part"]["text"] == "".join(parts), event
        elif kind == "output_item.done":
            assert event["item"]["id"] == open_item["id"], event
            items.append(event["item"])
            open_item = None
    assert open_item is None, f"never done: {open_item}"
    return items


def test_usage_counts_what_was_generated():
    body = create(FakeEngine("Hm.\n</think>\n\nYes."))
    assert body["usage"]["output_tokens"] == len(ids("Hm.\n</think>\n\nYes.")) + 1
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": len(ids("Hm.\n</think>"))}
    assert body["usage"]["input_tokens"] == post(client(FakeEngine("x")))["usage"]["prompt_tokens"]
    count = client(FakeEngine()).post(f"{PATH}/input_tokens", json={"model": "llm", "input": "hi"})
    assert count.json() == {"object": "response.input_tokens", "input_tokens": body["usage"]["input_tokens"]}


def test_what_the_response_repeats():
    asked = {"instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 50, "temperature": 0.5,
             "top_p": 0.9, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False, "truncation": "auto",
             "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}, "store": True,
             "prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "max_tool_calls": 3,
             "include": ["reasoning.encrypted_content"], "service_tier": "auto", "never_heard_of": [1]}
    body = create(FakeEngine("x"), **asked)
    assert_valid(body, "ResponseResource", "openresponses")
    for name in ("instructions", "metadata", "max_output_tokens", "temperature", "top_p", "tool_choice", "reasoning",
                 "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user", "max_tool_calls"):
        assert body[name] == asked[name], name
    # What is true, not what was asked: nothing is stored, nothing is cut.
    assert (body["store"], body["truncation"], body["service_tier"]) == (False, "disabled", "default")
    assert body["tools"] == [{**TOOL, "strict": None}]
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def prompt_of(path: str, **body) -> str:
    engine = FakeEngine("x")
    response = client(engine).post(path, json={"model": "llm", **body})
    assert response.status_code == 200, response.text
    return tokenizer().decode(engine.requests[0][0])


CHAT_TOOL = {"type": "function", "function": {name: TOOL[name] for name in ("name", "description", "parameters")}}


@pytest.mark.parametrize(("request_body", "messages"), [
    ({"input": "hi", "instructions": "Be brief."}, [{"role": "system", "content": "Be brief."},
                                                    {"role": "user", "content": "hi"}]),
    ({"input": [{"role": "developer", "content": "d"}, {"type": "message", "role": "user", "content": [
        {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]},
     [{"role": "developer", "content": "d"}, {"role": "user", "content": "ab"}]),
    ({"input": [{"role": "user", "content": "go"},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [
                    {"type": "output_text", "text": "Look.", "annotations": []}]},
                {"type": "function_call", "id": "x", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}", "status": "completed"},
                {"type": "function_call_output", "call_id": "c", "output": "one"},
                {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "two"}]}]},
     [{"role": "user", "content": "go"},
      {"role": "assistant", "content": "Look.", "reasoning_content": "Hm.", "tool_calls": [
          {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "f", "arguments": {}}}]},
      {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]),
    ({"input": [{"role": "user", "content": "go"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]},
                {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": "ls"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": None},
                {"type": "web_search_call", "id": "w", "status": "completed"}]},
     [{"role": "user", "content": "go"},
      {"role": "assistant", "content": "", "reasoning_content": "Short.", "tool_calls": [
          {"function": {"name": "g", "arguments": {"input": "ls"}}}]}, {"role": "tool", "content": ""}]),
    ({"input": [{"role": "assistant", "phase": "commentary", "content": "One."},
                {"role": "assistant", "content": "Two."}, {"role": "user", "content": "go"}]},
     [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."},
      {"role": "user", "content": "go"}]),
    ({"input": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "One."},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                {"role": "assistant", "content": "Two."}]},
     [{"role": "user", "content": "go"}, {"role": "assistant", "content": "One."},
      {"role": "assistant", "content": "Two.", "reasoning_content": "Hm."}]),
])
def test_the_prompt_is_that_of_the_same_chat(request_body, messages):
    fields = {"tools": [TOOL], **THINKING_OFF}
    assert prompt_of(PATH, **request_body, **fields) == prompt_of(
        "/v1/chat/completions", messages=messages, tools=[CHAT_TOOL], enable_thinking=False)


@pytest.mark.parametrize("kept", [None, {"type", "id", "summary", "encrypted_content"}])
def test_the_output_as_input_begins_the_next_prompt(kept):
    """The items that a client sends back render as what was generated: the cache stays good. kept: what opencode keeps
    of a thought."""
    answer = f"Hm. 🎉\n</think>\n\nLook.\n\n{CALL}"
    engine = FakeEngine(answer)
    request = {"model": "llm", "input": [{"role": "user", "content": "go"}], "tools": [TOOL],
               "include": ["reasoning.encrypted_content"] if kept else []}
    output = client(engine).post(PATH, json=request).json()["output"]
    assert ("encrypted_content" in output[0]) == bool(kept)
    output[0] = {name: value for name, value in output[0].items() if not kept or name in kept}
    request["input"] += [*output, {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "ok"}]
    client(engine).post(PATH, json=request)
    first, second = (tokens for tokens, _, _ in engine.requests)
    generated = first + ids(answer) + [EOS]
    assert second[:len(generated)] == generated, tokenizer().decode(second)


def test_a_sealed_thought_in_a_stream():
    events = events_of(FakeEngine("Hm.\n</think>\n\nYes."), include=["reasoning.encrypted_content"])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [unsealed(item.get("encrypted_content")) for item in done] == ["Hm.", ""]
    assert events[-1]["response"]["output"] == done


@pytest.mark.parametrize("foreign", ["gAAAAABo-of-openai", "thought-%%%", "thought-/w==", "thought-é", "", None, 5, {}])
def test_what_others_sealed_is_passed_over(foreign):
    """A conversation may have begun elsewhere."""
    go, two = {"role": "user", "content": "go"}, {"role": "assistant", "content": "Two."}
    thought = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": foreign}
    assert prompt_of(PATH, input=[go, thought, two, go], **THINKING_OFF) == prompt_of(
        PATH, input=[go, two, go], **THINKING_OFF)


def test_formats_choices_and_limits_reach_the_chat_request():
    engine = FakeEngine("x")
    create(engine, tools=[TOOL], tool_choice="none", max_output_tokens=7, temperature=0.25, top_k=3, seed=5)
    params = engine.requests[0][1]
    assert (params.max_tokens, params.temperature, params.top_k, params.seed) == (7, 0.25, 3, 5)
    assert params.logit_bias == {ids("<tool_call>")[0]: -100.0}


@pytest.mark.parametrize("fields", [
    {"text": {"format": {"type": "json_object"}}},
    {"text": {"format": {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}}}},
    {"tools": [TOOL], "tool_choice": "required"}, {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
    {"tools": [{**TOOL, "strict": True}]},
    {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [
        {"type": "function", "name": "f"}]}},
])
def test_forms_reach_the_chat_request(fields):
    engine = FakeEngine("x")
    body = create(engine, **fields)
    assert engine.requests[0][1].constraint is not None
    if "schema" in body["text"]["format"]:
        # Of which the published schema says that it can only be null.
        assert body["text"]["format"].pop("schema") == {"type": "object"}
        body["text"]["format"]["schema"] = None
    assert_valid({**body, "output": []}, "ResponseResource", "openresponses")


def test_logprobs_are_of_the_visible_text():
    answer = "Hm.\n</think>\n\nYé🎉s."
    for request in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        whole = create(FakeEngine(answer), **request)["output"][1]["content"][0]
        assert b"".join(bytes(entry["bytes"]) for entry in whole["logprobs"]).decode().strip() == whole["text"]
        assert {len(entry["top_logprobs"]) for entry in whole["logprobs"]} == {request.get("top_logprobs", 0)}
        events = events_of(FakeEngine(answer, together=2), **request)
        deltas = [entry for event in events if event["type"].endswith("output_text.delta")
                  for entry in event["logprobs"]]
        done = next(event for event in events if event["type"].endswith("output_text.done"))
        assert done["logprobs"] == whole["logprobs"]
        assert deltas == whole["logprobs"][:len(deltas)]


@pytest.mark.parametrize(("body", "param"), [
    ({"input": None}, "input"), ({"input": ""}, "input"), ({"input": 5}, "input"), ({"input": [5]}, "input[0]"),
    ({"input": [{}]}, "input[0].type"), ({"input": [{"type": [1]}]}, "input[0].type"),
    ({"input": [{"type": "hologram"}]}, "input[0].type"),
    ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": "x"}, {"role": "user"}]}, "input[1].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "name": 5}]}, "input[0].name"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"), ({"prompt": {"id": "p"}}, "prompt"), ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens"), ({"temperature": 3}, "temperature"), ({"top_p": 2}, "top_p"),
    ({"tools": "x"}, "tools"), ({"tools": [5]}, "tools[0]"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"), ({"text": "x"}, "text"),
    ({"text": {"format": 5}}, "text.format"), ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"text": {"format": {"type": "wat"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "wat"}}}}, "text.format.schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}},
     "tool_choice.tools[0]"), ({"reasoning": "x"}, "reasoning"),
    ({"reasoning": {"effort": "bogus"}}, "reasoning.effort"), ({"truncation": "some"}, "truncation"),
    ({"top_logprobs": 21}, "top_logprobs"), ({"top_logprobs": -1}, "top_logprobs"), ({"include": "x"}, "include"),
    ({"stream": "yes"}, "stream"), ({"parallel_tool_calls": 1}, "parallel_tool_calls"), ({"metadata": []}, None),
    ({"metadata": [1]}, "metadata"), ({"model": None}, "model"), ({"input": "word " * 5000}, "input"),
])
def test_refused_by_the_clients_own_names(body, param):
    engine = FakeEngine()
    response = client(engine).post(PATH, json={"model": "llm", "input": "hi", **body})
    if param is None:
        assert response.status_code == 200, response.text
        return
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and set(error) == {"message", "type", "param", "code"}, error
    assert "messages" not in error["message"] and "max_completion_tokens" not in error["message"], error
    assert not engine.requests


def test_a_failure_in_the_stream_is_its_last_event():
    events = events_of(FakeEngine("abc", error=RuntimeError("boom"), error_after=1), **THINKING_OFF)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert failed["status"] == "failed" and failed["error"]["code"] == "internal_error"
    assert failed["id"] in failed["error"]["message"] and "boom" not in str(failed)
    response = client(FakeEngine("abc", error=RuntimeError("boom"))).post(PATH, json={"model": "llm", "input": "hi"})
    assert response.status_code == 500 and "resp_" in response.json()["error"]["message"]


def test_nothing_is_stored():
    for method, path in (("GET", f"{PATH}/resp_1"), ("DELETE", f"{PATH}/resp_1"), ("POST", f"{PATH}/compact")):
        response = client(FakeEngine()).request(method, path)
        assert response.status_code == 404 and response.json()["error"]["message"], response.text


def test_openai_package():
    """Its own accumulation of a stream gives the response that it parses."""
    api = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client(
        FakeEngine(f"Hm.\n</think>\n\nLook.\n{CALL}", together=3)), max_retries=0)
    request = {"model": "llm", "input": "hi", "tools": [{**TOOL, "strict": False}]}
    answer = api.responses.create(**request)
    assert answer.output_text == "Look." and [item.type for item in answer.output] == ["reasoning", "message",
                                                                                       "function_call"]
    assert answer.output[0].content[0].text == "Hm." and answer.output[2].arguments == ARGUMENTS
    with api.responses.stream(**request) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "Look." and final.output[2].arguments == ARGUMENTS and final.usage == answer.usage
    assert kinds.count("response.output_item.added") == 3 and kinds[-1] == "response.completed"
