"""Answers of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai.types.responses
from pydantic import TypeAdapter

from tests.conformance.checks import expect
from tests.conformance.forms.shared import check_usage, named_events, obeys, parsed, typed
from tests.conformance.target import Streamed

_EVENT: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)


def response(body: Mapping[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """A whole answer; gives it back."""
    typed(openai.types.responses.Response, got)
    expect(got["object"] == "response" and got["status"] in ("completed", "incomplete"), f"object, status: {got}")
    expect((got["status"] == "incomplete") == bool(got.get("incomplete_details")), f"incomplete_details: {got}")
    check_usage(got.get("usage"), "input_tokens", "output_tokens")
    if body.get("max_output_tokens"):
        expect(got["usage"]["output_tokens"] <= body["max_output_tokens"], f"{got['usage']}")
    calls = [item for item in got["output"] if item["type"] == "function_call"]
    texts = [part["text"] for item in got["output"] if item["type"] == "message" for part in item["content"]]
    if got["status"] == "completed":
        expect(got["output"], f"no output: {got}")
        for call in calls:
            expect(isinstance(parsed(call["arguments"]), dict), f"arguments: {call}")
        wanted = body.get("tool_choice")
        if wanted == "required" or isinstance(wanted, dict) and wanted.get("type") == "function":
            expect(calls, f"no call although one is required: {got['output']}")
        if body.get("parallel_tool_calls") is False:
            expect(len(calls) <= 1, f"{len(calls)} calls although one at a time was asked for")
        form = (body.get("text") or {}).get("format") or {}
        if form.get("type") in ("json_object", "json_schema") and not calls:
            obeys(parsed("".join(texts)), form.get("schema"))
    return got


def response_stream(body: Mapping[str, Any], got: Streamed) -> dict[str, Any]:
    """A streamed answer; gives the response that its last event holds, which its deltas must add up to."""
    events = named_events(got, done=True)
    for event in events:
        typed(_EVENT, event)
    expect([event["sequence_number"] for event in events] == list(range(len(events))), "sequence numbers")
    expect(events[0]["type"] == "response.created" and events[1]["type"] == "response.in_progress", events[:2])
    expect(events[-1]["type"] in ("response.completed", "response.incomplete"), events[-1])
    final = response(body, events[-1]["response"])
    for part in ("output_text", "reasoning_text"):
        kind = f"response.{part}.delta"
        told = "".join(event["delta"] for event in events if event["type"] == kind)
        held = "".join(piece["text"] for item in final["output"] for piece in item.get("content") or []
                       if piece["type"] == part)
        expect(told == held, f"{kind} gives {told!r:.200}, the response holds {held!r:.200}")
    told = "".join(event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta")
    held = "".join(item["arguments"] for item in final["output"] if item["type"] == "function_call")
    expect(told == held, f"arguments: {told!r:.200} is not {held!r:.200}")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    expect(done == final["output"], "the finished items are not those of the response")
    return final
