"""A request under way: what chat and completions have in common between prompt and response."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from vllm.engine.multiprocessing import MQEngineDeadError
from vllm.logger import init_logger
from vllm.overlay.engine.step_failure import Refused, StepFailed
from vllm.overlay.serving import respond
from vllm.overlay.serving.choice import Choice, Step
from vllm.overlay.serving.errors import SERVER_ERROR, RequestError, one_line
from vllm.overlay.serving.generate import outputs
from vllm.overlay.serving.logprobs import prompt_logprobs
from vllm.overlay.serving.options import Options
from vllm.overlay.serving.render import Prompt
from vllm.overlay.serving.request_log import log_request
from vllm.overlay.serving.restarts import EngineLost
from vllm.overlay.serving.service import Service

logger = init_logger(__name__)


class Answer(ABC):
    """Prompts, choices and counts of one request. Choice ``i`` belongs to prompt ``i // options.samples``."""

    def __init__(self, service: Service, prefix: str, options: Options, prompts: Sequence[Prompt],
                 choices: Sequence[Choice]) -> None:
        """prefix: of the answer's id."""
        self.service = service
        self.token_text = service.token_text if options.tokens_as_ids is None else (
            service.token_text.shown(options.tokens_as_ids))
        # The client's own name of it may be in use twice; the engine's may not.
        self.engine_id = prefix + uuid4().hex
        self.id = self.engine_id if options.request_id is None else prefix + options.request_id
        self.options = options
        self.prompts = prompts
        self.choices = choices
        self.cached_tokens = [0] * len(prompts)
        self.ends: tuple[float, RequestError] | None = None
        # Seconds of generation after which the answer is cut, and whether it was.
        self.budget_s: float | None = None
        self.clamped = False
        self.prompt_logprobs: list[Any] = [None] * len(prompts)
        self._started = time.monotonic()
        self._first_token: float | None = None

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
        """The response body. Read an answer as this or as ``stream()``, once."""

    @abstractmethod
    def stream(self) -> AsyncIterator[bytes]:
        """The response as server-sent events."""

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many choices it has."""
        counts = respond.usage(
            sum(len(prompt.token_ids) for prompt in self.prompts),
            sum(choice.completion_tokens for choice in self.choices),
            self.cached,
            self.reasoning_tokens if self.service.settings.reasoning_parser else None)
        return {**counts, **self.usage_of_cut()}

    def usage_of_cut(self) -> dict[str, Any]:
        """What usage says beside the counts where the answer was cut by its time."""
        return {"output_clamped": True} if self.clamped else {}

    def usage_of_chunk(self, last: bool) -> dict[str, Any]:
        """The usage of a stream's chunk. Last: of one that ends a choice, which tells of an answer that was cut even
        where no usage was asked for."""
        if self.options.include_usage:
            return {"usage": self.usage() if self.options.continuous_usage else None}
        return {"usage": self.usage()} if last and self.clamped else {}

    @property
    def reasoning_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    @property
    def cached(self) -> int:
        """Tokens of the prompts that were not computed again."""
        return sum(self.cached_tokens)

    def best(self, position: int) -> list[Choice]:
        """The finished choices of a prompt that are given: where more were asked for than are wanted, those of the
        highest log probability per token."""
        n, samples = self.options.n, self.options.samples
        made = self.choices[position * samples:(position + 1) * samples]
        if samples == n:
            return list(made)
        return sorted(made, key=lambda choice: -choice.logprob / max(choice.completion_tokens, 1))[:n]

    def prompt_logprobs_body(self, position: int) -> list[Any] | None:
        """vLLM's extra field of a response: the prompt's logprobs, where the request's own ``prompt_logprobs`` asks
        for them. position: of the prompt."""
        entries = self.prompt_logprobs[position]
        if self.options.prompt_logprobs is None or entries is None:
            return None
        return prompt_logprobs(self.token_text, entries)

    def of_prompt(self, position: int) -> dict[str, Any]:
        """vLLM's extra fields of a response about a prompt, those that the request asks for."""
        shown: dict[str, Any] = {}
        if self.options.prompt_logprobs is not None:
            shown["prompt_logprobs"] = self.prompt_logprobs_body(position)
        if self.options.return_token_ids:
            shown["prompt_token_ids"] = list(self.prompts[position].token_ids)
        return shown

    def end_at(self, time_s: float, error: RequestError) -> None:
        """Fail with ``error`` at a time of the event loop, if it is not finished by then."""
        self.ends = (time_s, error)

    def note_token(self) -> None:
        """The engine has given a token."""
        self._first_token = self._first_token or time.monotonic()

    def log_end(self, error: str | None) -> None:
        """One line per request, without its text unless that was asked for. error: None where the answer is whole."""
        settings = self.service.settings
        if not settings.log_requests:
            return
        now = time.monotonic()
        total, counts = now - self._started, self.usage()
        generated = counts["completion_tokens"]
        first = None if self._first_token is None else self._first_token - self._started
        decoding = None if first is None or generated < 2 else total - first
        finishes = sorted({choice.finish_reason for choice in self.choices if choice.finish_reason})
        log_request(
            id=self.id, stream=self.options.stream, prompts=len(self.prompts) if len(self.prompts) > 1 else None,
            n=self.options.samples if self.options.samples > 1 else None, prompt_tokens=counts["prompt_tokens"],
            cached_tokens=self.cached, max_tokens=self.options.max_tokens, completion_tokens=generated,
            reasoning_tokens=self.reasoning_tokens or None, ttft_s=first, total_s=total,
            tps=generated / total if total > 0 else None,
            decode_tps=(generated - 1) / decoding if decoding else None, finish=", ".join(finishes) or None,
            clamped=self.clamped or None, error=error,
            prompt=[prompt.text[:settings.log_prompts] for prompt in self.prompts] if settings.log_prompts else None)


