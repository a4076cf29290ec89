"""The types of a request and its answers: nothing is refused before normalise has read it, nothing emitted is lost."""

from __future__ import annotations

import json

import pytest

from tests.helpers.fake_engine import FakeEngine, client, post, stream
from vllm.entrypoints.openai import protocol, protocol_stock

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = "Hm.\n</think>\n\nLook.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
# Bodies that stock's class refuses. Our route serves all but the last two, and says of these what is wrong.
BODIES = [
    {"max_completion_tokens": 8, "store": True, "metadata": {"a": [1, {}]}, "reasoning_effort": "low"},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"index": 0, "function": {"name": "f"}}]}]},
    {"messages": [{"role": "developer", "content": [{"type": "input_text", "text": "x"}], "opts": 1}]},
    {"tool_choice": "none", "top_logprobs": None, "stream_options": {"include_usage": True}},
    {"tools": [{"type": "function", "strict": True, "function": {"name": "f", "parameters": None, "strict": 1}}]},
    dict.fromkeys(protocol_stock.ChatCompletionRequest.model_fields),
    {"body": 1, "model_config": 2, "copy": 3, "json": {}, "__class__": "x", "": 0},
    {"temperature": "warm", "tools": 7, "n": [1]},
    {},
]
# What has a field of its own somewhere between the response and its leaves.
ANSWERS = {
    "thought": {},
    "thought under the other name": {},
    "call": {"tools": TOOLS},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 3},
    "prompt logprobs": {"prompt_logprobs": 1, "max_tokens": 2},
}


def line(body, url="/v1/chat/completions") -> str:
    return json.dumps({"custom_id": "1", "method": "POST", "url": url, "body": body})


@pytest.mark.parametrize("body", BODIES, ids=lambda body: ",".join(body)[:40])
def test_a_body_arrives_as_it_was_sent(body):
    assert protocol.ChatCompletionRequest.model_validate(body).body() == body
    assert protocol.BatchRequestInput.model_validate_json(line(body)).body.body() == json.loads(json.dumps(body))


def test_half_an_emoji():
    body = {"messages": [{"role": "user", "content": "\ud83d"}]}
    assert protocol.BatchRequestInput.model_validate_json(line(body)).body.body() == body


def test_silence_is_none_and_is_not_sent_on():
    request = protocol.ChatCompletionRequest(model="m", messages=[], nosuch=1)
    assert (request.temperature, request.tools, request.nosuch, request.stream) == (None, None, 1, None)
    assert request.body() == {"model": "m", "messages": [], "nosuch": 1}


def test_the_url_of_a_line_says_what_its_body_is():
    embedding = protocol.BatchRequestInput.model_validate_json(line({"model": "m", "input": "x"}, "/v1/embeddings"))
    assert type(embedding.body) is protocol_stock.EmbeddingRequest
    chat = protocol.BatchRequestInput.model_validate_json(line({"model": "m", "input": "x"}))
    assert type(chat.body) is protocol.ChatCompletionRequest


@pytest.mark.parametrize("name", ANSWERS)
def test_whole_answers_pass_unchanged(name):
    """Also inside a line of a batch's output, which is where pydantic forgets what a subclass added."""
    changes = {"reasoning_field": "reasoning"} if "other name" in name else {}
    with client(FakeEngine(CALL), **changes) as http:
        answer = post(http, **ANSWERS[name])
    made = protocol.ChatCompletionResponse.model_validate(answer)
    assert json.loads(made.model_dump_json()) == answer
    data = protocol.BatchResponseData(request_id="r", body=made)
    written = protocol.BatchRequestOutput(id="i", custom_id="c", response=data, error=None).model_dump_json()
    assert json.loads(written)["response"]["body"] == answer


@pytest.mark.parametrize("name", [name for name in ANSWERS if name != "prompt logprobs"])
def test_streamed_answers_pass_unchanged(name):
    changes = {"reasoning_field": "reasoning"} if "other name" in name else {}
    with client(FakeEngine(CALL), **changes) as http:
        chunks = stream(http, stream_options={"include_usage": True}, **ANSWERS[name])
    again = [json.loads(protocol.ChatCompletionStreamResponse.model_validate(one).model_dump_json()) for one in chunks]
    assert again == chunks


def test_what_others_make_keeps_its_defaults():
    choice = protocol.ChatCompletionResponseChoice(index=0, message=protocol.ChatMessage(role="assistant", content="x"))
    made = protocol.ChatCompletionResponse(model="m", choices=[choice], usage=protocol.UsageInfo()).model_dump()
    assert made["object"] == "chat.completion" and made["id"].startswith("chatcmpl-"), made
    assert made["choices"] == [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]
