"""A normalised conversation -> all that generation needs: checks, pictures, prompt, sampling parameters.

Every endpoint that takes a conversation comes through here, so that the same conversation is the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from vllm.overlay.serving import policy
from vllm.overlay.serving.answer import Answer, choice_steps
from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.fastpath import _large_completion_output_fastpath
from vllm.overlay.serving.lanes import off_loop
from vllm.overlay.serving.normalise import ChatRequest, normalise_chat
from vllm.overlay.serving.render import Prompt
from vllm.overlay.serving.sampling import check_sampling, sampling_params
from vllm.overlay.serving.service import Service
from vllm.overlay.serving.translate import in_terms_of

# The lowest bias that the engine takes: no logits are that far apart.
_BAN = -100.0


@dataclass(frozen=True)
class Ready:
    """A conversation that can be generated from. stops: stop strings, those that are control tokens left out. budget_s:
    seconds after which the answer is cut; None for any time."""

    request: ChatRequest
    prompt: Prompt
    params: Any
    stops: list[str]
    budget_s: float | None = None


async def rendered(service: Service, request: ChatRequest) -> tuple[Prompt, list[Any]]:
    """(prompt, its pictures measured). Raises RequestError for what cannot be rendered."""
    service.check_model(request.model)
    service.check_template(request)
    if not service.renderer.has_template:
        raise RequestError("This model has no chat template; start the server with --chat-template.",
                           code="unsupported_parameter")
    request = replace(request, template_kwargs={**service.settings.template_kwargs, **request.template_kwargs})
    pictures = await service.pictures.measured(request.pictures)
    return await service.renderer.chat(request, [picture.tokens for picture in pictures]), pictures


async def ready(service: Service, request: ChatRequest) -> Ready:
    """Everything of a conversation up to generation. Raises RequestError for what cannot be served."""
    options = request.options
    service.check_model(request.model)
    service.check_tools(request)
    policy.check_limit(options.max_tokens, service.settings.max_model_len, options.limit_field)
    policy.check_limit(options.min_tokens, service.settings.max_model_len, "min_tokens")
    check_sampling(options, max_logprobs=service.settings.max_logprobs, vocab_size=service.vocab_size,
                   logprobs_field="top_logprobs")
    prompt, pictures = await rendered(service, request)
    budget = policy.token_budget(len(prompt.token_ids), options.max_tokens, service.settings.max_model_len)
    params = sampling_params(options, service.settings.sampling_defaults, budget)
    params.logits_processors = service.logits_processors(options)
    large = _large_completion_output_fastpath(options, params, service.settings.fastpath)
    for token in service.banned_tokens(request):
        params.logit_bias = {**(params.logit_bias or {}), token: _BAN}
    params.constraint = await service.constrainer.of_chat(request, prompt.in_thought)
    stops, stop_tokens = service.stop_tokens(options.stop)
    params.stop_token_ids += stop_tokens
    # Last, since it is the one thing here that takes long; what was sent is not kept while the answer is generated.
    prompt = replace(prompt, pictures=await service.pictures.read(pictures, prompt.offsets))
    return Ready(replace(request, pictures=()), prompt, params, stops,
                 service.settings.fastpath.budget_s if large else None)


class Translated(Protocol):
    """A request of another API. chat: the body of the chat request that it amounts to. names: see `in_terms_of`."""

    chat: dict[str, Any]
    names: dict[str, str]


T = TypeVar("T", bound=Translated)


async def ready_as_chat(service: Service, translate: Callable[[Any], T], body: Any) -> tuple[T, Ready]:
    """(the request, everything of it up to generation), of a request that is translated into one for chat."""
    asked = await off_loop(translate, body)
    with in_terms_of(asked.names):
        prepared = await ready(service, await off_loop(normalise_chat, asked.chat))
    asked.chat = {}
    return asked, prepared


async def length_as_chat(service: Service, translate: Callable[[Any], Translated], body: Any) -> int:
    """Tokens of the prompt of a request that is translated into one for chat."""
    asked = await off_loop(translate, body)
    with in_terms_of(asked.names):
        prompt, _ = await rendered(service, await off_loop(normalise_chat, asked.chat))
    return len(prompt.token_ids)


class ConversationAnswer(Answer):
    """One conversation's answer under way, whatever the form in which the client reads it."""

    def __init__(self, service: Service, ready: Ready, prefix: str, trace_headers: Mapping[str, str] | None) -> None:
        """prefix: of the answer's id."""
        request = ready.request
        choices = [service.chat_choice(i, request, ready.prompt, ready.stops) for i in range(request.options.samples)]
        super().__init__(service, prefix, request.options, [ready.prompt], choices)
        self.request = request
        self.prompt = ready.prompt
        self.budget_s = ready.budget_s
        self.steps = lambda: choice_steps(self, [ready.params], trace_headers)
