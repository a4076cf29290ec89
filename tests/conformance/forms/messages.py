"""Answers of /v1/messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anthropic.types
from pydantic import TypeAdapter

from tests.conformance.checks import expect
from tests.conformance.forms.shared import check_usage, named_events, obeys, parsed, typed
from tests.conformance.target import Streamed

_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)


def message(body: Mapping[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    """A whole answer; gives it back."""
    typed(anthropic.types.Message, got)
    expect(got["role"] == "assistant" and got["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence", "tool_use"),
           f"role, stop_reason: {got}")
    check_usage(got.get("usage"), "input_tokens", "output_tokens")
    expect(0 < got["usage"]["output_tokens"] <= body["max_tokens"], f"{got['usage']}")
    uses = [block for block in got["content"] if block["type"] == "tool_use"]
    thoughts = [block for block in got["content"] if block["type"] == "thinking"]
    if (body.get("thinking") or {"type": "disabled"})["type"] == "disabled":
        expect(not thoughts, f"a thought that nobody asked for: {got['content']}")
    if got["stop_reason"] != "max_tokens":
        expect(bool(uses) == (got["stop_reason"] == "tool_use"), f"{got['stop_reason']} with {len(uses)} calls")
        wanted = (body.get("tool_choice") or {}).get("type")
        expect(uses or wanted not in ("any", "tool"), f"no call although one is required: {got['content']}")
        form = (body.get("output_config") or {}).get("format")
        if form and not uses:
            obeys(parsed("".join(block["text"] for block in got["content"] if block["type"] == "text")), form["schema"])
    return got


def message_stream(body: Mapping[str, Any], got: Streamed) -> dict[str, Any]:
    """A streamed answer; gives what a client gathers from it, in the form of a whole one."""
    events = [event for event in named_events(got, done=False) if event["type"] != "ping"]
    for event in events:
        typed(_EVENT, event)
    kinds = [event["type"] for event in events]
    expect(kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], f"order: {kinds}")
    made = {**events[0]["message"], **events[-2]["delta"]}
    made["usage"] = {**made["usage"], **events[-2]["usage"]}
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            expect(not is_open and event["index"] == len(blocks), f"a block begins inside another: {kinds}")
            blocks.append(dict(event["content_block"]))
            is_open = True
        elif event["type"] == "content_block_stop":
            expect(is_open and event["index"] == len(blocks) - 1, f"a block ends that is not open: {kinds}")
            is_open = False
        else:
            expect(is_open and event["index"] == len(blocks) - 1, f"a delta outside its block: {event}")
            _add_block_delta(blocks[-1], event["delta"], inputs, event["index"])
    for index, text in inputs.items():
        if made["stop_reason"] != "max_tokens":
            blocks[index]["input"] = parsed(text or "{}")
    return message(body, {**made, "content": blocks})


def _add_block_delta(block: dict[str, Any], delta: Mapping[str, Any], inputs: dict[int, str], index: int) -> None:
    if delta["type"] == "input_json_delta":
        inputs[index] = inputs.get(index, "") + delta["partial_json"]
        return
    name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[delta["type"]]
    block[name] = (block.get(name) or "") + delta[name]
