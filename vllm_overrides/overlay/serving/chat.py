"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from vllm.overlay.serving import respond
from vllm.overlay.serving.answer import failure
from vllm.overlay.serving.choice import Choice, Step
from vllm.overlay.serving.logprobs import chat_logprobs
from vllm.overlay.serving.normalise import normalise_chat
from vllm.overlay.serving.prepare import ConversationAnswer, Ready, ready
from vllm.overlay.serving.service import Service


class ChatAnswer(ConversationAnswer):
    """One chat request under way: read it as ``whole()`` or as ``stream()``, once."""

    def __init__(self, service: Service, ready: Ready, trace_headers: Mapping[str, str] | None) -> None:
        super().__init__(service, ready, "chatcmpl-", trace_headers)
        self._created = int(time.time())
        last = self.request.messages[-1]
        # echo: the answer is shown together with the message that it continues.
        self._opening = last["content"] if self.request.echo and self.request.continue_final_message else ""
        self._role = service.settings.response_role if self.request.add_generation_prompt else last["role"]

    async def whole(self) -> dict[str, Any]:
        """The response body."""
        field = self.service.settings.reasoning_field
        messages = [respond.ChatMessage(field, self._role) for _ in self.choices]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        async with aclosing(self.steps()) as steps:
            async for choice, step in steps:
                messages[choice.index].add(step.events)
                logprobs[choice.index] += self._logprobs(step)
        bodies = []
        for choice, message, probabilities in zip(self.choices, messages, logprobs, strict=False):
            body = message.body()
            if self._opening:
                body["content"] = self._opening + (body["content"] or "")
            bodies.append({"index": choice.index, "message": body,
                           "logprobs": None if self.options.logprobs is None else {"content": probabilities},
                           "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason})
        return {"id": self.id, "object": "chat.completion", "created": self._created, "model": self.request.model,
                "choices": bodies, "usage": self.usage(), "prompt_logprobs": self.prompt_logprobs_body(0)}

    async def stream(self) -> AsyncIterator[bytes]:
        """The response as server-sent events: a role delta per choice, deltas, a finish per choice, usage if asked,
        [DONE]."""
        deltas = respond.ChatDeltas(self.service.settings.reasoning_field)
        due: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        begun = False
        try:
            async with aclosing(self.steps()) as steps:
                async for choice, step in steps:
                    if not begun:
                        begun = True
                        for one in self.choices:
                            yield self._chunk(one, {"role": self._role, "content": ""})
                            if self._opening:
                                yield self._chunk(one, {"content": self._opening})
                    due[choice.index] += self._logprobs(step)
                    for event in step.events:
                        yield self._chunk(choice, deltas.delta(event), due[choice.index])
                    if choice.finished:
                        yield self._chunk(choice, {}, due[choice.index], finished=True)
            if self.options.include_usage:
                yield respond.sse({**self._head(), "choices": [], "usage": self.usage()})
        except Exception as error:
            yield respond.sse(failure(error, self.id).body())
        yield respond.DONE

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "chat.completion.chunk", "created": self._created,
                "model": self.request.model}

    def _chunk(self, choice: Choice, delta: dict[str, Any], due: list[dict[str, Any]] | None = None,
               finished: bool = False) -> bytes:
        """One event; takes the logprobs that are due along, since text that is held back comes later than its
        tokens."""
        body: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None,
                                "finish_reason": choice.finish_reason if finished else None}
        if due:
            body["logprobs"] = {"content": list(due)}
            due.clear()
        if finished:
            body["stop_reason"] = choice.stop_reason
        chunk = {**self._head(), "choices": [body]}
        if self.options.include_usage:
            chunk["usage"] = self.usage() if self.options.continuous_usage else None
        return respond.sse(chunk)

    def _logprobs(self, step: Step) -> list[dict[str, Any]]:
        if self.options.logprobs is None:
            return []
        return chat_logprobs(self.service.token_text, step.tokens, step.logprobs, self.options.logprobs)


async def chat_answer(service: Service, body: Any, trace_headers: Mapping[str, str] | None = None) -> ChatAnswer:
    """Everything of a chat request up to generation. Raises RequestError for what cannot be served."""
    return ChatAnswer(service, await ready(service, normalise_chat(body)), trace_headers)
