"""A chat answer's events -> the output items of a response, and the events of a stream that tell of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

from vllm.overlay.serving.calls import custom_input
from vllm.overlay.serving.parse.events import CallArguments, CallStart, Content, Event, Thought
from vllm.overlay.serving.respond import call_id
from vllm.overlay.serving.responses.sealed import sealed
from vllm.overlay.serving.tools import Tools

_MESSAGE, _REASONING, _FUNCTION, _CUSTOM = "message", "reasoning", "function_call", "custom_tool_call"
# Per kind of item: how its text is called in events, and its part.
_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    _MESSAGE: ("output_text", {"type": "output_text", "annotations": [], "logprobs": []}),
    _REASONING: ("reasoning_text", {"type": "reasoning_text"})}


class ItemWriter:
    """Fed a choice's events, gives those of the stream. ``output`` are the items that are finished."""

    def __init__(self, tools: Tools, namespaces: Mapping[str, tuple[str, str]], show_thought: bool,
                 seals: bool = False) -> None:
        self._tools = tools
        self._namespaces = namespaces
        self._show_thought = show_thought
        self._seals = seals
        self._item: dict[str, Any] | None = None
        self._parts: list[str] = []
        # Of the open item, and of what was generated since its last text.
        self._logprobs: list[dict[str, Any]] = []
        self._due: list[dict[str, Any]] = []
        self.output: list[dict[str, Any]] = []

    def write(self, events: Iterable[Event], logprobs: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        """logprobs: of the content's tokens, as far as they are new; they go with the next text."""
        out: list[dict[str, Any]] = []
        self._due += logprobs or ()
        for event in events:
            if isinstance(event, CallArguments):
                out += self._arguments(event.text)
            elif isinstance(event, CallStart):
                out += self._begin_call(event.name)
            elif isinstance(event, Content):
                out += self._text(_MESSAGE, event.text)
            elif isinstance(event, Thought) and self._show_thought:
                out += self._text(_REASONING, event.text)
        return out

    def finish(self, status: str) -> list[dict[str, Any]]:
        """The end of the answer. status: ``completed`` or ``incomplete``, of the item that is open."""
        return self._close(status)

    def _is(self, kind: str) -> bool:
        return self._item is not None and self._item["type"] == kind

    def _text(self, kind: str, text: str) -> list[dict[str, Any]]:
        out = []
        name, part = _TEXT[kind]
        if not self._is(kind):
            out += self._close()
            fields: dict[str, Any] = {"role": "assistant", "content": []} if kind == _MESSAGE else {
                "summary": [], "content": []}
            out += self._open(kind, "msg" if kind == _MESSAGE else "rs", fields)
            out.append(self._event("content_part.added", content_index=0, part={**part, "text": ""}))
        self._parts.append(text)
        shown: dict[str, Any] = {}
        if kind == _MESSAGE:
            shown["logprobs"], self._due = self._due, []
            self._logprobs += shown["logprobs"]
        return [*out, self._event(f"{name}.delta", content_index=0, delta=text, **shown)]

    def _begin_call(self, name: str) -> list[dict[str, Any]]:
        out = self._close()
        if name in self._tools.custom:
            return out + self._open(_CUSTOM, "ctc", {"call_id": call_id(), "name": name, "input": ""})
        fields = {"call_id": call_id(), "name": name, "arguments": ""}
        if name in self._namespaces:
            fields["namespace"], fields["name"] = self._namespaces[name]
        return out + self._open(_FUNCTION, "fc", fields)

    def _arguments(self, text: str) -> list[dict[str, Any]]:
        self._parts.append(text)
        return [self._event("function_call_arguments.delta", delta=text)] if self._is(_FUNCTION) else []

    def _open(self, kind: str, prefix: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        self._item = {"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        return [self._event("output_item.added", named=False, item=dict(self._item))]

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        item, text = self._item, "".join(self._parts)
        if item is None:
            return []
        out = []
        kind = item["type"]
        if kind == _FUNCTION:
            item["arguments"] = text
            out.append(self._event("function_call_arguments.done", name=item["name"], arguments=text))
        elif kind == _CUSTOM:
            item["input"] = custom_input(text)
            out.append(self._event("custom_tool_call_input.delta", delta=item["input"]))
            out.append(self._event("custom_tool_call_input.done", input=item["input"]))
        else:
            name, part = _TEXT[kind]
            shown: dict[str, Any] = {}
            if kind == _MESSAGE:
                shown["logprobs"], self._due = self._logprobs + self._due, []
            whole = {**part, "text": text, **shown}
            item["content"] = [whole]
            if kind == _REASONING and self._seals:
                item["encrypted_content"] = sealed(text)
            out.append(self._event(f"{name}.done", content_index=0, text=text, **shown))
            out.append(self._event("content_part.done", content_index=0, part=whole))
        item["status"] = status
        out.append(self._event("output_item.done", named=False, item=item))
        self.output.append(item)
        self._item, self._parts, self._logprobs = None, [], []
        return out

    def _event(self, kind: str, named: bool = True, **fields: Any) -> dict[str, Any]:
        assert self._item is not None
        where = {"item_id": self._item["id"]} if named else {}
        return {"type": f"response.{kind}", **where, "output_index": len(self.output), **fields}
