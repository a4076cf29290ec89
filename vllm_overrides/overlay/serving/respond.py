"""Events -> what the client reads: chunks of a stream, or one message. Plain dicts; ``sse`` makes a line of one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from vllm.overlay.serving.parse.events import CallArguments, CallStart, Content, Event, Thought

DONE = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


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
    """One choice's events as deltas. reasoning_field: ``reasoning_content`` or ``reasoning``."""

    def __init__(self, reasoning_field: str) -> None:
        self._reasoning_field = reasoning_field

    def delta(self, event: Event) -> dict[str, Any]:
        """The delta of one event. Only the first one of a call has its id, type and name."""
        if isinstance(event, Thought):
            return {self._reasoning_field: event.text}
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, CallStart):
            return {"tool_calls": [{"index": event.index, "id": call_id(), "type": "function",
                                    "function": {"name": event.name, "arguments": ""}}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


class ChatMessage:
    """One choice's events gathered into a message."""

    def __init__(self, reasoning_field: str, role: str) -> None:
        self._reasoning_field = reasoning_field
        self._role = role
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
        """The message. content is null when there is none beside thought or calls; absent fields are left out."""
        content = "".join(self._contents)
        message: dict[str, Any] = {"role": self._role, "content": content or None}
        if not content and not self._calls and not self._thoughts:
            message["content"] = ""
        if self._thoughts:
            message[self._reasoning_field] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = [
                {"id": call_id(), "type": "function", "function": {"name": name, "arguments": "".join(parts)}}
                for name, parts in self._calls]
        return message
