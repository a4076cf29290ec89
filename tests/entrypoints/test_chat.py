"""POST /v1/chat/completions over a scripted engine: what clients read, streamed and whole."""

from __future__ import annotations

import json

import pytest

from tests.helpers.fake_engine import FakeEngine, client, comparable, gathered, ids, post, stream, tokenizer

THOUGHT = "Let me think about it. 北京 🎉"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "hours": {"type": "array"}}}}}]
CALL = ("<tool_call>\n<function=get_weather>\n<parameter=city>\n北京 \"x\"\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=hours>\n[1, {\"a\": null}]\n</parameter>\n"
        "</function>\n</tool_call>")
ARGUMENTS = '{"city": "北京 \\"x\\"", "days": 3, "hours": [1, {"a": null}]}'

(END_THINK,) = ids("</think>")

# name: (answer, request, message, finish_reason). The prompt opens a thought unless the request switches it off.
CASES = {
    "thought and answer": (f"{THOUGHT}\n</think>\n\nIt is 4.", {},
                           {"reasoning_content": THOUGHT, "content": "It is 4."}, "stop"),
    "cut in the thought": (f"{THOUGHT}\n</think>\n\nIt is 4.", {"max_tokens": 5},
                           {"reasoning_content": tokenizer().decode(ids(THOUGHT)[:5]).rstrip()}, "length"),
    "one token": ("Let me think", {"max_tokens": 1}, {"reasoning_content": "L"}, "length"),
    "thinking off": ("It is 4.", {"enable_thinking": False}, {"content": "It is 4."}, "stop"),
    "a call": (f"I need it.\n</think>\n\n{CALL}", {"tools": TOOLS},
               {"reasoning_content": "I need it.", "tool_calls": [("function", "get_weather", ARGUMENTS)]},
               "tool_calls"),
    "words and calls": (f"Looking.\n\n{CALL}\n{CALL}", {"tools": TOOLS, "thinking": False},
                        {"content": "Looking.", "tool_calls": [("function", "get_weather", ARGUMENTS)] * 2},
                        "tool_calls"),
    "one call at a time": (f"{CALL}\n{CALL}", {"tools": TOOLS, "thinking": False, "parallel_tool_calls": False},
                           {"tool_calls": [("function", "get_weather", ARGUMENTS)]}, "tool_calls"),
    "tool_choice none": ("No call.", {"tools": TOOLS, "tool_choice": "none", "thinking": False},
                         {"content": "No call."}, "stop"),
    "required": (f"I must.\n</think>\n\n{CALL}", {"tools": TOOLS, "tool_choice": "required"}, {
        "reasoning_content": "I must.", "tool_calls": [("function", "get_weather", ARGUMENTS)]}, "tool_calls"),
    "named": (f"{CALL}\n{CALL}", {"tools": TOOLS, "thinking": False, "tool_choice": {"type": "function", "function": {
        "name": "get_weather"}}}, {"tool_calls": [("function", "get_weather", ARGUMENTS)]}, "tool_calls"),
    "stop string": ("1 2 3 15 16", {"stop": ["15"], "thinking": False}, {"content": "1 2 3 "}, "stop"),
    "stop string kept": ("1 2 15 16", {"stop": "15", "include_stop_str_in_output": True, "thinking": False},
                         {"content": "1 2 15"}, "stop"),
    "stop string inside arguments": (CALL, {"stop": ["days", "北京"], "tools": TOOLS, "thinking": False},
                                     {"tool_calls": [("function", "get_weather", ARGUMENTS)]}, "tool_calls"),
    "a control token as stop string": ("Hm.\n</think>\n\nNo.", {"stop": ["</think>"]}, {"reasoning_content": "Hm.\n"},
                                       "stop"),
    "emoji and CJK": ("Emoji: 🎉🚀✨🇨🇳 中文测试：你好世界 こんにちは", {"thinking": False},
                      {"content": "Emoji: 🎉🚀✨🇨🇳 中文测试：你好世界 こんにちは"}, "stop"),
    "cut inside a character": ("a🎉", {"thinking": False, "max_tokens": 2}, {"content": "a"}, "length"),
    "nothing": ("", {"thinking": False}, {"content": ""}, "stop"),
}


