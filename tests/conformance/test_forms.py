"""The forms notice answers that are wrong: each case is a right answer, or stream, with one thing changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.conformance.checks import Failed
from tests.conformance.forms import check_answer, check_error
from tests.conformance.target import CHAT, Answer, Streamed

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
BODY: dict[str, Any] = {"model": "llm", "messages": [], "tools": TOOLS, "max_tokens": 9}
MESSAGE = {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WHOLE = {"id": "x", "object": "chat.completion", "created": 1, "model": "llm", "choices": [
    {"index": 0, "message": MESSAGE, "finish_reason": "stop", "logprobs": None}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9,
              "completion_tokens_details": {"reasoning_tokens": 2}}}
DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""}, {"reasoning_content": "Hm."}, {"content": "Hel"}, {"content": "lo."}]


def whole(changed: Callable[[dict[str, Any]], object] = lambda body: None, status: int = 200) -> Answer:
    body = copy.deepcopy(WHOLE)
    changed(body)
    return Answer(status, body, json.dumps(body), httpx.Headers())


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "llm",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def streamed(chunks: list[dict[str, Any]], done: int = 1) -> Streamed:
    lines = [f"data: {json.dumps(one)}" for one in chunks] + ["data: [DONE]"] * done
    return Streamed(200, None, "\n".join(lines), httpx.Headers(), [("", line[6:]) for line in lines], lines)


def stream(*more: dict[str, Any], deltas: list[dict[str, Any]] = DELTAS, finish: str = "stop",
           **fields: Any) -> Streamed:
    return streamed([*map(chunk, deltas), chunk({}, finish), *more], **fields)


def message(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["choices"][0]["message"].update(fields)


def choice(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["choices"][0].update(fields)


def test_right_ones_pass():
    assert check_answer(CHAT, BODY, whole()) == WHOLE
    got = check_answer(CHAT, {**BODY, "stream": True}, stream())
    assert got["choices"] == [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}]
    check_answer(CHAT, {**BODY, "skip_special_tokens": False}, whole(message(content="Hello<|im_end|>")))
    check_answer(CHAT, BODY, whole(lambda body: (message(tool_calls=[CALL], content=None)(body),
                                                 choice(finish_reason="tool_calls")(body))))


def test_usage_may_tell_more():
    """vLLM's counts of pictures are an object."""
    check_answer(CHAT, BODY, whole(lambda body: body["usage"].update(prompt_tokens_details={
        "cached_tokens": 0, "multimodal_tokens": {"image": 3}})))


WRONG: dict[str, tuple[dict[str, Any], Answer]] = {
    "refused": ({}, whole(status=400)),
    "no usage": ({}, whole(lambda body: body.pop("usage"))),
    "usage does not add up": ({}, whole(lambda body: body["usage"].update(total_tokens=10))),
    "more thoughts than tokens": ({}, whole(lambda body: body["usage"]["completion_tokens_details"].update(
        reasoning_tokens=5))),
    "over the limit": ({"max_tokens": 3}, whole()),
    "another model": ({}, whole(lambda body: body.update(model="other"))),
    "too few choices": ({"n": 2}, whole()),
    "finish of no kind": ({}, whole(choice(finish_reason="eos"))),
    "marker in content": ({}, whole(message(content="</think>Hello"))),
    "turn's end in content": ({}, whole(message(content="Hello<|im_end|>"))),
    "marker though only special tokens are shown": ({"skip_special_tokens": False}, whole(
        message(content="</think>Hello"))),
    "marker in thought": ({}, whole(message(reasoning_content="<think>"))),
    "content a list": ({}, whole(message(content=["Hello"]))),
    "calls, finish stop": ({}, whole(message(tool_calls=[CALL]))),
    "finish tool_calls, no call": ({}, whole(choice(finish_reason="tool_calls"))),
    "required, no call": ({"tool_choice": "required"}, whole()),
    "no JSON": ({"response_format": {"type": "json_object"}}, whole()),
    "against the schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}},
                           whole(message(content='"1"'))),
    "not a stream": ({"stream": True}, whole()),
    "no [DONE]": ({"stream": True}, stream(done=0)),
    "two [DONE]": ({"stream": True}, stream(done=2)),
    "delta after the finish": ({"stream": True}, stream(chunk({"content": "more"}))),
    "two roles": ({"stream": True}, stream(deltas=[DELTAS[0], DELTAS[0]])),
    "no role": ({"stream": True}, stream(deltas=DELTAS[1:])),
    "another id": ({"stream": True}, stream({**chunk({}), "id": "y"})),
    "usage not asked for": ({"stream": True}, stream(chunk({}, usage=WHOLE["usage"]))),
    "usage not sent": ({"stream": True, "stream_options": {"include_usage": True}}, stream()),
    "an error in the stream": ({"stream": True}, stream({"id": "x", "error": {"message": "x"}})),
    "call without id": ({"stream": True}, stream(
        deltas=[DELTAS[0], {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}],
        finish="tool_calls")),
    "arguments cut": ({"stream": True}, stream(
        deltas=[DELTAS[0], {"tool_calls": [{**CALL, "index": 0, "function": {"name": "f", "arguments": "{"}}]}],
        finish="tool_calls")),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_fail(name):
    body, answer = WRONG[name]
    with pytest.raises(Failed):
        check_answer(CHAT, {**BODY, **body}, answer)


@pytest.mark.parametrize("status, error", [
    (200, {"message": "m", "type": "t", "param": None, "code": None}), (500, {"message": "m"}),
    (400, {"message": "m", "type": "t"}), (400, {"message": "", "type": "t", "param": None, "code": None})])
def test_wrong_errors_fail(status, error):
    with pytest.raises(Failed):
        check_error(Answer(status, {"error": error}, json.dumps({"error": error}), httpx.Headers()), "field")
