"""Token ids -> text, one token at a time, never a broken character."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

# Enough of the prompt's end to finish a character that the prompt began, or to decide on a leading space.
_PROMPT_TAIL = 6
_BROKEN = "\ufffd"


class Detokeniser(Protocol):
    """Gives each token's text as soon as it is certain. The pieces joined are the decoded text of all tokens."""

    def push(self, token: int) -> str:
        """The text that this token completes; "" while a character is unfinished or the token is skipped."""


class TokenBytes:
    """The bytes of every token of one tokenizer, for tokenizers that are byte-level (Qwen, GPT-2, Llama 3, ...).

    ``of(token)`` is b"" for ids outside the vocabulary. Raises ValueError for a tokenizer of another kind.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not is_byte_level(tokenizer):
            raise ValueError("the tokenizer is not byte-level")
        self._tokenizer = tokenizer
        # A tokenizer that is not vLLM's own counts anew whenever it is asked.
        self._size = len(tokenizer)
        self._added = {i: str(token).encode() for i, token in tokenizer.added_tokens_decoder.items()}
        self._byte_of = _byte_of_letter()
        self._cache: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """The token's bytes."""
        cached = self._cache.get(token)
        if cached is None:
            cached = self._cache[token] = self._look_up(token)
        return cached

    def first(self, count: int) -> list[bytes]:
        """The bytes of the tokens 0 to count - 1, faster than one by one."""
        words = self._tokenizer.convert_ids_to_tokens(list(range(min(count, self._size))))
        found = [self._added[token] if token in self._added else self._of_word(word)
                 for token, word in enumerate(words)]
        return found + [b""] * (count - len(found))

    def _look_up(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token]
        return self._of_word(self._tokenizer.convert_ids_to_tokens(token) if token < self._size else None)

    def _of_word(self, word: str | None) -> bytes:
        if word is None:
            return b""
        letters = [self._byte_of.get(letter) for letter in word]
        # A token string out of the byte alphabet stands for itself; so the tokenizer's own decoder has it.
        return word.encode() if None in letters else bytes(letters)  # type: ignore[arg-type]


class ByteDetokeniser:
    """Detokeniser of byte-level tokenizers: bytes through an incremental UTF-8 decoder. Constant work per token."""

    def __init__(self, token_bytes: TokenBytes, prompt: Sequence[int] = (),
                 skipped: frozenset[int] = frozenset()) -> None:
        """skipped: ids without text (special tokens). prompt: the ids before the answer."""
        self._bytes = token_bytes
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-_PROMPT_TAIL:]:
            self.push(token)

    def push(self, token: int) -> str:
        """The text that this token completes."""
        return "" if token in self._skipped else self._decoder.decode(self._bytes.of(token))


class WindowDetokeniser:
    """Detokeniser of any other tokenizer: decodes a short window and takes what is new, as its decoder looks around."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), skipped: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        tail = [token for token in prompt[-_PROMPT_TAIL:] if token not in skipped]
        self._window: list[int] = tail
        self._given = len(tail)

    def push(self, token: int) -> str:
        """The text that this token completes."""
        if token in self._skipped or not 0 <= token < len(self._tokenizer):
            return ""
        self._window.append(token)
        # What the prompt left unfinished is finished by the answer.
        before = self._decode(self._window[:self._given]).rstrip(_BROKEN)
        now = self._decode(self._window)
        if len(now) <= len(before) or now.endswith(_BROKEN):
            return ""
        # The window starts again at what was given last time: its text is the context of what comes next.
        self._window = self._window[self._given:]
        self._given = len(self._window)
        return now[len(before):]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False,
                                      clean_up_tokenization_spaces=False) if tokens else ""


def is_byte_level(tokenizer: Any) -> bool:
    """Whether the tokenizer's decoder only joins bytes, so that tokens decode one by one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    return json.loads(backend.decoder.__getstate__()).get("type") == "ByteLevel"


def _byte_of_letter() -> dict[str, int]:
    """The alphabet that byte-level BPE writes bytes in: printable Latin-1 as itself, the other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