@pytest.mark.parametrize("together", [1, 3, 1000])
@pytest.mark.parametrize("case", CASES)
def test_streamed_and_whole(case, together):
    """Whatever the answer and however many tokens come in one step: both modes say the same, and say what they must."""
    answer, request, message, finish = CASES[case]
    http = client(FakeEngine(answer, together=together))
    whole = post(http, **request)
    expected = {"message": {"role": "assistant", "content": "", "tool_calls": [], **message}, "finish_reason": finish}
    assert comparable(whole["choices"][0]) == expected
    chunks = stream(http, stream_options={"include_usage": True}, **request)
    assert comparable(gathered(chunks)) == expected
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_shape_of_a_whole_answer():
    body = post(client(FakeEngine("Hm.\n</think>\n\nYes.")))
    choice = body["choices"][0]
    assert body["object"] == "chat.completion" and body["model"] == "llm" and body["id"].startswith("chatcmpl-")
    assert choice == {"index": 0, "message": {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.",
                                              "refusal": None, "annotations": []},
                      "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    prompt = len(ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"))
    generated = len(ids("Hm.\n</think>\n\nYes.")) + 1
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": generated,
                             "total_tokens": prompt + generated, "prompt_tokens_details": {"cached_tokens": 0},
                             "completion_tokens_details": {"reasoning_tokens": len(ids("Hm.\n</think>"))}}


def test_shape_of_a_stream():
    chunks = stream(client(FakeEngine("12", prefill=3)), thinking=False)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""}, {"content": "1"}, {"content": "2"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_while_it_streams():
    chunks = stream(client(FakeEngine("123")), thinking=False,
                    stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 4, 4, 4]


def test_tool_call_deltas_are_progressive():
    chunks = stream(client(FakeEngine(CALL)), tools=TOOLS, thinking=False)
    calls = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""} and calls[0]["id"].startswith("call_")
    assert len(calls) > 6, f"the arguments came in {len(calls) - 1} pieces"
    assert calls[1]["function"]["arguments"].startswith('{"city": "'), calls[1]


def test_the_servers_own_template_variables():
    """They hold for requests that are silent about them."""
    for fields, thinks in (({}, False), ({"enable_thinking": True}, True), ({"thinking": {"type": "enabled"}}, True),
                           ({"chat_template_kwargs": {"enable_thinking": True}}, True)):
        engine = FakeEngine("x")
        post(client(engine, template_kwargs={"enable_thinking": False}), **fields)
        assert tokenizer().decode(engine.requests[0][0]).endswith("<think>\n") is thinks, fields


def test_several_choices():
    http = client(FakeEngine("One.", "Two, two."))
    whole = post(http, n=2, thinking=False, temperature=0)
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["One.", "Two, two."]
    assert whole["usage"]["completion_tokens"] == len(ids("One.")) + len(ids("Two, two.")) + 2
    assert whole["usage"]["prompt_tokens"] == post(http, thinking=False)["usage"]["prompt_tokens"]
    chunks = stream(http, n=2, thinking=False)
    assert [gathered(chunks, i)["message"]["content"] for i in range(2)] == ["One.", "Two, two."]


