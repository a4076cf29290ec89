"""One message under way, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from vllm.overlay.serving.answer import failure
from vllm.overlay.serving.anthropic.blocks import BlockWriter
from vllm.overlay.serving.anthropic.failure import error_body
from vllm.overlay.serving.anthropic.request import MessagesRequest, translated
from vllm.overlay.serving.prepare import ConversationAnswer, Ready, length_as_chat, ready_as_chat
from vllm.overlay.serving.respond import named_sse
from vllm.overlay.serving.service import Service

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(ConversationAnswer):
    """Read it as ``whole()`` or as ``stream()``, once."""

    def __init__(self, service: Service, ready: Ready, asked: MessagesRequest,
                 trace_headers: Mapping[str, str] | None) -> None:
        super().__init__(service, ready, "msg_", trace_headers)
        self._writer = BlockWriter(asked.hide_thought)

    async def whole(self) -> dict[str, Any]:
        """The response body."""
        async with aclosing(self.steps()) as steps:
            async for _, step in steps:
                self._writer.write(step.events)
        self._writer.finish()
        return self._message(self._writer.content, self._stop())

    async def stream(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""
        begun = False
        try:
            async with aclosing(self.steps()) as steps:
                async for _, step in steps:
                    if not begun:
                        # Now it is known what the cache saved, which this event tells.
                        begun = True
                        nothing = {"stop_reason": None, "stop_sequence": None}
                        yield named_sse({"type": "message_start", "message": self._message([], nothing)})
                    for event in self._writer.write(step.events):
                        yield named_sse(event)
            for event in self._writer.finish():
                yield named_sse(event)
            stop = {**self._stop(), "stop_details": None, "container": None}
            yield named_sse({"type": "message_delta", "delta": stop, "usage": self._usage()})
            yield named_sse({"type": "message_stop"})
        except Exception as error:
            yield named_sse(error_body(failure(error, self.id)))

    def _message(self, content: list[dict[str, Any]], stop: Mapping[str, Any]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.request.model, "content": content,
                **stop, "stop_details": None, "container": None, "usage": self._usage()}

    def _stop(self) -> dict[str, Any]:
        (choice,) = self.choices
        matched = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        reason = _REASONS.get(choice.finish_reason or "", "stop_sequence" if matched is not None else "end_turn")
        return {"stop_reason": reason, "stop_sequence": matched}

    def _usage(self) -> dict[str, Any]:
        """Here ``input_tokens`` are those that were computed; what the cache held is counted beside them."""
        counts = self.usage()
        cached = self.cached
        return {"input_tokens": counts["prompt_tokens"] - cached, "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0, "cache_creation": None,
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"thinking_tokens": self.reasoning_tokens},
                "server_tool_use": None, "service_tier": "standard", "inference_geo": None, **self.usage_of_cut()}


async def messages_answer(service: Service, body: Any,
                          trace_headers: Mapping[str, str] | None = None) -> MessagesAnswer:
    """Everything of a request up to generation. Raises RequestError for what cannot be served."""
    asked, prepared = await ready_as_chat(service, translated, body)
    return MessagesAnswer(service, prepared, asked, trace_headers)


async def count_tokens(service: Service, body: Any) -> dict[str, Any]:
    """POST /v1/messages/count_tokens: how long the prompt would be."""
    return {"input_tokens": await length_as_chat(service, partial(translated, counting=True), body)}
