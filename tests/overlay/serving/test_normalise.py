"""Bodies as clients send them: what each field becomes, and what is refused by which name."""

from __future__ import annotations

import json

import pytest

from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.normalise import normalise_chat, normalise_completion
from vllm.overlay.serving.options import Options
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
             "frequency_penalty", "min_p", "stop_token_ids", "ignore_eos", "min_tokens", "functions", "function_call",
             "modalities", "reasoning", "include_reasoning", "preserve_thinking", "bad_words", "best_of", "request_id",
             "truncation_side", "return_token_ids", "logprob_token_ids", "prediction", "service_tier")
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
    ({"n": 2, "best_of": 2}, "best_of", None), ({"n": 2, "best_of": 3}, "best_of", 3),
    ({"n": 2, "best_of": 3}, "samples", 3), ({"n": 2}, "samples", 2),
    ({"seed": 42}, "seed", 42), ({"seed": -1}, "seed", None),
    ({"logit_bias": {"5": -100}}, "logit_bias", {5: -100.0}),
    ({"stream": True, "stream_options": {"include_usage": True, "other": 1}}, "include_usage", True),
    ({"stream_options": {"include_usage": True}}, "stream", False),
    ({"min_tokens": 8192, "max_tokens": 8192, "ignore_eos": True}, "min_tokens", 8192),
    ({"truncate_prompt_tokens": 10}, "truncate_prompt_tokens", 10),
    ({"truncation_side": "right"}, "truncate_right", True), ({"truncation_side": "left"}, "truncate_right", False),
    ({"temperature": -0.0}, "temperature", 0.0), ({"seed": -0.0}, "seed", 0),
    ({"return_token_ids": True}, "return_token_ids", True), ({"return_tokens_as_token_ids": False}, "tokens_as_ids",
                                                             False),
    ({"bad_words": ["a", "b c"]}, "bad_words", ("a", "b c")),
    ({"request_id": "my id"}, "request_id", "my id"), ({"length_penalty": 1.0}, "n", 1),
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
    ({"n": 2, "best_of": 1}, "best_of"), ({"best_of": 2, "stream": True}, "best_of"),
    ({"best_of": 10**9}, "best_of"), ({"bad_words": [" "]}, "bad_words"), ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": ["x"] * 129}, "bad_words"), ({"bad_words": ["x" * 5000]}, "bad_words"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"), ({"truncation_side": "middle"}, "truncation_side"),
    ({"request_id": "x" * 129}, "request_id"), ({"request_id": "a\nb"}, "request_id"),
    ({"request_id": 5}, "request_id"),
    ({"modalities": ["text", "audio"]}, "modalities"), ({"modalities": ["smell"]}, "modalities[0]"),
    ({"reasoning_effort": "bogus"}, "reasoning_effort"), ({"reasoning": {"effort": "bogus"}}, "reasoning.effort"),
    ({"reasoning": "high"}, "reasoning"), ({"reasoning": {"exclude": 1}}, "reasoning.exclude"),
    ({"reasoning": {"enabled": [1]}}, "reasoning.enabled"), ({"include_reasoning": "no"}, "include_reasoning"),
    ({"preserve_thinking": "yes"}, "preserve_thinking"), ({"functions": {"a": 1}}, "functions"),
    ({"functions": [5]}, "functions[0]"), ({"functions": [{}]}, "functions[0].name"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
    ({"functions": [{"name": "f"}], "function_call": "sometimes"}, "function_call"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom", "custom": 5}]}, "tools[0].custom"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"), ({"seed": "x"}, "seed"), ({"stop": 5}, "stop"), ({"stop": ["x", 5]}, "stop[1]"),
    ({"stop": ["x", ""]}, "stop"), ({"stop": ["x"] * 65}, "stop"),
    ({"stream": "yes"}, "stream"), ({"stream_options": "yes"}, "stream_options"),
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
    ({"response_format": {"type": "wat"}}, "response_format.type"),
    ({"response_format": {"x": 1}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": "a+"}, "structured_outputs"), ({"use_beam_search": True}, "use_beam_search"),
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
    assert completion(best_of=4).options.samples == 4
    assert completion(max_tokens=0, echo=True).options.max_tokens == 0
    assert completion(min_tokens=30).options.max_tokens == 30
    for body, param in (({"max_tokens": 0}, "max_tokens"), ({"suffix": "x"}, "suffix"),
                        ({"prompt_embeds": "eA=="}, "prompt_embeds"), ({"best_of": 2, "stream": True}, "best_of"),
                        ({"use_beam_search": True}, "use_beam_search")):
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
    ({"reasoning_effort": "none", "thinking": True}, True), ({"reasoning_effort": "off"}, False),
    ({"reasoning": {"effort": "none"}}, False), ({"reasoning": {"effort": "high", "summary": "auto"}}, None),
    ({"reasoning": {"enabled": False}}, False), ({"reasoning": {"enabled": True}, "reasoning_effort": "none"}, True),
    *[({"reasoning_effort": effort}, None) for effort in ("minimal", "medium", "high", "xhigh", "max", "auto")],
    ({"thinking": "perhaps"}, None), ({"thinking": {}}, None),
    ({"chat_template_kwargs": {"enable_thinking": True}, "thinking": False}, True),
])
def test_every_spelling_of_the_thinking_switch(body, thinking):
    assert chat(**body).thinking is thinking


def test_template_kwargs_keep_what_is_not_the_servers():
    request = chat(chat_template_kwargs={"preserve_thinking": True, "tools": [1], "chat_template": "x",
                                         "tokenize": True})
    assert request.template_kwargs == {"preserve_thinking": True}


def test_thoughts_of_the_history_are_kept_by_either_spelling():
    for body in ({"preserve_thinking": True}, {"chat_template_kwargs": {"preserve_thinking": True}}):
        assert chat(**body).template_kwargs == {"preserve_thinking": True}
    both = chat(preserve_thinking=True, chat_template_kwargs={"preserve_thinking": False})
    assert both.template_kwargs == {"preserve_thinking": False}, "the more specific one counts"


@pytest.mark.parametrize(("body", "shown"), [
    ({}, True), ({"include_reasoning": False}, False), ({"include_reasoning": True}, True),
    ({"reasoning": {"exclude": True}}, False), ({"reasoning": {"exclude": True}, "include_reasoning": True}, True),
])
def test_whether_the_thought_is_shown(body, shown):
    assert chat(**body).show_thought is shown


def test_functions_are_the_older_name_of_tools():
    functions = [{"name": "f", "parameters": {"type": "object"}}, {"name": "g"}]
    request = chat(functions=functions, function_call={"name": "g"})
    assert list(request.tools.definitions) == [{"type": "function", "function": one} for one in functions]
    assert (request.tools.legacy, request.tool_choice) == (True, ToolChoice("named", "g"))
    assert chat(functions=functions, function_call="none").tool_choice == ToolChoice("none")
    assert not chat(tools=[TOOL], functions=functions).tools.legacy


@pytest.mark.parametrize("tool", [
    {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": {
        "type": "grammar", "grammar": {"syntax": "lark", "definition": "start: X"}}}},
    {"type": "custom", "name": "patch", "description": "Edits.", "format": {
        "type": "grammar", "syntax": "lark", "definition": "start: X"}},
])
def test_a_tool_of_free_text_is_a_function_of_one_parameter(tool):
    tools = chat(tools=[tool], tool_choice={"type": "custom", "custom": {"name": "patch"}}).tools
    assert tools.custom == {"patch"}
    assert tools.definitions == ({"type": "function", "function": {
        "name": "patch", "description": "Edits.\n\nThe input follows this lark grammar:\nstart: X", "parameters": {
            "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}}},)


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