def test_logprobs():
    """One entry per generated token, in both modes; impossible tokens are -9999, not infinity."""
    http = client(FakeEngine("Hm.</think>é!"))
    whole = post(http, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    tokens = [*ids("Hm.</think>é!"), ids("<|im_end|>")[0]]
    assert len(whole) == len(tokens)
    assert b"".join(bytes(entry["bytes"]) for entry in whole).decode() == "Hm.</think>é!<|im_end|>"
    assert all(entry["logprob"] == -0.5 and len(entry["top_logprobs"]) == 2 for entry in whole), whole
    assert [entry["logprob"] for entry in whole[0]["top_logprobs"]] == [-0.5, -1.0]
    streamed = [entry for chunk in stream(http, logprobs=True, top_logprobs=2)
                for choice in chunk["choices"] for entry in (choice["logprobs"] or {"content": []})["content"]]
    assert streamed == whole
    bare = post(http, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * len(tokens)


@pytest.mark.parametrize(("request_fields", "defaults", "expected"), [
    ({}, {}, {"temperature": 1.0, "top_p": 1.0, "top_k": -1}),
    ({}, {"temperature": 0.7, "top_p": 0.95, "top_k": 20}, {"temperature": 0.7, "top_p": 0.95, "top_k": 20}),
    ({"temperature": 0.2, "top_k": 0}, {"temperature": 0.7, "top_p": 0.95, "top_k": 20},
     {"temperature": 0.2, "top_p": 0.95, "top_k": -1}),
    ({"temperature": 0}, {"temperature": 0.7, "top_p": 0.95}, {"temperature": 0.0}),
    ({"top_p": 0}, {}, {"temperature": 1.0, "top_p": 1.0, "top_k": 1}),
    ({"temperature": 0, "n": 3}, {}, {"temperature": 0.0, "n": 3}),
    ({"min_tokens": 5, "ignore_eos": True, "max_tokens": 5}, {},
     {"min_tokens": 5, "max_tokens": 5, "ignore_eos": True}),
    ({"seed": 42, "logit_bias": {"5": -100}, "min_p": 0.1}, {}, {"seed": 42, "logit_bias": {5: -100.0}, "min_p": 0.1}),
    ({"stop": ["x"]}, {}, {"stop": [], "detokenize": False}),
    ({"tools": TOOLS, "tool_choice": "none"}, {}, {"logit_bias": {ids("<tool_call>")[0]: -100.0}}),
    ({"tools": TOOLS}, {}, {"logit_bias": None}), ({"tool_choice": "none"}, {}, {"logit_bias": None}),
])
def test_what_the_engine_is_asked(request_fields, defaults, expected):
    engine = FakeEngine()
    post(client(engine, sampling_defaults=defaults), **request_fields)
    params = engine.requests[0][1]
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(("messages", "fields", "prompt"), [
    ([{"role": "user", "content": "hi"}], {}, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    ([{"role": "user", "content": "hi"}], {"chat_template_kwargs": {"enable_thinking": False}},
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ([{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "text", "text": "a\ud83c"}, {
        "type": "text", "text": "b"}]}], {"thinking": False},
     "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\na\ufffdb<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}], {"continue_final_message": True},
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nI am"),
    # What is continued is empty, or stands in the template's own text behind it.
    *(([{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}], {"continue_final_message": True},
       f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{said.rstrip()}")
      for said in ("", "  ", "<", "The end", "im", "I am \n")),
    ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "reasoning_content": "Hm."}],
     {"continue_final_message": True},
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\n"),
    ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x", "tool_calls": [
        {"function": {"name": "f", "arguments": {"a": "x"}}}]}], {"continue_final_message": True},
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nx"),
    ([{"role": "user", "content": "hi"}, {"role": "tool", "content": "res"}], {"continue_final_message": True},
     "<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\n<tool_response>\nres"),
])
def test_prompts(messages, fields, prompt):
    engine = FakeEngine("x")
    http = client(engine)
    response = http.post("/v1/chat/completions", content=json.dumps({"model": "llm", "messages": messages, **fields}))
    assert response.status_code == 200, response.text
    assert tokenizer().decode(engine.requests[0][0]) == prompt


def test_arguments_as_text_and_as_object_render_the_same():
    prompts = []
    for arguments in ('{"city": "X", "days": [1]}', {"city": "X", "days": [1]}):
        engine = FakeEngine("x")
        post(client(engine), tools=TOOLS, messages=[
            {"role": "user", "content": "w"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "index": 0, "type": "function",
                 "function": {"name": "get_weather", "arguments": arguments}}]},
            {"role": "tool", "tool_call_id": "c", "content": "ok"}])
        prompts.append(engine.requests[0][0])
    assert prompts[0] == prompts[1]
    assert "<parameter=city>\nX\n</parameter>" in tokenizer().decode(prompts[0])


