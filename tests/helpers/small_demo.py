"""A demo checkpoint with a vocabulary of 8,192 and two layers: still hybrid, with experts and a vision tower, with the
same template and control tokens, and with answers of the same form, but many times as fast.

Where a grammar asks for JSON or for a call, the demo would talk for ever inside the first string. This one ends
strings: quotes are words of its answers, and blanks at the end of a line words of its thoughts, each followed by the
end of a parameter. (The line break that a parameter's value follows looks like the beginning of a thought; in answers
the end of a parameter would begin another one.)
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.tokenizer import added_token_ids, cache_folder, tokenizer_folder
from worklogs import make_demo_checkpoint as demo
from worklogs.random_checkpoint import CannotWrite, write_checkpoint

RANKS = 8159
VOCABULARY = 8192
SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "dtype": "float32"}
# Logits, as in the demo: of hundred words the best reaches about 5.
OFTEN, ALWAYS = 2.0, 20.0
# More than the demo's: its thoughts and answers end after about a dozen words.
END = 2.0
END_OF_PARAMETER = ("ĠĊ", "</", "param", "eter", ">", "Ċ")


class Form(demo.Form):
    """Beside the demo's two channels of the hidden state, one for each of the tokens that begin END_OF_PARAMETER: 1
    behind that token, which makes the next one certain."""

    def __init__(self, tokens: dict[str, int]) -> None:
        super().__init__(tokens, VOCABULARY, SIZES["hidden_size"])
        self._size = SIZES["hidden_size"]
        chain = [tokens[text] for text in END_OF_PARAMETER]
        self._bias[tokens['"']] = (demo.NEVER + OFTEN) / 2, (demo.NEVER - OFTEN) / 2
        self._bias[tokens[demo.THINK_END]] = (END + demo.NEVER) / 2, (END - demo.NEVER) / 2
        self._bias[tokens[demo.TURN_END]] = (demo.NEVER + END) / 2, (demo.NEVER - END) / 2
        self._bias[chain[0]] = (OFTEN + demo.NEVER) / 2, (OFTEN - demo.NEVER) / 2
        self._side[chain[0]] = 1.0
        self._behind = np.zeros((VOCABULARY, len(chain) - 1), dtype=np.float32)
        self._next = np.zeros_like(self._behind)
        for i, (token, following) in enumerate(zip(chain, chain[1:], strict=False)):
            self._behind[token, i] = 1.0
            self._next[following, i] = ALWAYS - demo.NEVER
        self._channels = slice(2, 2 + len(chain) - 1)

    def __call__(self, name: str, first: int, block: np.ndarray) -> None:
        super().__call__(name, first, block)
        rows = slice(first, first + len(block))
        if name.endswith("embed_tokens.weight"):
            block[:, self._channels] = self._behind[rows]
        elif name == "lm_head.weight":
            block[:, self._channels] = self._next[rows]
        elif name.endswith("language_model.norm.weight"):
            block[0, self._channels] = 0.0
        elif re.search(r"\.(out_proj|o_proj|down_proj|merger\.linear_fc2)(\.weight)?$", name):
            row = np.arange(first, first + len(block)) % self._size
            block[(row >= self._channels.start) & (row < self._channels.stop)] = 0.0


def small_demo() -> Path:
    """The checkpoint's folder, made if it is missing; not to be written to."""
    tokenizer = tokenizer_folder(small=RANKS)
    digest = hashlib.sha256(tokenizer.name.encode())
    for path in (Path(__file__), Path(demo.__file__), Path(write_checkpoint.__code__.co_filename)):
        digest.update(path.read_bytes())
    folder = cache_folder() / f"small-demo-{digest.hexdigest()[:16]}"
    if (folder / "config.json").exists():
        return folder
    config, published = _in_small(demo.demo_config(_published("config.json"))), {
        name: _in_small(_published(name)) for name in ("generation_config.json", "preprocessor_config.json")}
    config["text_config"].update(SIZES, vocab_size=VOCABULARY)
    config["vision_config"]["out_hidden_size"] = SIZES["hidden_size"]
    try:
        write_checkpoint(folder, config, demo.SEED, Form(demo.read_tokens(tokenizer)), published,
                         {path.name: path for path in tokenizer.iterdir()})
    except (CannotWrite, OSError):
        # Another test process may have made it meanwhile.
        if not (folder / "config.json").exists():
            raise
    return folder


def _published(name: str) -> dict[str, Any]:
    return json.loads((demo.MODEL / name).read_text(encoding="utf-8"))


def _in_small(value: Any) -> Any:
    """The value with the published ids of added tokens replaced by those of the small vocabulary."""
    if isinstance(value, dict):
        return {key: _small_ids(inner) if key.endswith("token_id") else _in_small(inner)
                for key, inner in value.items()}
    return value


def _small_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_small_ids(one) for one in value]
    here = added_token_ids(RANKS)
    return {token: here[text] for text, token in added_token_ids().items()}.get(value, value)
