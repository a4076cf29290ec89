"""Bodies as clients send them: what each field becomes, and what is refused by which name."""

from __future__ import annotations

import json

import pytest

from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.normalise import Options, normalise_chat, normalise_completion
from vllm.overlay.serving.tools import ToolChoice

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def chat(**body):
    return normalise_chat({"model": "m", "messages": USER, **body})


def completion(**body):
    return normalise_completion({"model": "m", "prompt": "hi", **body})


def test_a_silent_request():
    request = chat()
    assert request.options == Options()
    assert (request.thinking, request.tool_choice, request.parallel_tool_calls) == (None, ToolChoice("none"), True)
    assert (request.add_generation_prompt, request.continue_final_message) == (True, False)
    assert completion().options.max_tokens == 16


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_null_and_empty_are_as_absent(nothing):
    """Every optional field: SDKs send them so."""
    names = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "stream",
             "stream_options",
             "tools", "tool_choice", "parallel_tool_calls", "response_format", "logit_bias", "logprobs", "top_logprobs",
             "user",
             "reasoning_effort", "thinking", "enable_thinking", "chat_template_kwargs", "guided_json",
             "structured_outputs", "metadata",
             "frequency_penalty", "min_p", "stop_token_ids", "ignore_eos", "min_tokens")
    assert chat(**dict.fromkeys(names, nothing)) == chat()


def test_unknown_fields_are_ignored():
    extra = {"store": True, "metadata": {"a": 1}, "service_tier": "auto", "user": 7, "strict": True, "prediction": None,
             "never_heard_of": {"deep": [1]}, "modalities": ["text"], "verbosity": "low", "reasoning_effort": "high"}
    assert chat(**extra) == chat()
    assert completion(**extra) == completion()


@pytest.mark.parametrize(("body", "field", "value"), [
    ({"max_completion_tokens": 8192}, "max_tokens", 8192),
    ({"max_completion_tokens": 5, "max_tokens": 9}, "max_tokens", 5),
    ({"max_tokens": 7.0}, "max_tokens", 7),
    ({"temperature": 0}, "temperature", 0.0), ({"temperature": 2}, "temperature", 2.0),
    ({"top_p": 0}, "top_p", 0.0), ({"top_p": 0.01}, "top_p", 0.01),
    ({"top_k": -1}, "top_k", -1), ({"top_k": 20}, "top_k", 20),
    ({"frequency_penalty": -2}, "frequency_penalty", -2.0), ({"presence_penalty": 2.0}, "presence_penalty", 2.0),
    ({"stop": "x"}, "stop", ("x",)), ({"stop": ["x", "y"]}, "stop", ("x", "y")),
    ({"n": 2, "best_of": 2}, "n", 2), ({"seed": 42}, "seed", 42), ({"seed": -1}, "seed", None),
    ({"logit_bias": {"5": -100}}, "logit_bias", {5: -100.0}),
    ({"stream": True, "stream_options": {"include_usage": True, "other": 1}}, "include_usage", True),
    ({"stream_options": {"include_usage": True}}, "stream", False),
    ({"min_tokens": 8192, "max_tokens": 8192, "ignore_eos": True}, "min_tokens", 8192),
    ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens", 10),
])
def test_fields(body, field, value):
    assert getattr(chat(**body).options, field) == value


def test_logprobs_mean_two_things():
    assert chat(logprobs=True).options.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).options.logprobs == 3
    assert chat(logprobs=False, top_logprobs=0).options.logprobs is None
    assert completion(logprobs=3).options.logprobs == 3


