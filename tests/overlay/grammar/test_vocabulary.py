"""Every token as llguidance sees it is what the tokenizer's own decoder makes of it."""

from __future__ import annotations

import time

import pytest
from transformers import AutoTokenizer

from tests.helpers.fake_engine import EOS, ids, tokenizer
from tests.helpers.tokenizer import tokenizer_folder
from vllm.overlay.grammar.vocabulary import library, make_vocabulary
from vllm.overlay.serving.detokenise import TokenBytes

CONTROL = len(tokenizer()) - 33


def test_bytes_of_the_small_vocabulary(vocabulary):
    assert vocabulary.vocab_size == len(tokenizer())
    words = TokenBytes(tokenizer()).first(CONTROL)
    # The library marks what is no text by a byte that occurs in no text; the token of that byte is none either.
    texts = [token for token in range(CONTROL) if words[token] != b"\xff"]
    assert [vocabulary.decode_bytes([token]) for token in texts] == [words[token] for token in texts]
    assert [token for token in range(len(tokenizer())) if not vocabulary.is_special_token(token)] == texts


def test_the_first_tokens_at_once_are_those_one_by_one():
    one_by_one = TokenBytes(tokenizer())
    assert TokenBytes(tokenizer()).first(600) == [one_by_one.of(token) for token in range(600)]
    assert TokenBytes(tokenizer()).first(100) == [one_by_one.of(token) for token in range(100)]


@pytest.mark.parametrize("text", [
    "Hello, wörld!", "中文 🎉", "a\n\n\tb", "e\u0301 is not é", "</think> <tool_call>", ""])
def test_text_is_cut_as_it_stands(vocabulary, text):
    """Neither normalised, nor read as control tokens."""
    tokens = vocabulary.tokenize_str(text)
    assert vocabulary.decode_bytes(tokens) == text.encode() and all(token < CONTROL for token in tokens)
    if text == "Hello, wörld!":
        assert tokens == ids(text)


def test_a_grammar_may_force_text_that_looks_like_a_control_token(vocabulary):
    """The library prefers the tokenizer's own cut of forced text; a control token there would be a dead end."""
    from llguidance import LLMatcher

    matcher, tokens = LLMatcher(vocabulary, 'start: "a <think> b"'), []
    while not matcher.is_stopped():
        allowed = matcher.compute_bitmask()
        token = next(i for i in range(len(tokenizer())) if allowed[i // 8] >> i % 8 & 1)
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    assert vocabulary.decode_bytes(tokens) == b"a <think> b"


def test_a_wider_model_and_a_narrower_one():
    from llguidance import LLMatcher

    wide = make_vocabulary(tokenizer(), len(tokenizer()) + 100, [EOS])
    assert wide.vocab_size == len(tokenizer()) + 100
    allowed = LLMatcher(wide, "start: /(?s:.*)/").compute_bitmask()
    assert not any(allowed[token // 8] >> token % 8 & 1 for token in range(len(tokenizer()), wide.vocab_size))
    narrow = make_vocabulary(tokenizer(), 300, [5])
    assert narrow.vocab_size == 300 and narrow.eos_tokens == [5]
    with pytest.raises(ValueError, match="no token that ends a sequence"):
        make_vocabulary(tokenizer(), 300, [EOS])


def test_the_real_vocabulary():
    """248,320 tokens: about 3 s alone on a core, once per process, in a thread."""
    real = AutoTokenizer.from_pretrained(tokenizer_folder())
    began = time.perf_counter()
    made = make_vocabulary(real, 248320, [248046, 248044])
    seconds = time.perf_counter() - began
    assert (made.vocab_size, made.eos_tokens) == (248320, [248046, 248044])
    text = "def f(x):\n    return '中文' + x  # 🎉\n"
    assert made.tokenize_str(text) == real(text, add_special_tokens=False).input_ids
    assert seconds < 40, f"{seconds:.1f} s"
    assert library().startswith("llguidance@")
