"""How many tokens a request may generate: refuse what can never fit, serve what fits."""

from __future__ import annotations

from vllm.overlay.serving.errors import PromptTooLong, RequestError


def check_limit(max_tokens: int | None, context: int, param: str = "max_tokens") -> None:
    """Refuse a limit that no prompt could make true. Needs no prompt, so a client hears of it at once."""
    if max_tokens is not None and max_tokens > context:
        raise RequestError(f"{param} is {max_tokens}, but this model's maximum context length is {context} tokens, "
                           "prompt and answer together.", param=param)


def token_budget(prompt_tokens: int, max_tokens: int | None, context: int, param: str = "messages") -> int:
    """Tokens to generate at most: what was asked for, cut to what fits behind the prompt; all that fits if nothing was.

    Raises RequestError when the prompt leaves no room for a single token. Lengths in tokens; context is max_model_len.
    """
    room = context - prompt_tokens
    if prompt_tokens < 1:
        raise RequestError("The prompt is empty.", param=param)
    if room < 1:
        raise PromptTooLong(prompt_tokens, context, param)
    return room if max_tokens is None else min(max_tokens, room)
