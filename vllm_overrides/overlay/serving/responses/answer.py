"""One response under way: the response object, whole or at the end of a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from vllm.overlay.serving.answer import failure
from vllm.overlay.serving.choice import Step
from vllm.overlay.serving.logprobs import chat_logprobs
from vllm.overlay.serving.prepare import ConversationAnswer, Ready, length_as_chat, ready_as_chat
from vllm.overlay.serving.respond import named_sse
from vllm.overlay.serving.responses.items import ItemWriter
from vllm.overlay.serving.responses.request import ResponsesRequest, translated
from vllm.overlay.serving.service import Service


class ResponsesAnswer(ConversationAnswer):
    """Read it as ``whole()`` or as ``stream()``, once."""

    def __init__(self, service: Service, ready: Ready, asked: ResponsesRequest,
                 trace_headers: Mapping[str, str] | None) -> None:
        super().__init__(service, ready, "resp_", trace_headers)
        self._asked = asked
        self._params = ready.params
        self._created = int(time.time())
        self._writer = ItemWriter(self.request.tools, asked.namespaces, self.request.show_thought, asked.seals)

    async def whole(self) -> dict[str, Any]:
        """The response body."""
        async with aclosing(self.steps()) as steps:
            async for _, step in steps:
                self._writer.write(step.events, self._logprobs(step))
        self._writer.finish(self._status())
        return self._response(self._status())

    async def stream(self) -> AsyncIterator[bytes]:
        """The response as server-sent events, the last of which holds it whole."""
        number = 0

        def sse(event: dict[str, Any]) -> bytes:
            nonlocal number
            body = {"type": event["type"], "sequence_number": number, **event}
            number += 1
            return named_sse(body)

        try:
            for kind in ("created", "in_progress"):
                yield sse({"type": f"response.{kind}", "response": self._response("in_progress")})
            async with aclosing(self.steps()) as steps:
                async for _, step in steps:
                    for event in self._writer.write(step.events, self._logprobs(step)):
                        yield sse(event)
            status = self._status()
            for event in self._writer.finish(status):
                yield sse(event)
            yield sse({"type": f"response.{status}", "response": self._response(status)})
        except Exception as error:
            told = failure(error, self.id)
            body = {**self._response("failed"), "error": {"code": told.code or "server_error", "message": told.message}}
            yield sse({"type": "response.failed", "response": body})

    def _status(self) -> str:
        return "completed" if self.choices[0].finish_reason in ("stop", "tool_calls") else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        over = status in ("completed", "incomplete")
        return {
            "id": self.id, "object": "response", "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None, "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None, "error": None,
            "model": self.request.model, "output": self._writer.output if over else [],
            "temperature": self._params.temperature, "top_p": self._params.top_p,
            "presence_penalty": self._params.presence_penalty, "frequency_penalty": self._params.frequency_penalty,
            "previous_response_id": None, "store": False, "background": False, "truncation": "disabled",
            "service_tier": "default", "usage": self._usage() if over else None, **self._asked.shown}

    def _usage(self) -> dict[str, Any]:
        counts = self.usage()
        return {"input_tokens": counts["prompt_tokens"],
                # Of OpenAI's prices: writing to the cache costs nothing here, and its client's type has to have it.
                "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
                "total_tokens": counts["total_tokens"], **self.usage_of_cut()}

    def _logprobs(self, step: Step) -> list[dict[str, Any]]:
        if self.options.logprobs is None:
            return []
        shown = [i for i, visible in enumerate(step.visible) if visible]
        return chat_logprobs(self.token_text, [step.tokens[i] for i in shown], [step.logprobs[i] for i in shown],
                             self.options.logprobs)


async def responses_answer(service: Service, body: Any,
                           trace_headers: Mapping[str, str] | None = None) -> ResponsesAnswer:
    """Everything of a request up to generation. Raises RequestError for what cannot be served."""
    asked, prepared = await ready_as_chat(service, translated, body)
    return ResponsesAnswer(service, prepared, asked, trace_headers)


async def input_tokens(service: Service, body: Any) -> dict[str, Any]:
    """POST /v1/responses/input_tokens: how long the prompt would be."""
    return {"object": "response.input_tokens", "input_tokens": await length_as_chat(service, translated, body)}