async def choice_steps(answer: Answer, params: Sequence[Any], trace_headers: Mapping[str, str] | None = None
                       ) -> AsyncIterator[tuple[Choice, Step]]:
    """(choice, what is new of it) until all choices are finished; then, or when closed, the engine stops working on
    them.

    An output of the engine that adds nothing to any choice (in the middle of a prefill) gives nothing.
    """
    priority = answer.options.priority if answer.service.settings.priorities else 0
    source = outputs(answer.service.engine, answer.prompts, params, answer.engine_id,
                     priority=priority, trace_headers=trace_headers, ends=answer.ends,
                     budget_s=answer.budget_s)
    error: str | None = "client gone"
    try:
        async for position, output in source:
            if output is None:
                answer.clamped = True
                for choice in answer.choices:
                    if not choice.finished:
                        yield choice, choice.feed((), None, "length", None)
                error = None
                return
            answer.cached_tokens[position] = output.num_cached_tokens or 0
            if output.prompt_logprobs is not None:
                answer.prompt_logprobs[position] = output.prompt_logprobs
            for one in output.outputs:
                choice = answer.choices[position * answer.options.samples + one.index]
                if choice.finished or not (one.token_ids or one.finish_reason):
                    continue
                answer.note_token()
                yield choice, choice.feed(one.token_ids, one.logprobs, one.finish_reason, one.stop_reason)
            if all(choice.finished for choice in answer.choices):
                error = None
                return
        raise RuntimeError("the engine ended the request before it was finished")
    except Exception as failed:
        error = f"{failed!r:.200}"
        raise
    finally:
        await source.aclose()  # type: ignore[attr-defined]
        answer.log_end(error)


def failure(error: Exception, request_id: str) -> RequestError:
    """The error as the client is told of it; what is our fault is logged with its traceback and named by the
    request's id."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, Refused):
        return RequestError(str(error), param=error.param)
    if isinstance(error, MQEngineDeadError):
        error = EngineLost("it does not answer any more")
    if isinstance(error, EngineLost):
        # Of which the log has said enough, however many requests there were.
        told = RequestError(f"The engine was lost while it worked on request {request_id}: {error}.", status=500,
                            kind=SERVER_ERROR, code="engine_lost")
    else:
        logger.error("request %s failed", request_id, exc_info=error)
        what = one_line(error) if isinstance(error, StepFailed) else type(error).__name__
        told = RequestError(f"The server failed on request {request_id}: {what}.", status=500, kind=SERVER_ERROR,
                            code="internal_error")
    told.request_id = request_id
    return told
