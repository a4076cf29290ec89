"""A chat answer's events -> the content blocks of a message, and the events of a stream that tell of them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from vllm.overlay.serving.calls import arguments_of
from vllm.overlay.serving.parse.events import CallArguments, CallStart, Content, Event, Thought


class BlockWriter:
    """Fed a choice's events, gives those of the stream. ``content`` are the blocks that are finished."""

    def __init__(self, hide_thought: bool) -> None:
        """hide_thought: a thought is a block without its text."""
        self._hide_thought = hide_thought
        self._block: dict[str, Any] | None = None
        self._parts: list[str] = []
        self.content: list[dict[str, Any]] = []

    def write(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """The events that these make."""
        out: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, CallStart):
                out += self._begin({"type": "tool_use", "id": f"toolu_{uuid4().hex[:24]}", "name": event.name,
                                    "input": {}, "caller": {"type": "direct"}})
            elif isinstance(event, CallArguments):
                self._parts.append(event.text)
                out.append(self._delta("input_json_delta", partial_json=event.text))
            elif isinstance(event, Thought):
                out += self._text("thinking", event.text, {"thinking": "", "signature": ""})
            elif isinstance(event, Content):
                out += self._text("text", event.text, {"text": "", "citations": None})
        return out

    def finish(self) -> list[dict[str, Any]]:
        """The end of the block that is open."""
        if self._block is None:
            return []
        block, text = self._block, "".join(self._parts)
        out = []
        if block["type"] == "tool_use":
            block["input"] = arguments_of(text)
        elif block["type"] == "thinking":
            # Clients want to see one before they send a thought back. It is the thought's digest; nobody checks it.
            block["signature"] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            out.append(self._delta("signature_delta", signature=block["signature"]))
            block["thinking"] = "" if self._hide_thought else text
        else:
            block["text"] = text
        out.append({"type": "content_block_stop", "index": len(self.content)})
        self.content.append(block)
        self._block, self._parts = None, []
        return out

    def _text(self, kind: str, text: str, empty: dict[str, Any]) -> list[dict[str, Any]]:
        out = []
        if self._block is None or self._block["type"] != kind:
            out += self._begin({"type": kind, **empty})
        self._parts.append(text)
        if kind == "thinking" and self._hide_thought:
            return out
        return [*out, self._delta(f"{kind}_delta", **{kind: text})]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        out = self.finish()
        self._block = block
        return [*out, {"type": "content_block_start", "index": len(self.content), "content_block": dict(block)}]

    def _delta(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content), "delta": {"type": kind, **fields}}