@pytest.mark.parametrize(("body", "param"), [
    ({"temperature": "hot"}, "temperature"), ({"temperature": "0.7"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"), ({"temperature": 2.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 1.1}, "top_p"), ({"top_p": -0.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"top_k": 1.5}, "top_k"),
    ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"), ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"n": 0}, "n"), ({"n": 10**9}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"), ({"seed": "x"}, "seed"), ({"stop": 5}, "stop"), ({"stop": ["x", 5]}, "stop[1]"),
    ({"stop": ["x", ""]}, "stop"), ({"stream": "yes"}, "stream"), ({"stream_options": "yes"}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"), ({"top_logprobs": 3}, "top_logprobs"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"tools": {}, "tool_choice": "required"}, "tool_choice"), ({"tools": "x"}, "tools"), ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"), ({"tools": [{"function": {}}]}, "tools[0].function.name"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": 5}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    ({"response_format": {"type": "wat"}}, "response_format.type"),
    ({"response_format": {"x": 1}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"guided_json": {"type": "object"}}, "guided_json"), ({"guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": ["a"]}, "guided_choice"), ({"guided_grammar": "a"}, "guided_grammar"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"), ({"use_beam_search": True}, "use_beam_search"),
    ({"reasoning_effort": 5}, "reasoning_effort"), ({"thinking": [1]}, "thinking"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"thinking": [1]}}, "chat_template_kwargs.thinking"),
    ({"model": None}, "model"), ({"model": 5}, "model"), ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": {}}, "messages"), ({"messages": "hi"}, "messages"),
])
def test_refused_by_name(body, param):
    with pytest.raises(RequestError) as caught:
        chat(**body)
    assert caught.value.param == param, caught.value.message
    assert caught.value.status == 400
    assert param.split("[")[0].split(".")[0] in caught.value.message, caught.value.message
    json.dumps(caught.value.body())


@pytest.mark.parametrize("body", [None, [], "x", 5, {}, {"model": "m"}])
def test_bodies_that_are_no_request(body):
    for normalise in (normalise_chat, normalise_completion):
        with pytest.raises(RequestError):
            normalise(body)


def test_response_format_text_is_no_structured_output():
    assert chat(response_format={"type": "text"}) == chat()


@pytest.mark.parametrize(("prompt", "prompts"), [
    ("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""]),
])
def test_prompts(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(("prompt", "param"), [
    (None, "prompt"), ([], "prompt"), (5, "prompt"), ({}, "prompt"), (["a", 5], "prompt[1]"), ([1, "a"], "prompt[1]"),
    ([[1], "a"], "prompt[1]"), ([[-1]], "prompt[0][0]"), ([1.5], "prompt[0]"), ([None], "prompt[0]"),
])
def test_prompts_refused(prompt, param):
    with pytest.raises(RequestError) as caught:
        completion(prompt=prompt)
    assert caught.value.param == param


def test_completion_limits():
    assert completion(max_tokens=0, echo=True).options.max_tokens == 0
    assert completion(min_tokens=30).options.max_tokens == 30
    for body, param in (({"max_tokens": 0}, "max_tokens"), ({"suffix": "x"}, "suffix")):
        with pytest.raises(RequestError) as caught:
            completion(**body)
        assert caught.value.param == param


@pytest.mark.parametrize(("body", "thinking"), [
    ({}, None),
    ({"chat_template_kwargs": {"thinking": False}}, False), ({"chat_template_kwargs": {"thinking": True}}, True),
    ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ({"chat_template_kwargs": {"enable_thinking": True}}, True),
    ({"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}, False),
    ({"thinking": {"type": "disabled"}}, False), ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
    ({"thinking": False}, False), ({"thinking": True}, True), ({"thinking": "disabled"}, False),
    ({"thinking": "enabled"}, True),
    ({"enable_thinking": False}, False), ({"enable_thinking": True}, True), ({"enable_thinking": "false"}, False),
    ({"reasoning_effort": "none"}, False), ({"reasoning_effort": "low"}, None),
    ({"reasoning_effort": "none", "thinking": True}, True),
    ({"thinking": "perhaps"}, None), ({"thinking": {}}, None),
    ({"chat_template_kwargs": {"enable_thinking": True}, "thinking": False}, True),
])
def test_every_spelling_of_the_thinking_switch(body, thinking):
    assert chat(**body).thinking is thinking


def test_template_kwargs_keep_what_is_not_the_servers():
    request = chat(chat_template_kwargs={"preserve_thinking": True, "tools": [1], "chat_template": "x",
                                         "tokenize": True})
    assert request.template_kwargs == {"preserve_thinking": True}


@pytest.mark.parametrize(("choice", "expected"), [
    (None, ToolChoice("auto")), ("auto", ToolChoice("auto")), ("none", ToolChoice("none")),
    ("required", ToolChoice("required")),
    ("any", ToolChoice("required")), ({"type": "function", "function": {"name": "f"}}, ToolChoice("named", "f")),
    ({"type": "function", "name": "f"}, ToolChoice("named", "f")), ({"type": "auto"}, ToolChoice("auto")),
])
def test_tool_choice(choice, expected):
    assert chat(tools=[TOOL], tool_choice=choice).tool_choice == expected


def test_tool_choice_without_tools_is_none():
    for choice in ("auto", "none"):
        assert chat(tool_choice=choice).tool_choice == ToolChoice("none")


def test_tools_stay_as_they_were_sent():
    """What the template prints; broken schemas are not the request's fault."""
    tools = [{"type": "function", "function": {"name": "a", "description": None, "parameters": [], "strict": True}},
             TOOL]
    assert list(chat(tools=tools).tools.definitions) == tools
    assert chat(tools=tools).tools.schemas["a"] == {}
    flat = chat(tools=[{"type": "function", "name": "b", "parameters": {"type": "object"}},
                       {"type": "web_search"}]).tools
    assert list(flat.definitions) == [{"type": "function", "function": {"name": "b", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a>b", "a<b", "x" * 257])
def test_a_call_that_cannot_be_written_is_not_forced(name):
    tools = [{"type": "function", "function": {"name": name}}]
    assert chat(tools=tools).tool_choice == ToolChoice("auto")
    with pytest.raises(RequestError) as refused:
        chat(tools=tools, tool_choice={"type": "function", "function": {"name": name}})
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(("body", "field"), [
    ({"max_tokens": 7}, "max_tokens"), ({"max_tokens": 6, "max_completion_tokens": 7}, "max_completion_tokens"),
    ({"min_tokens": 17}, "min_tokens"), ({}, "max_tokens"),
])
def test_where_the_limit_came_from(body, field):
    assert completion(**body).options.limit_field == field


def test_a_number_of_answers_that_no_memory_holds():
    assert len(completion(prompt=["a"] * 16, n=1024).prompts) == 16
    for body in ({"prompt": ["a"] * 17, "n": 1024}, {"prompt": ["a"] * 16385}):
        with pytest.raises(RequestError) as refused:
            completion(**body)
        assert refused.value.param == "prompt"
