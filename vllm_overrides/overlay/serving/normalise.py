"""JSON body -> a typed request. Everything that clients are known to send is accepted here or refused by name.

Unknown fields are ignored; null and empty optional fields are as absent; a known field of a wrong type or out of
range is a RequestError (400) that names it. Nothing below this module sees the body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.overlay.serving import fields
from vllm.overlay.serving.errors import RequestError, missing, not_supported, wrong_type
from vllm.overlay.serving.messages import normalise_messages
from vllm.overlay.serving.pictures.source import PictureSource
from vllm.overlay.serving.structured import refuse_structured
from vllm.overlay.serving.thinking import thinking_switch
from vllm.overlay.serving.tools import ToolChoice, Tools, normalise_tool_choice, normalise_tools

_INT64 = 2**63
# Against a mistyped number, not a limit of the engine: n runs in waves of what fits.
_MOST_CHOICES = 1024
# Of all prompts of a completion together: each costs memory before the first one is computed.
_MOST_ANSWERS = 16 * _MOST_CHOICES
# Logits are divided by it: smaller ones leave the range of a float32, and then there is nothing to sample from.
_LEAST_REPETITION = 1e-6
# What a template is called with anyway; a request may not replace these through chat_template_kwargs.
_TEMPLATE_OWN = ("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
                 "tokenize", "chat_template")


@dataclass(frozen=True)
class Options:
    """How to decode: the fields that chat and completions share. None = the request is silent.

    limit_field: the field that max_tokens came from, for messages."""

    max_tokens: int | None = None
    limit_field: str = "max_tokens"
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool = False
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to continue. pictures: of the messages, in order. thinking: None where the request leaves it to
    the template."""

    model: str
    messages: list[dict[str, Any]]
    pictures: tuple[PictureSource, ...]
    options: Options
    tools: Tools
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    thinking: bool | None
    template_kwargs: Mapping[str, Any]
    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    echo: bool


@dataclass(frozen=True)
class CompletionRequest:
    """Prompts (text or token ids) to continue, each with ``options.n`` choices."""

    model: str
    prompts: list[str | list[int]]
    options: Options
    echo: bool


_token_ids = fields.list_of(fields.integer(0, 2**31))

_SHARED: dict[str, fields.Check] = {
    "model": fields.text,
    "max_tokens": fields.integer(0),
    "max_completion_tokens": fields.integer(0),
    "min_tokens": fields.integer(0),
    "temperature": fields.number(0, 2),
    "top_p": fields.number(0, 1),
    "top_k": fields.integer(-1, 2**31 - 1),
    "min_p": fields.number(0, 1),
    "repetition_penalty": fields.number(0, 2),
    "presence_penalty": fields.number(-2, 2),
    "frequency_penalty": fields.number(-2, 2),
    "n": fields.integer(1, _MOST_CHOICES),
    "best_of": fields.integer(1, _MOST_CHOICES),
    "use_beam_search": fields.flag,
    "seed": fields.integer(-_INT64, _INT64 - 1),
    "stop": fields.one_or_list(fields.text),
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": fields.flag,
    "ignore_eos": fields.flag,
    "skip_special_tokens": fields.flag,
    "spaces_between_special_tokens": fields.flag,
    "prompt_logprobs": fields.integer(0),
    "logit_bias": fields.mapping,
    "allowed_token_ids": _token_ids,
    "truncate_prompt_tokens": fields.integer(-1),
    "add_special_tokens": fields.flag,
    "priority": fields.integer(-_INT64, _INT64 - 1),
    "stream": fields.flag,
    "stream_options": fields.mapping,
    "response_format": fields.anything,
    "guided_json": fields.anything,
    "guided_regex": fields.anything,
    "guided_choice": fields.anything,
    "guided_grammar": fields.anything,
    "structured_outputs": fields.anything,
    "user": fields.anything,
}

_CHAT: dict[str, fields.Check] = {
    **_SHARED,
    "messages": fields.anything,
    "logprobs": fields.flag,
    "top_logprobs": fields.integer(0),
    "tools": fields.anything,
    "tool_choice": fields.anything,
    "parallel_tool_calls": fields.flag,
    "reasoning_effort": fields.anything,
    "thinking": fields.anything,
    "enable_thinking": fields.anything,
    "chat_template": fields.text,
    "chat_template_kwargs": fields.mapping,
    "add_generation_prompt": fields.flag,
    "continue_final_message": fields.flag,
    "echo": fields.flag,
}

_COMPLETION: dict[str, fields.Check] = {
    **_SHARED,
    "prompt": fields.anything,
    "logprobs": fields.integer(0),
    "echo": fields.flag,
    "suffix": fields.text,
}


def normalise_chat(body: Any) -> ChatRequest:
    """The body of /v1/chat/completions as a ChatRequest."""
    body = _object(body)
    found = fields.read(body, _CHAT)
    messages, pictures = normalise_messages(body.get("messages"))
    refuse_structured(body)
    tools = normalise_tools(found.get("tools", []))
    template_kwargs = found.get("chat_template_kwargs", {})
    continue_final = found.get("continue_final_message", False)
    if continue_final and not isinstance(messages[-1]["content"], str):
        raise not_supported("continue_final_message", "the last message holds pictures.")
    if pictures and _truncation(found.get("truncate_prompt_tokens")):
        raise not_supported("truncate_prompt_tokens", "the messages hold pictures, which cannot be cut.")
    return ChatRequest(
        model=_model(found),
        messages=messages,
        pictures=pictures,
        options=_options(found, max_tokens=None, logprobs=_chat_logprobs(found), add_special_tokens=False),
        tools=tools,
        tool_choice=normalise_tool_choice(found.get("tool_choice"), tools),
        parallel_tool_calls=found.get("parallel_tool_calls", True),
        thinking=thinking_switch(found, template_kwargs),
        template_kwargs={k: v for k, v in template_kwargs.items() if k not in _TEMPLATE_OWN},
        chat_template=found.get("chat_template"),
        add_generation_prompt=found.get("add_generation_prompt", not continue_final),
        continue_final_message=continue_final,
        echo=found.get("echo", False),
    )


