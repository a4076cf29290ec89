"""Prompts that are too long for the model's context by far, found before all of their tokens are made."""

from __future__ import annotations

from typing import Any

from vllm.overlay.serving.errors import PromptTooLong

# No prompt of fewer characters per token of context is looked at here: its tokens are made soon enough.
_SURELY_SHORT = 8
_PIECE = 1 << 17


def refuse_hopeless(tokenizer: Any, text: str, context: int, param: str) -> None:
    """Raise PromptTooLong where a beginning of the text alone has more tokens than the context.

    The text is cut anywhere: a cut makes a token or two more than the whole text has there, which are not counted.
    """
    if len(text) <= _SURELY_SHORT * context:
        return
    at_least = 0
    for begin in range(0, len(text), _PIECE):
        piece = text[begin:begin + _PIECE]
        ids = tokenizer(piece, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
        at_least += len(ids.input_ids) - 2
        if at_least > context:
            raise PromptTooLong(at_least, context, param, at_least=True)
