"""The real clients of OpenAI and Anthropic against our server: what they make of its answers is what was said."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.conformance.forcing import Plan
from tests.helpers.forced import call

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Beijing?"}]
CITY = "Běijīng 北京 \"🎉\""
CALL = call("get_weather", ("city", CITY), ("days", "3"))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
          "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}}
ARGUMENTS = {"city": CITY, "days": 3}
ANSWER = "Sunny: 25 °C.\n\n* no rain"
SAYS = Plan(ANSWER)
CALLS = Plan("It is: $RESULT", call=CALL)


class Person(BaseModel):
    name: str
    age: int


class get_weather(BaseModel):  # noqa: N801 - its name is the tool's
    city: str
    days: int


@pytest.fixture
def api(own_server):
    with openai.OpenAI(base_url=f"{own_server.base}/v1", api_key="none", max_retries=0, timeout=240) as made:
        yield made


@pytest.fixture
def claude(own_server):
    with anthropic.Anthropic(base_url=own_server.base, api_key="none", max_retries=0, timeout=240) as made:
        yield made


def test_chat(api):
    got = api.chat.completions.create(model="llm", messages=QUESTION, extra_headers=SAYS.header())
    message = got.choices[0].message
    assert (message.content, message.reasoning_content, got.choices[0].finish_reason) == (ANSWER, "Let me see.", "stop")
    assert got.usage.completion_tokens_details.reasoning_tokens > 0


def test_chat_streaming_helper(api):
    with api.chat.completions.stream(model="llm", messages=QUESTION, extra_headers=SAYS.header(),
                                     stream_options={"include_usage": True}) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == ANSWER == final.choices[0].message.content and len(deltas) > 3, deltas
    assert final.usage.completion_tokens > 10


async def test_chat_async(own_server):
    async with openai.AsyncOpenAI(base_url=f"{own_server.base}/v1", api_key="none", max_retries=0) as api:
        stream = await api.chat.completions.create(model="llm", messages=QUESTION, stream=True,
                                                   extra_headers=SAYS.header())
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == ANSWER


def test_chat_tools_there_and_back(api):
    first = api.chat.completions.parse(model="llm", messages=QUESTION, extra_headers=CALLS.header(),
                                       tools=[openai.pydantic_function_tool(get_weather)])
    message, finish = first.choices[0].message, first.choices[0].finish_reason
    called, = message.tool_calls
    assert finish == "tool_calls" and called.function.parsed_arguments == get_weather(**ARGUMENTS), called
    result = {"role": "tool", "tool_call_id": called.id, "content": "sunny, 25 °C"}
    second = api.chat.completions.create(model="llm", messages=[*QUESTION, message, result], tools=[TOOL],
                                         extra_headers=CALLS.header())
    assert second.choices[0].message.content == "It is: sunny, 25 °C", second


def test_chat_streamed_tools(api):
    with api.chat.completions.stream(model="llm", messages=QUESTION, tools=[TOOL],
                                     extra_headers=CALLS.header()) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        called, = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(called.function.arguments) == ARGUMENTS and "".join(deltas) == called.function.arguments
    assert len(deltas) > 3, deltas


def test_chat_parsed(api):
    """The grammar is the schema's, the words are the model's."""
    got = api.chat.completions.parse(model="llm", messages=QUESTION, response_format=Person, max_tokens=1500,
                                     extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert isinstance(got.choices[0].message.parsed, Person), got


def test_completions(api):
    got = api.completions.create(model="llm", prompt="Once", max_tokens=8, logprobs=1, seed=3)
    streamed = list(api.completions.create(model="llm", prompt="Once", max_tokens=8, seed=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == got.choices[0].text
    assert len(got.choices[0].logprobs.tokens) == got.usage.completion_tokens


def test_responses(api):
    got = api.responses.create(model="llm", input="Hello", extra_headers=SAYS.header())
    assert (got.output_text, got.status, [item.type for item in got.output]) == (
        ANSWER, "completed", ["reasoning", "message"]), got
    assert got.usage.output_tokens_details.reasoning_tokens > 0


def test_responses_streaming_helper(api):
    with api.responses.stream(model="llm", input="Hello", extra_headers=SAYS.header()) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == ANSWER == final.output_text and len(deltas) > 3, deltas


def test_responses_tools_there_and_back(api):
    tools = [{"type": "function", **TOOL["function"], "strict": False}]
    first = api.responses.create(model="llm", input=QUESTION, tools=tools, extra_headers=CALLS.header())
    called = next(item for item in first.output if item.type == "function_call")
    assert json.loads(called.arguments) == ARGUMENTS
    items = [*QUESTION, *[item.model_dump() for item in first.output],
             {"type": "function_call_output", "call_id": called.call_id, "output": "sunny"}]
    second = api.responses.create(model="llm", input=items, tools=tools, extra_headers=CALLS.header())
    assert second.output_text == "It is: sunny", second


def test_responses_parsed(api):
    got = api.responses.parse(model="llm", input="Alice is 30", text_format=Person, max_output_tokens=1500,
                              extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert isinstance(got.output_parsed, Person), got


def test_models_and_errors(api):
    model, = api.models.list().data
    assert model.id == api.models.retrieve("llm").id == "llm"
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(model="llm", messages=QUESTION, top_p=1.5)
    assert refused.value.param == "top_p" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(model="gpt-9", messages=QUESTION)
    with pytest.raises(openai.NotFoundError):
        api.embeddings.create(model="llm", input="x")


def test_messages(claude):
    got = claude.messages.create(model="llm", max_tokens=500, messages=QUESTION, extra_headers=SAYS.header())
    block, = got.content
    assert (block.type, block.text, got.stop_reason) == ("text", ANSWER, "end_turn")
    counted = claude.messages.count_tokens(model="llm", messages=QUESTION)
    assert counted.input_tokens == got.usage.input_tokens


def test_messages_streaming_helper(claude):
    with claude.messages.stream(model="llm", max_tokens=500, messages=QUESTION, thinking={"type": "adaptive"},
                                extra_headers=SAYS.header()) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == ANSWER and len(texts) > 3, texts
    assert [(block.type, getattr(block, block.type)) for block in final.content] == [
        ("thinking", "Let me see."), ("text", ANSWER)]


def test_messages_tools_there_and_back(claude):
    tools: list[Any] = [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}]
    with claude.messages.stream(model="llm", max_tokens=500, messages=QUESTION, tools=tools,
                                extra_headers=CALLS.header()) as stream:
        first = stream.get_final_message()
    used, = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and used.input == ARGUMENTS, first
    history = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}]}]
    second = claude.messages.create(model="llm", max_tokens=500, messages=history, tools=tools,
                                    extra_headers=CALLS.header())
    assert second.content[0].text == "It is: sunny", second


def test_messages_errors(claude):
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model="llm", max_tokens=0, messages=QUESTION)
    assert "max_tokens" in str(refused.value)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", max_tokens=5, messages=QUESTION)
