"""Forced output: a grammar that admits one text makes a model with random weights say it, through the whole server.

    body = {"messages": ..., **forced("Let me see.\n</think>\n\nIt is <b>4</b>.")}

The text is all that the model generates behind the prompt: where the prompt opens a thought (thinking is on unless a
request says otherwise), it begins inside that thought. Control tokens are written as they look, `</think>`,
`<tool_call>`, and are generated as the one token that they are; where text is meant that only looks so, it is named in
`as_text`. The cut into tokens is the model's own choice, so another seed or prompt gives another; `canonical` makes it
the tokenizer's.

The model needs as many tokens as the text has letters at the most: `max_tokens` is set accordingly.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.tokenizer import added_token_ids

# Tokens for a letter of another script: as many as it has bytes.
_MOST_BYTES = 4


def forced(text: str, *, canonical: bool = False, as_text: Collection[str] = (), **fields: Any) -> dict[str, Any]:
    """Fields of a request, chat or completion, whose output is `text`; `fields` are added to them.

    `max_tokens` may be among `fields`, to cut the text short.
    """
    return {"max_tokens": _MOST_BYTES * len(text) + 8,
            "structured_outputs": {"grammar": forcing(text, canonical=canonical, as_text=as_text),
                                   "enable_in_reasoning": True}, **fields}


def forcing(text: str, *, canonical: bool = False, as_text: Collection[str] = ()) -> str:
    """The grammar, in Lark's form, that admits `text` only."""
    from vllm.overlay.grammar.source import literal

    pieces = [piece for piece in _control_tokens(frozenset(as_text)).split(text) if piece] or [""]
    symbols = _control_tokens(frozenset(as_text))
    written = [piece if symbols.fullmatch(piece) else literal(piece) for piece in pieces]
    options = "" if canonical else '%llguidance {"no_forcing": true}\n'
    return f"{options}start: {' '.join(written)}\n"


def call(name: str, *arguments: tuple[str, str]) -> str:
    """A tool call as the model writes it: `call("f", ("city", "Beijing"))`."""
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


@functools.lru_cache
def _control_tokens(but: frozenset[str]) -> re.Pattern[str]:
    # The vocabulary's own names, whichever size of it a test uses.
    names = sorted(set(added_token_ids()) - but, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, names)) + ")")


def tiny_server_command(model: Path, port: int, arguments: Sequence[str | Path] = ()) -> list[str | Path]:
    """What starts the real server over a tiny model (`tests.helpers.tiny_models.make_qwen2` and the files of
    `tokenizer_folder(small=479)`)."""
    import sys

    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "llm",
            "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "4096",
            "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--enable-chunked-prefill",
            "--enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder",
            "--reasoning-parser", "qwen3", "--num-gpu-blocks-override", "1024", *arguments]
