"""Answers of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import openai.types.chat

from tests.conformance.checks import expect
from tests.conformance.forms.shared import check_limit, check_usage, last_usage, obeys, openai_chunks, parsed, typed
from tests.conformance.target import Streamed

FINISH = {"stop", "length", "tool_calls", "function_call", "content_filter"}
REASONING = ("reasoning_content", "reasoning")
TURN_END = "<|im_end|>"
MARKERS = ("<think>", "</think>", TURN_END, "<tool_call>")


def chat(body: Mapping[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """A whole answer; gives it back."""
    typed(openai.types.chat.ChatCompletion, got)
    expect(got["object"] == "chat.completion" and got["model"] == body["model"], f"object, model: {got}")
    expect([choice["index"] for choice in got["choices"]] == list(range(body.get("n") or 1)), f"choices: {got}")
    for choice in got["choices"]:
        _check_message(body, choice["message"], choice["finish_reason"])
        if body.get("logprobs"):
            expect(choice["logprobs"]["content"], f"no logprobs: {choice}")
            for token in choice["logprobs"]["content"]:
                expect(len(token["top_logprobs"]) == (body.get("top_logprobs") or 0), f"top_logprobs: {token}")
    check_usage(got.get("usage"), "prompt_tokens", "completion_tokens")
    check_limit(body, got["usage"]["completion_tokens"], len(got["choices"]))
    return got


def chat_stream(body: Mapping[str, Any], got: Streamed) -> dict[str, Any]:
    """A streamed answer; gives what a client gathers from it, in the form of a whole one."""
    chunks = openai_chunks(got)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        typed(openai.types.chat.ChatCompletionChunk, chunk)
        expect(chunk["object"] == "chat.completion.chunk", chunk)
        for choice in chunk["choices"]:
            _gather(choices.setdefault(choice["index"], {"message": {}, "finish_reason": None, "calls": {}}), choice)
    expect(sorted(choices) == list(range(body.get("n") or 1)), f"choices: {sorted(choices)}")
    for choice in choices.values():
        calls = choice.pop("calls")
        expect(sorted(calls) == list(range(len(calls))), f"indexes of calls: {sorted(calls)}")
        if calls:
            choice["message"]["tool_calls"] = [calls[index] for index in sorted(calls)]
        _check_message(body, choice["message"], choice["finish_reason"])
    usage = last_usage(body, chunks)
    if usage is not None:
        check_usage(usage, "prompt_tokens", "completion_tokens")
        check_limit(body, usage["completion_tokens"], len(choices))
    return {"id": chunks[0]["id"], "usage": usage,
            "choices": [{"index": index, **choices[index]} for index in sorted(choices)]}


def _gather(into: dict[str, Any], choice: Mapping[str, Any]) -> None:
    """Adds a delta to its choice, as a client does."""
    delta, message = choice["delta"], into["message"]
    said = any(delta.get(name) for name in ("content", "tool_calls", *REASONING))
    expect(into["finish_reason"] is None or not said, f"a delta after the finish: {choice}")
    if choice.get("finish_reason"):
        into["finish_reason"] = choice["finish_reason"]
    if delta.get("role"):
        expect("role" not in message, f"a second role: {choice}")
        message["role"] = delta["role"]
    expect("role" in message, f"the first delta has no role: {choice}")
    for name in ("content", *REASONING):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for part in delta.get("tool_calls") or []:
        call = into["calls"].get(part["index"])
        if call is None:
            expect(part.get("id") and part.get("type"), f"a call begins without id or type: {part}")
            call = into["calls"][part["index"]] = {"id": part["id"], "type": part["type"],
                                                   part["type"]: dict(part[part["type"]])}
            continue
        expect(part.get("id") in (None, call["id"]), f"a call's id changes: {part}")
        inner = part.get(call["type"]) or {}
        for name in ("arguments", "input"):
            if inner.get(name):
                call[call["type"]][name] = (call[call["type"]].get(name) or "") + inner[name]



def _check_message(body: Mapping[str, Any], message: Mapping[str, Any], finish: str) -> None:
    expect(message["role"] == "assistant" and finish in FINISH, f"role, finish: {message}, {finish}")
    content = message.get("content")
    expect(content is None or isinstance(content, str), f"content: {message}")
    # Who asks for special tokens sees the turn's end, where it does not end the answer.
    shown = (TURN_END, ) if body.get("skip_special_tokens") is False else ()
    for marker in MARKERS:
        expect(marker in shown or marker not in json.dumps(message, ensure_ascii=False), f"a marker leaks: {message}")
    calls = message.get("tool_calls") or []
    names = {tool[tool["type"]]["name"] for tool in body.get("tools") or [] if tool["type"] in tool}
    for call in calls:
        expect(call["type"] == "custom" or call["id"] and call["function"]["name"] in names, f"call: {call}")
        if finish != "length" and call["type"] == "function":
            expect(isinstance(parsed(call["function"]["arguments"]), dict), f"arguments: {call}")
    if finish == "length":
        return
    expect(bool(calls) == (finish == "tool_calls"), f"finish {finish} with {len(calls)} calls")
    wanted = body.get("tool_choice")
    if wanted == "none":
        expect(not calls, f"calls although none may be made: {message}")
    if wanted == "required" or isinstance(wanted, dict) and wanted["type"] == "function":
        expect(calls, f"no call although one is required: {message}")
        if isinstance(wanted, dict):
            expect({call["function"]["name"] for call in calls} == {wanted["function"]["name"]}, f"calls: {calls}")
    if body.get("parallel_tool_calls") is False:
        expect(len(calls) <= 1, f"{len(calls)} calls although one at a time was asked for")
    form = body.get("response_format") or {}
    if form.get("type") in ("json_object", "json_schema") and not calls:
        value = parsed(content)
        expect(form["type"] == "json_schema" or isinstance(value, dict), f"not an object: {content}")
        obeys(value, (form.get("json_schema") or {}).get("schema"))
