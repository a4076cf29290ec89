"""How to decode: the fields that every generating endpoint shares, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.overlay.serving import fields
from vllm.overlay.serving.errors import RequestError, not_supported

_INT64 = 2**63
# Against a mistyped number, not a limit of the engine: n runs in waves of what fits.
MOST_CHOICES = 1024
# Logits are divided by it: smaller ones leave the range of a float32, and then there is nothing to sample from.
_LEAST_REPETITION = 1e-6
_LONGEST_ID = 128
# Each is looked for in every piece of the answer.
_MOST_STOPS = 64
_MOST_WORDS = 128
_MOST_LETTERS = 4096
# They would change what is generated, so leaving them out would be another answer than the one that was asked for.
_NOT_SERVED = {
    "use_beam_search": "this server samples.",
    "logprob_token_ids": "use top_logprobs (in completions: logprobs).",
    "prompt_embeds": "prompts are text or token ids.",
}


@dataclass(frozen=True)
class Options:
    """How to decode: the fields that chat and completions share. None = the request is silent.

    limit_field: the field that max_tokens came from, for messages. truncate_right: a prompt that is cut keeps its
    beginning. tokens_as_ids: tokens in logprobs are shown as ``token_id:123``."""

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
    best_of: int | None = None
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
    bad_words: tuple[str, ...] = ()
    truncate_prompt_tokens: int | None = None
    truncate_right: bool = False
    add_special_tokens: bool = False
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool | None = None
    request_id: str | None = None
    cache_salt: str | None = None

    @property
    def samples(self) -> int:
        """How many answers to generate for a prompt, of which the best ``n`` are given."""
        return self.best_of or self.n


token_ids = fields.list_of(fields.integer(0, 2**31))


def _request_id(value: Any, path: str) -> str:
    """A client's own id of its request, which answer and log then show."""
    read = fields.text(value, path)
    if len(read) > _LONGEST_ID or not read.isprintable():
        raise RequestError(f"{path} has at most {_LONGEST_ID} characters, all of them printable.", param=path)
    return read


request_id = fields.described(_request_id, type="string", maxLength=_LONGEST_ID)

SHARED: dict[str, fields.Check] = {
    "model": fields.text,
    "max_tokens": fields.integer(0),
    "max_completion_tokens": fields.integer(0),
    "min_tokens": fields.integer(0),
    "temperature": fields.number(0, 2),
    "top_p": fields.number(0, 1),
    "top_k": fields.integer(-1, 2**31 - 1),
    "min_p": fields.number(0, 1),
    "repetition_penalty": fields.number(_LEAST_REPETITION, 2),
    "presence_penalty": fields.number(-2, 2),
    "frequency_penalty": fields.number(-2, 2),
    "n": fields.integer(1, MOST_CHOICES),
    "best_of": fields.integer(1, MOST_CHOICES),
    "use_beam_search": fields.flag,
    "seed": fields.integer(-_INT64, _INT64 - 1),
    "stop": fields.one_or_list(fields.text),
    "stop_token_ids": token_ids,
    "include_stop_str_in_output": fields.flag,
    "ignore_eos": fields.flag,
    "skip_special_tokens": fields.flag,
    "spaces_between_special_tokens": fields.flag,
    "prompt_logprobs": fields.integer(0),
    "logit_bias": fields.mapping,
    "allowed_token_ids": token_ids,
    "truncate_prompt_tokens": fields.integer(-1),
    "truncation_side": fields.one_of("left", "right"),
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
    "return_token_ids": fields.flag,
    "return_tokens_as_token_ids": fields.flag,
    "request_id": request_id,
    "cache_salt": fields.text,
    "length_penalty": fields.number(),
    "bad_words": fields.list_of(fields.text),
    "logprob_token_ids": token_ids,
    "prompt_embeds": fields.anything,
}

def read_options(found: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None, add_special_tokens: bool,
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
    best_of = found.get("best_of", n)
    if best_of < n:
        raise RequestError(f"best_of ({best_of}) must not be below n ({n}).", param="best_of")
    if best_of > n and found.get("stream"):
        raise not_supported("best_of", "which answers are the best is known when all are finished, so it cannot be "
                            "streamed.")
    for name, why in _NOT_SERVED.items():
        if found.get(name):
            raise not_supported(name, why)
    if len(found.get("stop", ())) > _MOST_STOPS:
        raise RequestError(f"stop holds {len(found['stop'])} strings; {_MOST_STOPS} is the most.", param="stop")
    if "" in found.get("stop", ()):
        raise RequestError("stop must not hold an empty string.", param="stop")
    streamed = fields.read(found.get("stream_options", {}), {"include_usage": fields.flag,
                                                              "continuous_usage_stats": fields.flag}, "stream_options.")
    simple = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
              "ignore_eos", "skip_special_tokens", "prompt_logprobs", "priority", "stream",
              "return_token_ids", "cache_salt")
    return Options(
        max_tokens=limit,
        limit_field=limit_name,
        min_tokens=min_tokens,
        n=n,
        best_of=best_of if best_of > n else None,
        seed=None if found.get("seed") == -1 else found.get("seed"),
        stop=tuple(found.get("stop", ())),
        stop_token_ids=tuple(found.get("stop_token_ids", ())),
        include_stop=found.get("include_stop_str_in_output", False),
        logprobs=logprobs,
        logit_bias=_logit_bias(found.get("logit_bias", {})),
        allowed_token_ids=tuple(found["allowed_token_ids"]) if "allowed_token_ids" in found else None,
        bad_words=_bad_words(found.get("bad_words", [])),
        truncate_prompt_tokens=truncation(found.get("truncate_prompt_tokens")),
        truncate_right=found.get("truncation_side") == "right",
        add_special_tokens=found.get("add_special_tokens", add_special_tokens),
        include_usage=streamed.get("include_usage", False),
        continuous_usage=streamed.get("continuous_usage_stats", False),
        tokens_as_ids=found.get("return_tokens_as_token_ids"),
        request_id=found.get("request_id"),
        **{name: found[name] for name in simple if name in found},
    )


def _bad_words(words: list[str]) -> tuple[str, ...]:
    if len(words) > _MOST_WORDS or sum(map(len, words)) > _MOST_LETTERS:
        raise RequestError(f"bad_words holds {len(words)} words with {sum(map(len, words))} characters; {_MOST_WORDS} "
                           f"with {_MOST_LETTERS} is the most.", param="bad_words")
    if not all(word.strip() for word in words):
        raise RequestError("bad_words must not hold an empty word.", param="bad_words")
    return tuple(words)


def _logit_bias(value: Mapping[str, Any]) -> dict[int, float]:
    biases = {}
    bias = fields.number(-100, 100)
    for token, amount in value.items():
        if not token.isdecimal() or len(token) > 10:
            raise RequestError(f"logit_bias holds {token!r:.40}, which is no token id.", param="logit_bias")
        biases[int(token)] = bias(amount, f"logit_bias.{token}")
    return biases


def truncation(value: int | None) -> int | None:
    if value == 0:
        raise RequestError("truncate_prompt_tokens must be at least 1.", param="truncate_prompt_tokens")
    return None if value == -1 else value
