"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from vllm.overlay.serving import respond
from vllm.overlay.serving.answer import failure
from vllm.overlay.serving.choice import Choice, Step
from vllm.overlay.serving.lanes import off_loop
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
        self._form = (service.settings.reasoning_field, self.request.tools, self.request.show_thought)
        self._logprobs_due: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        self._tokens_due: list[list[int]] = [[] for _ in self.choices]
        self._role = service.settings.response_role if self.request.add_generation_prompt else last["role"]

    async def whole(self) -> dict[str, Any]:
        """The response body."""
        messages = [respond.ChatMessage(self._role, *self._form) for _ in self.choices]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        tokens: list[list[int]] = [[] for _ in self.choices]
        async with aclosing(self.steps()) as steps:
            async for choice, step in steps:
                messages[choice.index].add(step.events)
                logprobs[choice.index] += self._logprobs(step)
                tokens[choice.index] += step.tokens
        bodies: list[dict[str, Any]] = []
        for choice in self.best(0):
            message = messages[choice.index].body()
            if self._opening:
                message["content"] = self._opening + (message["content"] or "")
            probabilities = None if self.options.logprobs is None else {"content": logprobs[choice.index]}
            bodies.append({"index": len(bodies), "message": message, "logprobs": probabilities,
                           "finish_reason": self._finish_reason(choice), "stop_reason": choice.stop_reason,
                           **self._token_ids(tokens[choice.index])})
        return {"id": self.id, "object": "chat.completion", "created": self._created, "model": self.request.model,
                "choices": bodies, "usage": self.usage(), "prompt_logprobs": None, **self.of_prompt(0)}

    async def stream(self) -> AsyncIterator[bytes]:
        """The response as server-sent events: a role delta per choice, deltas, a finish per choice, usage if asked,
        [DONE]."""
        deltas = [respond.ChatDeltas(*self._form) for _ in self.choices]
        begun = False
        try:
            async with aclosing(self.steps()) as steps:
                async for choice, step in steps:
                    if not begun:
                        begun = True
                        for one in self.choices:
                            extras = self.of_prompt(0) if one.index == 0 else {}
                            yield self._chunk(one, {"role": self._role, "content": ""}, extras)
                            if self._opening:
                                yield self._chunk(one, {"content": self._opening})
                    self._logprobs_due[choice.index] += self._logprobs(step)
                    self._tokens_due[choice.index] += step.tokens
                    for event in step.events:
                        for delta in deltas[choice.index].of(event):
                            yield self._chunk(choice, delta)
                    if choice.finished:
                        for delta in deltas[choice.index].finish():
                            yield self._chunk(choice, delta)
                        yield self._chunk(choice, {}, finished=True)
            if self.options.include_usage:
                yield respond.sse({**self._head(), "choices": [], "usage": self.usage()})
        except Exception as error:
            yield respond.sse(failure(error, self.id).body())
        yield respond.DONE

    def of_prompt(self, position: int) -> dict[str, Any]:
        """Extra fields about the prompt, those that the request asks for."""
        shown = {"prompt_text": self.prompt.text} if self.request.show_prompt else {}
        return {**super().of_prompt(position), **shown}

    def _finish_reason(self, choice: Choice) -> str | None:
        if choice.finish_reason == "tool_calls" and self.request.tools.legacy:
            return "function_call"
        return choice.finish_reason

    def _token_ids(self, tokens: list[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self.options.return_token_ids else {}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "chat.completion.chunk", "created": self._created,
                "model": self.request.model}

    def _chunk(self, choice: Choice, delta: dict[str, Any], extras: Mapping[str, Any] | None = None,
               finished: bool = False) -> bytes:
        """One event; takes along the logprobs and tokens that are due, since text that is held back comes later than
        its tokens. extras: further fields of the chunk."""
        body: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None,
                                "finish_reason": self._finish_reason(choice) if finished else None}
        if delta.get("role") is None:
            logprobs, tokens = self._logprobs_due[choice.index], self._tokens_due[choice.index]
            if logprobs:
                body["logprobs"] = {"content": list(logprobs)}
            body.update(self._token_ids(tokens))
            logprobs.clear()
            tokens.clear()
        if finished:
            body["stop_reason"] = choice.stop_reason
        chunk = {**self._head(), "choices": [body], **(extras or {})}
        chunk.update(self.usage_of_chunk(last=finished))
        return respond.sse(chunk)

    def _logprobs(self, step: Step) -> list[dict[str, Any]]:
        if self.options.logprobs is None:
            return []
        return chat_logprobs(self.token_text, step.tokens, step.logprobs, self.options.logprobs)


async def chat_answer(service: Service, body: Any, trace_headers: Mapping[str, str] | None = None) -> ChatAnswer:
    """Everything of a chat request up to generation. Raises RequestError for what cannot be served."""
    return ChatAnswer(service, await ready(service, await off_loop(normalise_chat, body)), trace_headers)