def test_an_answer_that_is_continued():
    """The thought is over, so the answer is content; with echo the message that it continues is shown with it."""
    http = client(FakeEngine(" a model."))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    request = {"messages": messages, "continue_final_message": True}
    assert post(http, **request)["choices"][0]["message"]["content"] == " a model."
    assert post(http, **request, echo=True)["choices"][0]["message"]["content"] == "I am a model."
    assert gathered(stream(http, **request, echo=True))["message"]["content"] == "I am a model."


def test_an_answer_that_the_template_does_not_show_cannot_be_continued():
    http = client(FakeEngine("x"), chat_template="{{ messages[0].content }}")
    response = http.post("/v1/chat/completions", json={"model": "llm", "continue_final_message": True, "messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message"), response.text


@pytest.mark.parametrize("asked", [[], [END_THINK]])
def test_a_control_token_as_stop_string_is_the_stop_reason(asked):
    """As text, unless the request names its id, too."""
    fields = {"stop": ["</think>"], "stop_token_ids": asked}
    expected = asked[0] if asked else "</think>"
    assert post(client(FakeEngine("Hm.\n</think>\n\nNo.")), **fields)["choices"][0]["stop_reason"] == expected
    last = stream(client(FakeEngine("Hm.\n</think>\n\nNo.")), **fields)[-1]
    assert last["choices"][0]["stop_reason"] == expected


def test_the_other_name_of_the_reasoning_field():
    http = client(FakeEngine("Hm.\n</think>\n\nYes."), reasoning_field="reasoning")
    assert post(http)["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "reasoning": "Hm.",
                                                         "refusal": None, "annotations": []}
    assert gathered(stream(http))["message"]["reasoning"] == "Hm."


def test_without_parsers_everything_is_content():
    http = client(FakeEngine("Hm.\n</think>\n\nYes."), reasoning_parser=None, tool_call_parser=None)
    assert post(http)["choices"][0]["message"]["content"] == "Hm.\n</think>\n\nYes."


def test_a_prompt_that_fits_with_a_limit_that_does_not():
    """What fits is served."""
    engine = FakeEngine("word " * 200)
    body = post(client(engine, max_model_len=64), thinking=False, max_tokens=64)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 64
    silent = post(client(engine, max_model_len=64), thinking=False)
    assert silent["usage"] == body["usage"]


def test_names_of_the_model():
    http = client(FakeEngine())
    assert post(http, model="alias")["model"] == "alias"
    response = http.post("/v1/chat/completions",
                         json={"model": "other", "messages": [{"role": "user", "content": "x"}]})
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found", response.text


def test_a_thought_that_is_not_asked_for():
    """It is generated and counted, and not sent."""
    http = client(FakeEngine("Hm.\n</think>\n\nYes."))
    whole = post(http, include_reasoning=False)
    assert whole["choices"][0]["message"]["content"] == "Yes." and "reasoning_content" not in str(whole)
    assert whole["usage"] == post(http)["usage"]
    message = gathered(stream(http, reasoning={"exclude": True}))["message"]
    assert message == {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize("together", [1, 100])
def test_functions_are_answered_as_they_were_asked(together):
    """One call, as function_call, with a finish reason of its own."""
    http = client(FakeEngine(f"Look.\n{CALL}\n{CALL}", together=together))
    request = {"functions": [TOOLS[0]["function"]], "thinking": False}
    whole = post(http, **request)["choices"][0]
    assert whole["message"]["function_call"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert (whole["message"]["content"], whole["finish_reason"]) == ("Look.", "function_call")
    assert "tool_calls" not in whole["message"]
    chunks = [chunk["choices"][0] for chunk in stream(http, **request)]
    parts = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert parts[0] == {"name": "get_weather", "arguments": ""}
    assert "".join(part["arguments"] for part in parts) == ARGUMENTS and chunks[-1]["finish_reason"] == "function_call"


@pytest.mark.parametrize("together", [1, 100])
@pytest.mark.parametrize(("cut", "text"), [(False, 'say "hi"\n<b> 北京 🎉\\'), (True, 'say "hi')])
def test_a_tool_of_free_text(together, cut, text):
    """Its call holds the text itself; of a cut one, as far as it came."""
    written = ('<tool_call>\n<function=shell>\n<parameter=input>\nsay "hi"\n<b> 北京 🎉\\\n</parameter>\n</function>\n'
               '</tool_call>')
    request = {"tools": [{"type": "custom", "custom": {"name": "shell"}}], "thinking": False,
               "max_tokens": len(ids(written[:written.index('"\n<b>')])) if cut else 500}
    http = client(FakeEngine(written, together=together))
    whole = post(http, **request)["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "shell", "input": text})
    assert whole["finish_reason"] == ("length" if cut else "tool_calls")
    parts = [part for chunk in stream(http, **request)
             for part in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert parts[0]["custom"] == {"name": "shell", "input": ""} and parts[0]["type"] == "custom"
    assert "".join(part["custom"]["input"] for part in parts) == text


def test_the_best_of_several():
    """The ones of the highest log probability per token; what the others took is counted."""
    class Judged(FakeEngine):
        async def generate(self, *args, **kwargs):
            async for output in super().generate(*args, **kwargs):
                for one in output.outputs:
                    assert one.logprobs, "not asked for"
                    for place, token in zip(one.logprobs, one.token_ids, strict=True):
                        place[token].logprob = (-3.0, -1.0, -2.0)[one.index]
                yield output

    engine = Judged("a b c d", "e f", "g h i")
    body = post(client(engine), n=2, best_of=3, thinking=False)
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [(0, "e f"), (1, "g h i")]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == sum(len(ids(text)) + 1 for text in engine.answers)
    assert engine.requests[0][1].n == 3
    text = post(client(Judged("a", "b", "c")), "/v1/completions", best_of=3, prompt=["x", "y"])
    assert [(choice["index"], choice["text"]) for choice in text["choices"]] == [(0, "b"), (1, "b")]


def test_what_the_model_read_and_wrote():
    engine = FakeEngine("Hm.\n</think>\n\nYes 🎉.")
    http = client(engine)
    request = {"return_token_ids": True, "return_prompt_text": True, "prompt_logprobs": 1}
    written = [*ids("Hm.\n</think>\n\nYes 🎉."), ids("<|im_end|>")[0]]
    whole = post(http, **request)
    assert whole["choices"][0]["token_ids"] == written
    assert whole["prompt_token_ids"] == engine.requests[0][0]
    assert tokenizer().decode(whole["prompt_token_ids"]) == whole["prompt_text"]
    first, *others = stream(http, **request)
    assert {name: first[name] for name in ("prompt_token_ids", "prompt_text", "prompt_logprobs")} == {
        name: whole[name] for name in ("prompt_token_ids", "prompt_text", "prompt_logprobs")}
    assert [token for chunk in others for token in chunk["choices"][0]["token_ids"]] == written
    assert not any("prompt_text" in chunk for chunk in others)


def test_tokens_shown_as_ids_by_request():
    http = client(FakeEngine("Yes"))
    content = post(http, thinking=False, logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert [entry["token"] for entry in content["content"]] == [f"token_id:{token}" for token in
                                                                [*ids("Yes"), ids("<|im_end|>")[0]]]


def test_the_clients_own_id():
    """Two requests may have one; the engine never hears it."""
    engine = FakeEngine()
    for streamed in (False, True):
        response = client(engine).post("/v1/chat/completions", json={"model": "llm", "messages": [
            {"role": "user", "content": "hi"}], "request_id": "mine", "stream": streamed})
        assert response.headers["x-request-id"] == "chatcmpl-mine"
        assert streamed or response.json()["id"] == "chatcmpl-mine"
    assert len({request_id for _, _, request_id in engine.requests}) == 2
    assert {chunk["id"] for chunk in stream(client(engine), request_id="mine")} == {"chatcmpl-mine"}
