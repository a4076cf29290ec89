"""Rendering the repository's chat template the way every user of it does: by transformers' apply_chat_template."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

TEMPLATE = Path(__file__).resolve().parents[2] / "chat_template_multi_system.jinja"


@functools.lru_cache
def _tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=TEMPLATE.read_text(encoding="utf-8")
    )


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    """The prompt's text. `variables`: add_generation_prompt, enable_thinking, preserve_thinking.

    Raises jinja2's TemplateError where the template refuses the messages.
    """
    return _tokenizer().apply_chat_template(messages, tools=tools, tokenize=False, **variables)
