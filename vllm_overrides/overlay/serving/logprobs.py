"""Log probabilities in the two shapes of OpenAI's API. Probabilities of zero become -9999, since JSON has no
infinity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LEAST = -9999.0
Alternatives = Mapping[int, Any] | None


class TokenText:
    """The text of single tokens, as logprobs show them: a token that holds part of a character shows a broken one."""

    def __init__(self, tokenizer: Any, token_bytes: Any = None, as_ids: bool = False) -> None:
        """token_bytes: a TokenBytes where the tokenizer is byte-level; as_ids: show ``token_id:123`` instead of
        text."""
        self._tokenizer = tokenizer
        self._bytes = token_bytes
        self._as_ids = as_ids

    def shown(self, as_ids: bool) -> TokenText:
        """The same with ids, or without."""
        return TokenText(self._tokenizer, self._bytes, as_ids)

    def raw(self, token: int) -> bytes:
        """The token's bytes."""
        if self._bytes is not None:
            return self._bytes.of(token)
        return self._tokenizer.decode([token]).encode() if 0 <= token < len(self._tokenizer) else b""

    def text(self, token: int) -> str:
        """The token's text, or its id where the server was started so."""
        return f"token_id:{token}" if self._as_ids else self.raw(token).decode("utf-8", "replace")


def _best_first(alternatives: Mapping[int, Any], count: int) -> list[tuple[int, float]]:
    ranked = sorted(((token, max(entry.logprob, _LEAST)) for token, entry in alternatives.items()),
                    key=lambda pair: -pair[1])
    return ranked[:count]


def chat_logprobs(text: TokenText, tokens: Sequence[int], logprobs: Sequence[Alternatives],
                  top: int) -> list[dict[str, Any]]:
    """``choices[].logprobs.content`` of chat: one entry per generated token, thoughts included, with ``top``
    alternatives."""

    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": text.text(token), "logprob": value, "bytes": list(text.raw(token))}

    content = []
    for token, alternatives in zip(tokens, logprobs, strict=False):
        if alternatives is None:
            continue
        chosen = max(alternatives[token].logprob, _LEAST)
        content.append({**entry(token, chosen),
                        "top_logprobs": [entry(*pair) for pair in _best_first(alternatives, top)]})
    return content


def completion_logprobs(text: TokenText, tokens: Sequence[int], logprobs: Sequence[Alternatives], top: int,
                        offset: int) -> dict[str, Any]:
    """``choices[].logprobs`` of completions. offset: characters of the choice before these tokens.

    A prompt's first token has no probability: null. Alternatives are the best ``top`` and the chosen token.
    """
    out: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, alternatives in zip(tokens, logprobs, strict=False):
        shown = text.text(token)
        out["text_offset"].append(offset)
        out["tokens"].append(shown)
        offset += len(shown)
        if alternatives is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            continue
        best = {text.text(other): value for other, value in _best_first(alternatives, top)}
        chosen = max(alternatives[token].logprob, _LEAST)
        out["token_logprobs"].append(chosen)
        out["top_logprobs"].append({**best, shown: chosen})
    return out


def prompt_logprobs(text: TokenText, entries: Sequence[Alternatives]) -> list[Any]:
    """Per prompt token, token id -> its logprob, rank and text; null for the first, which nothing comes before."""
    return [None if entry is None else
            {str(token): {"logprob": max(one.logprob, _LEAST), "rank": one.rank, "decoded_token": text.text(token)}
             for token, one in entry.items()}
            for entry in entries]
