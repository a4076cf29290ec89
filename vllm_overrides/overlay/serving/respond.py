"""Events -> what the client reads: chunks of a stream, or one message. Plain dicts; ``sse`` makes a line of one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

import msgspec

from vllm.overlay.serving.calls import custom_input
from vllm.overlay.serving.parse.events import CallArguments, CallStart, Content, Event, Thought
from vllm.overlay.serving.tools import Tools

_ENCODE = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event, of what this server has made itself: large whole numbers are refused, NaN becomes null."""
    return b"data: %b\n\n" % _ENCODE(body)


def named_sse(body: dict[str, Any]) -> bytes:
    """One server-sent event that is named by its ``type``. What a request holds may be repeated in it."""
    words = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {body['type']}\ndata: {words}\n\n".encode()


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int,
          reasoning_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object. cached_tokens: prompt tokens that the engine did not compute again."""
    counts: dict[str, Any] = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + completion_tokens,
                              "completion_tokens": completion_tokens,
                              "prompt_tokens_details": {"cached_tokens": cached_tokens}}
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts


def call_id() -> str:
    """A new id of a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class ChatDeltas:
    """One choice's events as deltas."""

    def __init__(self, reasoning_field: str, tools: Tools, show_thought: bool = True) -> None:
        """reasoning_field: ``reasoning_content`` or ``reasoning``. show_thought: thoughts make deltas."""
        self._reasoning_field = reasoning_field
        self._tools = tools
        self._show_thought = show_thought
        # Of the call of a custom tool that is being written: its index, and its arguments so far.
        self._custom: tuple[int, list[str]] | None = None

    def of(self, event: Event) -> list[dict[str, Any]]:
        """The deltas of one event. Only the first one of a call has its id, type and name."""
        if isinstance(event, CallArguments):
            if self._custom is not None:
                self._custom[1].append(event.text)
                return []
            return [self._call(event.index, {}, {"arguments": event.text})]
        before = self.finish()
        if isinstance(event, Thought):
            return before + ([{self._reasoning_field: event.text}] if self._show_thought else [])
        if isinstance(event, Content):
            return [*before, {"content": event.text}]
        if event.name in self._tools.custom:
            self._custom = (event.index, [])
            return [*before, {"tool_calls": [{"index": event.index, "id": call_id(), "type": "custom",
                                              "custom": {"name": event.name, "input": ""}}]}]
        return [*before, self._call(event.index, {"id": call_id(), "type": "function"},
                                    {"name": event.name, "arguments": ""})]

    def finish(self) -> list[dict[str, Any]]:
        """What was held back: the text of a custom tool's call, which is known when its JSON is whole."""
        if self._custom is None:
            return []
        (index, parts), self._custom = self._custom, None
        return [{"tool_calls": [{"index": index, "custom": {"input": custom_input("".join(parts))}}]}]

    def _call(self, index: int, first: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
        if self._tools.legacy:
            return {"function_call": function}
        return {"tool_calls": [{"index": index, **first, "function": function}]}


class ChatMessage:
    """One choice's events gathered into a message."""

    def __init__(self, role: str, reasoning_field: str, tools: Tools, show_thought: bool = True) -> None:
        self._reasoning_field = reasoning_field
        self._role = role
        self._tools = tools
        self._show_thought = show_thought
        self._thoughts: list[str] = []
        self._contents: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, events: Iterable[Event]) -> None:
        """Take up more events."""
        for event in events:
            if isinstance(event, Thought):
                self._thoughts.append(event.text)
            elif isinstance(event, Content):
                self._contents.append(event.text)
            elif isinstance(event, CallStart):
                self._calls.append((event.name, []))
            elif isinstance(event, CallArguments):
                self._calls[event.index][1].append(event.text)

    def body(self) -> dict[str, Any]:
        """The message. content is null when there is none beside thought or calls; of the other fields, those that
        OpenAI's API always has are there."""
        content = "".join(self._contents)
        message: dict[str, Any] = {"role": self._role, "content": content or None, "refusal": None, "annotations": []}
        if not content and not self._calls and not self._thoughts:
            message["content"] = ""
        if self._thoughts and self._show_thought:
            message[self._reasoning_field] = "".join(self._thoughts)
        calls = [(name, "".join(parts)) for name, parts in self._calls]
        if calls and self._tools.legacy:
            message["function_call"] = {"name": calls[0][0], "arguments": calls[0][1]}
        elif calls:
            message["tool_calls"] = [self._call(name, arguments) for name, arguments in calls]
        return message

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        if name in self._tools.custom:
            return {"id": call_id(), "type": "custom", "custom": {"name": name, "input": custom_input(arguments)}}
        return {"id": call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
