"""A tokenizer as llguidance sees it: the bytes of every token, and which tokens are no text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import llguidance
from llguidance import LLTokenizer, TokenizerWrapper

from vllm.overlay.serving.detokenise import TokenBytes, is_byte_level


class _Words:
    """What TokenizerWrapper asks for. Added tokens are no text: grammars name them, and text cannot spell them."""

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, eos: int) -> None:
        from tokenizers import Tokenizer

        self.tokens = TokenBytes(tokenizer).first(vocab_size)
        self.special_token_ids = [token for token in tokenizer.added_tokens_decoder if token < vocab_size]
        self.eos_token_id = eos
        # Text as it stands: no normaliser, and no added tokens, which "<think>" in a string would turn into.
        backend = tokenizer.backend_tokenizer
        self._plain = Tokenizer(backend.model)
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer

    def __call__(self, text: str) -> list[int]:
        if isinstance(text, bytes):
            # TokenizerWrapper tries whether bytes are taken.
            raise TypeError("text is taken, not bytes")
        return self._plain.encode(text, add_special_tokens=False).ids


def make_vocabulary(tokenizer: Any, vocab_size: int, eos: Iterable[int]) -> LLTokenizer:
    """Takes about 3 s and 100 MB for 248,320 tokens.

    tokenizer: a fast tokenizer of transformers. vocab_size: width of the logits; ids that the tokenizer does not have
    are never allowed. eos: the tokens that end a sequence, the tokenizer's own first.

    Raises:
        ValueError: the tokenizer is not a fast one, or its tokens are no byte sequences.
    """
    ends = [token for token in dict.fromkeys(eos) if token < vocab_size]
    if not ends:
        raise ValueError("the model has no token that ends a sequence, so a grammar could never end")
    if is_byte_level(tokenizer):
        return LLTokenizer(TokenizerWrapper(_Words(tokenizer, vocab_size, ends[0])), n_vocab=vocab_size, eos_token=ends)
    from llguidance import hf

    return hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)


def library() -> str:
    """The library and its version, for logs and records."""
    return llguidance.get_version()