def normalise_completion(body: Any) -> CompletionRequest:
    """The body of /v1/completions as a CompletionRequest. max_tokens is 16 unless given, as OpenAI documents."""
    body = _object(body)
    found = fields.read(body, _COMPLETION)
    refuse_structured(body)
    if "suffix" in found:
        raise not_supported("suffix", "the model writes only forward.")
    echo = found.get("echo", False)
    options = _options(found, max_tokens=16, logprobs=found.get("logprobs"), add_special_tokens=True,
                       least=0 if echo else 1)
    prompts = _prompts(body.get("prompt"))
    if len(prompts) * options.n > _MOST_ANSWERS:
        raise RequestError(f"{len(prompts)} prompts with {options.n} choices each are more than the {_MOST_ANSWERS} "
                           "that one request may ask for.", param="prompt")
    return CompletionRequest(_model(found), prompts, options, echo)


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_type")
    return body


def _model(found: Mapping[str, Any]) -> str:
    if "model" not in found:
        raise missing("model")
    return found["model"]


def _options(found: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None, add_special_tokens: bool,
             least: int = 1) -> Options:
    """The shared fields; ``max_tokens`` is what a silent request gets, ``least`` the smallest it may ask for."""
    limit_name = "max_completion_tokens" if "max_completion_tokens" in found else "max_tokens"
    limit = found.get(limit_name, max_tokens)
    if limit is not None and limit < least:
        raise RequestError(f"{limit_name} must be at least {least}, got {limit}.", param=limit_name)
    min_tokens = found.get("min_tokens", 0)
    if limit is not None and min_tokens > limit:
        if limit_name in found:
            raise RequestError(f"min_tokens ({min_tokens}) must not be above {limit_name} ({limit}).",
                               param="min_tokens")
        limit, limit_name = min_tokens, "min_tokens"
    n = found.get("n", 1)
    if found.get("best_of", n) != n:
        raise not_supported("best_of", f"only the value of n ({n}).")
    if found.get("use_beam_search"):
        raise not_supported("use_beam_search", "this server samples.")
    if found.get("repetition_penalty", 1.0) < _LEAST_REPETITION:
        raise RequestError(f"repetition_penalty must be at least {_LEAST_REPETITION}.", param="repetition_penalty")
    if "" in found.get("stop", ()):
        raise RequestError("stop must not hold an empty string.", param="stop")
    streamed = fields.read(found.get("stream_options", {}), {"include_usage": fields.flag,
                                                              "continuous_usage_stats": fields.flag}, "stream_options.")
    simple = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
              "ignore_eos", "skip_special_tokens", "prompt_logprobs", "priority", "stream")
    return Options(
        max_tokens=limit,
        limit_field=limit_name,
        min_tokens=min_tokens,
        n=n,
        seed=None if found.get("seed") == -1 else found.get("seed"),
        stop=tuple(found.get("stop", ())),
        stop_token_ids=tuple(found.get("stop_token_ids", ())),
        include_stop=found.get("include_stop_str_in_output", False),
        logprobs=logprobs,
        logit_bias=_logit_bias(found.get("logit_bias", {})),
        allowed_token_ids=tuple(found["allowed_token_ids"]) if "allowed_token_ids" in found else None,
        truncate_prompt_tokens=_truncation(found.get("truncate_prompt_tokens")),
        add_special_tokens=found.get("add_special_tokens", add_special_tokens),
        include_usage=streamed.get("include_usage", False),
        continuous_usage=streamed.get("continuous_usage_stats", False),
        **{name: found[name] for name in simple if name in found},
    )


def _chat_logprobs(found: Mapping[str, Any]) -> int | None:
    """How many alternatives per token, or None for no logprobs at all."""
    if not found.get("logprobs", False):
        if found.get("top_logprobs"):
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        return None
    return found.get("top_logprobs", 0)


def _logit_bias(value: Mapping[str, Any]) -> dict[int, float]:
    biases = {}
    bias = fields.number(-100, 100)
    for token, amount in value.items():
        if not token.isdecimal() or len(token) > 10:
            raise RequestError(f"logit_bias holds {token!r:.40}, which is no token id.", param="logit_bias")
        biases[int(token)] = bias(amount, f"logit_bias.{token}")
    return biases


def _truncation(value: int | None) -> int | None:
    if value == 0:
        raise RequestError("truncate_prompt_tokens must be at least 1.", param="truncate_prompt_tokens")
    return None if value == -1 else value


def _prompts(value: Any) -> list[str | list[int]]:
    """The four forms of ``prompt``: text, token ids, a list of texts, a list of lists of token ids."""
    if value is None:
        raise missing("prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong_type("prompt", "a string or an array", value)
    if not value:
        raise RequestError("prompt must not be empty.", param="prompt")
    if isinstance(value[0], str):
        return fields.list_of(fields.text)(value, "prompt")
    if isinstance(value[0], list):
        return fields.list_of(_token_ids)(value, "prompt")
    return [_token_ids(value, "prompt")]
