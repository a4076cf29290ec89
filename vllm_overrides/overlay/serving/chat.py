"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from vllm.overlay.serving import policy, respond
from vllm.overlay.serving.answer import Answer, choice_steps, failure
from vllm.overlay.serving.choice import Choice, Step
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.logprobs import chat_logprobs
from vllm.overlay.serving.normalise import ChatRequest, normalise_chat
from vllm.overlay.serving.render import Prompt
from vllm.overlay.serving.sampling import check_sampling, sampling_params
from vllm.overlay.serving.service import Service

# The lowest bias that the engine takes: no logits are that far apart.
_BAN = -100.0


class ChatAnswer(Answer):
    """One chat request under way: read it as ``whole()`` or as ``stream()``, once."""

    def __init__(self, service: Service, request: ChatRequest, prompt: Prompt, params: Any, stops: list[str],
                 trace_headers: Mapping[str, str] | None) -> None:
        choices = [service.chat_choice(i, request, prompt, stops) for i in range(request.options.n)]
        super().__init__(service, f"chatcmpl-{uuid.uuid4().hex}", request.options, [prompt], choices)
        self._request = request
        self._prompt = prompt
        self._steps = lambda: choice_steps(self, [params], trace_headers)
        self._created = int(time.time())
        last = request.messages[-1]
        # echo: the answer is shown together with the message that it continues.
        self._opening = last["content"] if request.echo and request.continue_final_message else ""
        self._role = service.settings.response_role if request.add_generation_prompt else last["role"]

    async def whole(self) -> dict[str, Any]:
        """The response body."""
        field = self.service.settings.reasoning_field
        messages = [respond.ChatMessage(field, self._role) for _ in self.choices]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        async with aclosing(self._steps()) as steps:
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
        return {"id": self.id, "object": "chat.completion", "created": self._created, "model": self._request.model,
                "choices": bodies, "usage": self.usage(), "prompt_logprobs": self.prompt_logprobs_body(0)}

    async def stream(self) -> AsyncIterator[bytes]:
        """The response as server-sent events: a role delta per choice, deltas, a finish per choice, usage if asked,
        [DONE]."""
        deltas = respond.ChatDeltas(self.service.settings.reasoning_field)
        due: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        begun = False
        try:
            async with aclosing(self._steps()) as steps:
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
                "model": self._request.model}

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
    request = normalise_chat(body)
    options = request.options
    service.check_model(request.model)
    service.check_tools(request)
    service.check_template(request)
    if not service.renderer.has_template:
        raise RequestError("This model has no chat template; start the server with --chat-template.",
                           code="unsupported_parameter")
    policy.check_limit(options.max_tokens, service.settings.max_model_len, options.limit_field)
    check_sampling(options, max_logprobs=service.settings.max_logprobs, vocab_size=service.vocab_size,
                   logprobs_field="top_logprobs")
    pictures = await service.pictures.measured(request.pictures)
    prompt = await service.renderer.chat(request, [picture.tokens for picture in pictures])
    budget = policy.token_budget(len(prompt.token_ids), options.max_tokens, service.settings.max_model_len)
    params = sampling_params(options, service.settings.sampling_defaults, budget)
    for token in service.banned_tokens(request):
        params.logit_bias = {**(params.logit_bias or {}), token: _BAN}
    stops, stop_tokens = service.stop_tokens(options.stop)
    params.stop_token_ids += stop_tokens
    # Last, since it is the one thing here that takes long; what was sent is not kept while the answer is generated.
    prompt = replace(prompt, pictures=await service.pictures.read(pictures, prompt.offsets))
    request = replace(request, pictures=())
    return ChatAnswer(service, request, prompt, params, stops, trace_headers)
