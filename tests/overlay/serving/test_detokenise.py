"""Token ids to text, token by token, against the tokenizer's own decoding of the whole."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from tests.helpers.tokenizer import tokenizer_folder
from vllm.overlay.serving.detokenise import ByteDetokeniser, TokenBytes, WindowDetokeniser, is_byte_level

TEXTS = ["Hello, world!\n\n  x = 1\t", "中文测试：你好世界", "日本語: こんにちは", "Emoji: 🎉🚀✨🇨🇳 👩‍👩‍👧‍👦",
         "naïve café – “quotes”",
         "<think>\nhm\n</think>\n\n<tool_call>", "العربية עברית हिन्दी ไทย 한국어", "a" * 50 + "🎉" * 20]


@pytest.fixture(scope="module")
def tokenizer():
    # Few merges: most characters outside ASCII are several tokens.
    return AutoTokenizer.from_pretrained(tokenizer_folder(small=479))


def detokenisers(tokenizer, prompt=(), skipped=frozenset()):
    return {"bytes": ByteDetokeniser(TokenBytes(tokenizer), prompt, skipped),
            "window": WindowDetokeniser(tokenizer, prompt, skipped)}


def test_this_tokenizer_is_byte_level(tokenizer):
    assert is_byte_level(tokenizer)


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole(tokenizer, kind, text):
    ids = tokenizer(text).input_ids
    pieces = list(map(detokenisers(tokenizer)[kind].push, ids))
    assert "".join(pieces) == text
    assert not [piece for piece in pieces if "\ufffd" in piece], "a character was cut"


def test_random_tokens_decode_as_the_tokenizer_does(tokenizer):
    """Ids at random, so mostly invalid UTF-8: the same replacement characters at the same places."""
    for seed in range(300):
        rng = random.Random(seed)
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 30))]
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        got = "".join(map(detokenisers(tokenizer)["bytes"].push, ids))
        # What is unfinished at the end is never given.
        assert whole.rstrip("\ufffd") == got.rstrip("\ufffd"), f"seed {seed}: {ids}"


def test_special_tokens_are_skipped_only_when_told(tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [*tokenizer("a").input_ids, end, *tokenizer("b").input_ids]
    for name, shown in detokenisers(tokenizer).items():
        assert "".join(map(shown.push, ids)) == "a<|im_end|>b", name
    for name, hidden in detokenisers(tokenizer, skipped=frozenset({end})).items():
        assert "".join(map(hidden.push, ids)) == "ab", name


def test_ids_outside_the_vocabulary_have_no_text(tokenizer):
    for name, one in detokenisers(tokenizer).items():
        assert one.push(len(tokenizer) + 5) == "", name
        assert one.push(tokenizer("x").input_ids[0]) == "x", name


def test_a_character_that_the_prompt_began(tokenizer):
    ids = tokenizer("ab🎉").input_ids
    assert len(ids) > 3, "the emoji must be several tokens here"
    for name, one in detokenisers(tokenizer, prompt=ids[:-1]).items():
        assert one.push(ids[-1]).endswith("🎉"), name


def test_constant_work_per_token(tokenizer):
    """Token 20,000 costs what token 100 costs."""
    import time

    one = detokenisers(tokenizer)["bytes"]
    ids = tokenizer("some text 中文 ").input_ids

    def block() -> float:
        start = time.perf_counter()
        for _ in range(2000 // len(ids)):
            for token in ids:
                one.push(token)
        return time.perf_counter() - start

    early = min(block() for _ in range(3))
    for _ in range(10):
        block()
    late = min(block() for _ in range(3))
    assert late < 5 * early, f"{early:.5f} s, later {late:.5f} s for 2000 tokens"
