"""The engine's sampling parameters: the request, then the model's own defaults, then neutral values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.overlay.serving.errors import RequestError
from vllm.overlay.serving.options import Options
from vllm.sampling_params import RequestOutputKind, SamplingParams

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0}


def sampling_params(options: Options, defaults: Mapping[str, Any], max_tokens: int) -> SamplingParams:
    """What the engine gets for one prompt.

    defaults: the model's generation_config.json as far as it concerns sampling ({} when switched off). max_tokens:
    what ``policy.token_budget`` allows. The engine decodes token ids only: text, stop strings and parsing belong to
    ``choice``, so the engine is given no stop string and always reports each step (DELTA).
    """
    values = {name: _first(getattr(options, name), defaults.get(name), neutral) for name, neutral in _NEUTRAL.items()}
    if values["top_k"] == 0:
        values["top_k"] = -1
    if values["top_p"] == 0:
        # The smallest nucleus is the one best token; the engine itself refuses 0.
        values.update(top_p=1.0, top_k=1)
    params = SamplingParams(
        n=1,
        seed=options.seed,
        stop_token_ids=list(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=min(options.min_tokens, max_tokens),
        # The best answers are chosen by the probability of their tokens.
        logprobs=0 if options.logprobs is None and options.best_of else options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        detokenize=False,
        skip_special_tokens=options.skip_special_tokens,
        output_kind=RequestOutputKind.DELTA,
        logit_bias=dict(options.logit_bias) or None,
        allowed_token_ids=None if options.allowed_token_ids is None else list(options.allowed_token_ids),
        **values,
    )
    # Set afterwards: stock refuses n > 1 with greedy sampling, where n equal answers are all the same a fair answer.
    params.n = options.samples
    return params


def check_sampling(options: Options, *, max_logprobs: int, vocab_size: int, logprobs_field: str) -> None:
    """Refuse by name what the engine would refuse without one. vocab_size counts the added tokens too."""
    for name, value in ((logprobs_field, options.logprobs), ("prompt_logprobs", options.prompt_logprobs)):
        if value is not None and value > max_logprobs:
            raise RequestError(f"{name} is {value}; this server gives at most {max_logprobs} (--max-logprobs).",
                               param=name)
    for name, ids in (("logit_bias", options.logit_bias), ("allowed_token_ids", options.allowed_token_ids or ()),
                      ("stop_token_ids", options.stop_token_ids)):
        for token in ids:
            if token >= vocab_size:
                raise RequestError(f"{name} holds token {token}; the vocabulary has {vocab_size} tokens.", param=name)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
