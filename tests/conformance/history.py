"""What recorded requests of coding and office agents hold: each of these once cost a server requests.

Sent with few tokens to generate: that they are accepted, and understood alike, is what counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.acceptance.questions import OFF, WEATHER, picture, user
from tests.conformance.acceptance import asked
from tests.conformance.checks import Check, expect
from tests.conformance.forms import check_answer, check_error
from tests.conformance.target import CHAT, Target

QUESTION = user("What is the weather in Beijing?")
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 25 degrees"}
RED = {"type": "image_url", "image_url": {"url": picture(64, {(0, 0): (255, 0, 0)})}}
BLUE = {"type": "image_url", "image_url": {"url": picture(96, {(0, 0): (0, 0, 255)})}}
# Long enough that limits matter, short enough for a CPU.
WORDS = 1500


def call(arguments: Any = '{"city": "Beijing"}', **extra: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}, **extra}


def assistant(*calls: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """An assistant message with calls; without a content unless one is given."""
    return {"role": "assistant", "tool_calls": list(calls), **fields}


def text(*parts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part} for part in parts]


def _served(messages: Sequence[Mapping[str, Any]], **fields: Any) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        asked(target, list(messages), **{"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True},
                                         **fields})
    return run


def _same_prompt(*forms: Sequence[Mapping[str, Any]], **fields: Any) -> Callable[[Target], None]:
    """All forms of a conversation must give prompts of one length."""
    def run(target: Target) -> None:
        counts = [asked(target, list(form), max_tokens=1, **fields)["usage"]["prompt_tokens"] for form in forms]
        expect(len(set(counts)) == 1, f"prompts of {counts} tokens")
    return run


def _with_result(*answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*QUESTION, *answer, RESULT]


def trial(target: Target) -> None:
    """What is sent once before the replay."""
    asked(target, [*_with_result(assistant(call(), content=None)), *user("Thanks.")], max_tokens=1)


def prompt_is_longer_with_every_message(target: Target) -> None:
    """None of the system messages, wherever they are, is dropped."""
    middle = {"role": "system", "content": "From now on answer in French, please."}
    counts = [asked(target, messages, max_tokens=1)["usage"]["prompt_tokens"] for messages in (
        user("hi"), [{"role": "system", "content": "Be brief."}, *user("hi")],
        [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be very kind."}, *user("hi")],
        [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be very kind."}, *user("hi"),
         {"role": "assistant", "content": "Hello."}, middle, *user("again")])]
    expect(counts == sorted(set(counts)), f"prompt lengths {counts}")


def limit_over_what_is_left(target: Target) -> None:
    """A prompt that fits, with a limit that does not fit behind it but into the context: what fits is served."""
    context = next(model["max_model_len"] for model in target.get("/v1/models").body["data"]
                   if model["id"] == target.model)
    got = asked(target, user("word " * WORDS), max_tokens=context - WORDS // 2, stream=True, stop=["e"],
                stream_options={"include_usage": True})
    expect(got["usage"]["prompt_tokens"] > WORDS, got["usage"])


def too_long(target: Target) -> None:
    """400 with both numbers, in the words by which clients know the case."""
    context = next(model["max_model_len"] for model in target.get("/v1/models").body["data"]
                   if model["id"] == target.model)
    answer = target.chat(user("word " * (context + 10)), max_tokens=4)
    check_error(answer, "maximum context length", str(context))


def tools_are_in_the_prompt(target: Target) -> None:
    bare, named, none = (asked(target, QUESTION, max_tokens=1, **fields)["usage"]["prompt_tokens"] for fields in (
        {}, {"tools": [WEATHER]}, {"tools": []}))
    expect(named > bare == none, f"{bare} without tools, {named} with one, {none} with an empty list")


def _choice(choice: Any, **fields: Any) -> Callable[[Target], None]:
    def run(target: Target) -> None:
        for stream in (False, True):
            body = {"model": target.model, "messages": QUESTION, "tools": [WEATHER, RICH], "tool_choice": choice,
                    "max_tokens": 400, "temperature": 0, "stream": stream, **OFF, **fields}
            check_answer(CHAT, body, target.send(CHAT, body))
    return run


def tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters,
                                             **fields}}


RICH = tool("edit", {
    "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": False,
    "definitions": {"range": {"type": "object", "properties": {"start": {"type": "integer", "minimum": 1},
                                                               "end": {"type": ["integer", "null"]}}}},
    "properties": {"path": {"type": "string", "description": "Where? \"quoted\" <b>\n北京"},
                   "edits": {"type": "array", "minItems": 1, "items": {"$ref": "#/definitions/range"}},
                   "mode": {"enum": ["fast", "safe", 3, None]}, "force": {"type": "boolean", "default": False},
                   "value": {"anyOf": [{"type": "string"}, {"type": "object", "additionalProperties": True}]}},
    "required": ["path"]})
# Clients send such; there is nothing wrong with the conversation.
BROKEN = [tool("a", {}), tool("b", None), tool("c", {"type": "object"}), tool("d", {"properties": {"x": {}}}),
          tool("e", {"type": "object", "properties": {"x": {"type": "any"}}}),
          tool("f", {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["y"]}),
          tool("g", {"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}}),
          tool("h", {"type": "object", "properties": {"x": {"type": "string", "pattern": "("}}}),
          {"type": "function", "function": {"name": "i"}}]

CHECKS = [Check(f"history/{name}", run) for name, run in {
    "trial_conversation": trial,
    "max_completion_tokens": _served(user("hi"), max_tokens=None, max_completion_tokens=4),
    "max_completion_tokens_8192": _served(user("hi"), max_tokens=None, max_completion_tokens=8192, stop=["e", "a"]),
    "reasoning_effort": _served(user("hi"), reasoning_effort="high"),
    **{f"reasoning_effort_{effort}": _served(user("hi"), reasoning_effort=effort)
       for effort in ("none", "minimal", "low", "medium", "xhigh")},
    "store_metadata_tier": _served(user("hi"), store=True, metadata={"a": "b"}, service_tier="auto", user="u",
                                   prompt_cache_key="k", safety_identifier="s", verbosity="low"),
    "unknown_fields": _served(user("hi"), a_field_of_tomorrow={"x": [1]}, provider={"order": ["x"]}, transforms=[]),
    "null_fields": _served(user("hi"), temperature=None, top_p=None, tools=None, tool_choice=None, stop=None, n=None,
                           seed=None, response_format=None, logit_bias=None, user=None, functions=None),
    "empty_fields": _served(user("hi"), stop=[], tools=[], logit_bias={}, metadata={}, user=""),
    "content_null": _served(_with_result(assistant(call(), content=None)), tools=[WEATHER]),
    "content_missing": _served(_with_result(assistant(call())), tools=[WEATHER]),
    "content_empty": _served(_with_result(assistant(call(), content="")), tools=[WEATHER]),
    "content_empty_list": _served(_with_result(assistant(call(), content=[])), tools=[WEATHER]),
    "contents_are_alike": _same_prompt(*(_with_result(assistant(call(), **content)) for content in (
        {}, {"content": None}, {"content": ""}, {"content": []}))),
    "arguments_as_object": _same_prompt(_with_result(assistant(call())),
                                        _with_result(assistant(call({"city": "Beijing"})))),
    "arguments_empty": _same_prompt(*(_with_result(assistant(call(form))) for form in ("{}", "", {}, None))),
    "arguments_broken": _served(_with_result(assistant(call('{"city": "Bei')))),
    "arguments_no_object": _served(_with_result(assistant(call('["Beijing"]')))),
    "arguments_missing": _served(_with_result(assistant({"id": "call_1", "type": "function", "function": {
        "name": "get_weather"}}))),
    "index_in_call": _same_prompt(_with_result(assistant(call())), _with_result(assistant(call(index=0)))),
    "call_without_type_or_id": _served(_with_result(assistant({"function": {"name": "get_weather",
                                                                            "arguments": "{}"}}))),
    "calls_empty": _served([*user("hi"), assistant(content="Hello."), *user("again")]),
    "calls_null": _served([*user("hi"), {"role": "assistant", "content": "Hello.", "tool_calls": None,
                                         "function_call": None, "refusal": None, "audio": None}, *user("again")]),
    "several_calls": _served([*QUESTION, assistant(call(), {**call(), "id": "call_2"}, content="Both:"), RESULT,
                              {**RESULT, "tool_call_id": "call_2"}], tools=[WEATHER]),
    "result_without_call": _served([*QUESTION, RESULT, *user("So?")]),
    "result_first": _served([RESULT]),
    "result_without_id": _served(_with_result(assistant(call())) + [{"role": "tool", "content": "rain"}]),
    "result_with_name": _served(_with_result(assistant(call()))[:-1] + [{**RESULT, "name": "get_weather"}]),
    "result_null": _served([*QUESTION, assistant(call()), {**RESULT, "content": None}]),
    "result_empty_list": _served([*QUESTION, assistant(call()), {**RESULT, "content": []}]),
    "result_parts": _served([*QUESTION, assistant(call()), {**RESULT, "content": text('{"sky": "blue"}', "more")}]),
    "unknown_tool_in_history": _served(_with_result(assistant(call())), tools=[RICH]),
    "reasoning_in_history": _served([*_with_result({**assistant(call(), content=None), "reasoning_content": "Hm."}),
                                     {"role": "assistant", "content": "Sunny.", "reasoning": "So.",
                                      "reasoning_details": [{"type": "reasoning.text", "text": "So."}]},
                                     *user("And now?")]),
    "extra_message_fields": _served([{**user("hi")[0], "id": "m1", "name": "Ann", "timestamp": 1, "cache_control": {
        "type": "ephemeral"}}]),
    "parts_in_any_role": _served([{"role": "system", "content": text("Be", "kind")}, {"role": "user", "content": text(
        "hi")}, {"role": "assistant", "content": text("Yes.")}, *_with_result(assistant(call(), content=text("So")))]),
    "parts_are_text": _same_prompt([{"role": "system", "content": text("Be kind.")}, {"role": "user", "content": text(
        "hello")}], [{"role": "system", "content": "Be kind."}, *user("hello")]),
    "cache_control_in_parts": _served([{"role": "user", "content": [{**text("hi")[0], "cache_control": {
        "type": "ephemeral"}}]}]),
    "empty_texts": _served([{"role": "system", "content": ""}, *user(""), {"role": "assistant", "content": ""},
                            *user("hi")]),
    "system_messages_anywhere": prompt_is_longer_with_every_message,
    "system_last": _served([*user("hi"), {"role": "system", "content": "Be brief."}]),
    "system_only": _served([{"role": "system", "content": "Say something."}]),
    "developer": _served([{"role": "developer", "content": "Be brief."}, *user("hi")]),
    "developer_and_system": _served([{"role": "system", "content": "Be kind."}, {"role": "developer", "content": text(
        "Be brief.")}, *user("hi"), {"role": "developer", "content": "Go on."}]),
    "assistant_last": _served([*user("hi"), {"role": "assistant", "content": "Hello"}]),
    "assistant_first": _served([{"role": "assistant", "content": "Welcome!"}, *user("hi")]),
    "users_in_a_row": _served([*user("hi"), *user("are you there?"), *user("hello?")]),
    "pictures_between_text": _served(user([*text("First"), RED, *text("second"), BLUE, *text("Which is larger?")])),
    "picture_in_result": _served([*QUESTION, assistant(call()), {**RESULT, "content": [*text("seen:"), RED]}]),
    "pictures_in_turns": _served([*user([RED]), {"role": "assistant", "content": "Red."}, *user([BLUE, RED])]),
    "picture_detail_as_string": _served(user([{"type": "image_url", "image_url": RED["image_url"]["url"]}])),
    "limit_over_what_is_left": limit_over_what_is_left,
    "too_long": too_long,
    "tools_in_the_prompt": tools_are_in_the_prompt,
    "tools_rich": _served(QUESTION, tools=[RICH, WEATHER]),
    "tools_broken": _served(QUESTION, tools=BROKEN),
    "tools_strict": _served(QUESTION, tools=[tool("get", {"type": "object", "properties": {}}, strict=True),
                                             tool("set", {"type": "object", "properties": {}}, strict=None)]),
    "tools_many": _served(QUESTION, tools=[tool(f"tool_{i}", json.loads(json.dumps(RICH["function"]["parameters"])))
                                           for i in range(40)]),
    "tool_choice_none": _choice("none"),
    "tool_choice_auto": _choice("auto"),
    "tool_choice_required": _choice("required"),
    "tool_choice_named": _choice({"type": "function", "function": {"name": "get_weather"}}),
    "tool_choice_required_single": _choice("required", parallel_tool_calls=False),
    "tool_choice_unknown": lambda target: check_error(target.chat(
        QUESTION, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "nothing"}}), "tool_choice"),
    "parallel_tool_calls_without_tools": _served(user("hi"), parallel_tool_calls=True),
}.items()]
