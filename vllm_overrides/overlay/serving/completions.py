"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from vllm.overlay.serving import policy, respond
from vllm.overlay.serving.answer import Answer, choice_steps, failure
from vllm.overlay.serving.choice import Choice, Step
from vllm.overlay.serving.fastpath import _large_completion_output_fastpath
from vllm.overlay.serving.lanes import off_loop
from vllm.overlay.serving.logprobs import completion_logprobs
from vllm.overlay.serving.normalise import CompletionRequest, normalise_completion
from vllm.overlay.serving.parse.events import Content, Thought
from vllm.overlay.serving.render import Prompt
from vllm.overlay.serving.sampling import check_sampling, sampling_params
from vllm.overlay.serving.service import Service


class CompletionAnswer(Answer):
    """One completion request under way: read it as ``whole()`` or as ``stream()``, once."""

    def __init__(self, service: Service, request: CompletionRequest, prompts: list[Prompt], params: list[Any],
                 trace_headers: Mapping[str, str] | None) -> None:
        self._samples = samples = request.options.samples
        choices = [service.plain_choice(i, request.options, prompts[i // samples])
                   for i in range(samples * len(prompts))]
        super().__init__(service, "cmpl-", request.options, prompts, choices)
        self._request = request
        self._steps = lambda: choice_steps(self, params, trace_headers)
        self._created = int(time.time())
        self._offsets = [0] * len(choices)
        # The prompt alone was asked for; the engine generates a token all the same, and it is not shown.
        self._prompt_only = request.echo and request.options.max_tokens == 0

    def usage(self) -> dict[str, Any]:
        """Tokens so far; none generated where only the prompt was asked for."""
        counts = super().usage()
        counts.pop("completion_tokens_details", None)
        if self._prompt_only:
            counts.update(completion_tokens=0, total_tokens=counts["prompt_tokens"])
        return counts

    async def whole(self) -> dict[str, Any]:
        """The response body."""
        texts: list[list[str]] = [[] for _ in self.choices]
        steps_of: list[list[Step]] = [[] for _ in self.choices]
        async with aclosing(self._steps()) as steps:
            async for choice, step in steps:
                texts[choice.index].append(_text(step))
                steps_of[choice.index].append(step)
        bodies: list[dict[str, Any]] = []
        for choice in (one for position in range(len(self.prompts)) for one in self.best(position)):
            taken = steps_of[choice.index]
            opening, opening_logprobs = self._opening(choice)
            merged = Step([], [token for step in taken for token in step.tokens],
                          [entry for step in taken for entry in step.logprobs])
            logprobs = _joined(opening_logprobs, self._logprobs(choice, merged))
            text = opening + "".join(() if self._prompt_only else texts[choice.index])
            bodies.append({"index": len(bodies), "text": text, "logprobs": logprobs,
                           **self._end(choice), "prompt_logprobs": None,
                           **self.of_prompt(choice.index // self._samples), **self._token_ids(merged.tokens)})
        return {**self._head(), "choices": bodies, "usage": self.usage()}

    async def stream(self) -> AsyncIterator[bytes]:
        """The response as server-sent events: text as it comes, a finish per choice, usage if asked, [DONE]."""
        begun = [False] * len(self.choices)
        due: list[dict[str, Any] | None] = [None] * len(self.choices)
        extras: list[dict[str, Any]] = [{} for _ in self.choices]
        tokens: list[list[int]] = [[] for _ in self.choices]
        try:
            async with aclosing(self._steps()) as steps:
                async for choice, step in steps:
                    i = choice.index
                    opening = ""
                    if not begun[i]:
                        begun[i] = True
                        opening, due[i] = self._opening(choice)
                        extras[i] = self.of_prompt(i // self._samples)
                    due[i] = _joined(due[i], self._logprobs(choice, step))
                    tokens[i] += step.tokens
                    text = opening + ("" if self._prompt_only else _text(step))
                    if text or choice.finished:
                        yield self._chunk(choice, text, due[i], {**extras[i], **self._token_ids(tokens[i])})
                        due[i], extras[i], tokens[i] = None, {}, []
            if self.options.include_usage:
                yield respond.sse({**self._head(), "choices": [], "usage": self.usage()})
        except Exception as error:
            yield respond.sse(failure(error, self.id).body())
        yield respond.DONE

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self._created, "model": self._request.model}

    def _end(self, choice: Choice) -> dict[str, Any]:
        """Why the choice has ended: not by a token that nobody is shown."""
        if self._prompt_only and choice.finished:
            return {"finish_reason": "length", "stop_reason": None}
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _token_ids(self, tokens: list[int]) -> dict[str, Any]:
        if not self.options.return_token_ids:
            return {}
        return {"token_ids": [] if self._prompt_only else tokens}

    def _chunk(self, choice: Choice, text: str, logprobs: dict[str, Any] | None, extras: dict[str, Any]) -> bytes:
        body = {"index": choice.index, "text": text, "logprobs": logprobs, **self._end(choice), **extras}
        chunk: dict[str, Any] = {**self._head(), "choices": [body]}
        chunk.update(self.usage_of_chunk(last=choice.finished))
        return respond.sse(chunk)

    def _logprobs(self, choice: Choice, step: Step) -> dict[str, Any] | None:
        if self.options.logprobs is None or self._prompt_only:
            return None
        made = completion_logprobs(self.token_text, step.tokens, step.logprobs, self.options.logprobs,
                                   self._offsets[choice.index])
        self._offsets[choice.index] += sum(map(len, made["tokens"]))
        return made

    def _opening(self, choice: Choice) -> tuple[str, dict[str, Any] | None]:
        """(text, logprobs) of the prompt, where the request wants it back."""
        if not self._request.echo:
            return "", None
        position = choice.index // self._samples
        prompt = self.prompts[position]
        probabilities = self.prompt_logprobs[position]
        if self.options.logprobs is None or probabilities is None:
            return prompt.text, None
        made = completion_logprobs(self.token_text, prompt.token_ids, probabilities, self.options.logprobs, 0)
        self._offsets[choice.index] = sum(map(len, made["tokens"]))
        return prompt.text, made


def _text(step: Step) -> str:
    return "".join(event.text for event in step.events if isinstance(event, (Content, Thought)))


def _joined(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    if first is None or second is None:
        return first or second
    return {name: first[name] + second[name] for name in first}


async def completion_answer(service: Service, body: Any,
                            trace_headers: Mapping[str, str] | None = None) -> CompletionAnswer:
    """Everything of a completion request up to generation. Raises RequestError for what cannot be served."""
    request = await off_loop(normalise_completion, body)
    options = request.options
    settings = service.settings
    service.check_model(request.model)
    policy.check_limit(options.max_tokens, settings.max_model_len, options.limit_field)
    check_sampling(options, max_logprobs=settings.max_logprobs, vocab_size=service.vocab_size,
                   logprobs_field="logprobs")
    prompts = [await service.renderer.completion(prompt, options) for prompt in request.prompts]
    params: list[Any] = []
    budget_s = None
    constraint = await service.constrainer.of_completion(request.structure)
    for prompt in prompts:
        service.check_token_ids(prompt)
        budget = policy.token_budget(len(prompt.token_ids), max(options.max_tokens or 1, 1), settings.max_model_len,
                                     "prompt")
        one = sampling_params(options, settings.sampling_defaults, budget)
        one.constraint = constraint
        one.logits_processors = service.logits_processors(options)
        if _large_completion_output_fastpath(options, one, settings.fastpath):
            budget_s = settings.fastpath.budget_s
        if request.echo and one.prompt_logprobs is None:
            one.prompt_logprobs = options.logprobs
        params.append(one)
    answer = CompletionAnswer(service, request, prompts, params, trace_headers)
    answer.budget_s = budget_s
    return answer
