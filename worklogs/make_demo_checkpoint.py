"""Makes the demo checkpoint: a small random model with the real model's layout, vocabulary and context length.

    python worklogs/make_demo_checkpoint.py OUT --tokenizer DIR     (DIR: what make_tokenizer.py wrote)

Seconds, under 250 MB, the same bytes every time. The weights are random, so the answers mean nothing, to pictures too.
Two channels of the hidden state are reserved, so that they at least have the form of answers: channel 0 is constant and
gives the head a bias per token; channel 1 says whether the last token belonged to a thought (a picture's does not). A
thought is a run of THOUGHT_WORDS that ends in `</think>`; an answer is a run of ANSWER_WORDS that ends in `<|im_end|>`.
Everything else is random.
"""
import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from random_checkpoint import CannotWrite, write_checkpoint  # noqa: E402

SEED = 0
MODEL = Path(__file__).resolve().parent / "model"
TEXT_SIZES = {
    "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96,
}
MROPE_SECTION = [3, 3, 2]
VISION_SIZES = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 192}
# Logits, whose deviation is about 2: of a hundred words the best reaches about 5.
NEVER = -30.0
END = 1.0
THINK_END, TURN_END = "</think>", "<|im_end|>"
THOUGHT_WORDS = """
    Perhaps Maybe First Second Third Then Next Now Here There What When Where Why How Who This That These Those One Two
    Three Since Because Although While After Before Again Also Still Just Only Even Both Each Every Some Many Most
""".split()  # noqa: SIM905
ANSWER_WORDS = """
    the and with from into over under about between through around across along above below near far here there river
    mountain lake sea ocean island forest garden field road bridge house window door table light water wind rain snow
    sun moon star sky cloud tree leaf flower grass stone sand fire summer winter spring morning evening night day week
    year city village station train ship boat bird horse fish dog cat book letter story song music color red green blue
    yellow small large long short new old young warm cold bright dark quiet slow quick open round deep high low
    walks runs sings grows falls turns stands moves opens brings keeps finds makes gives
""".split()  # noqa: SIM905
# What ends the prompt that opens a thought ("<think>\n").
THOUGHT_OPENERS = ("<think>", "Ċ")


def demo_config(config: dict[str, Any]) -> dict[str, Any]:
    """The real configuration with small sizes; raises nothing."""
    text = {**config["text_config"], **TEXT_SIZES, "mtp_num_hidden_layers": 0}
    text["layer_types"] = text["layer_types"][:text["num_hidden_layers"]]
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": MROPE_SECTION}
    return {**config, "text_config": text, "vision_config": {**config["vision_config"], **VISION_SIZES}}


def read_tokens(folder: Path) -> dict[str, int]:
    """Token text (in the byte-level alphabet) -> id, of folder/tokenizer.json.

    Raises:
        CannotWrite: no such file, or it lacks a token that the demo needs.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CannotWrite(f"{path} does not exist; make it with worklogs/make_tokenizer.py {folder}")
    content = json.loads(path.read_text(encoding="utf-8"))
    tokens = dict(content["model"]["vocab"])
    tokens.update((token["content"], token["id"]) for token in content.get("added_tokens", ()))
    missing = [name for name in (THINK_END, TURN_END, *THOUGHT_OPENERS) if name not in tokens]
    if missing:
        raise CannotWrite(f"{path} lacks the token{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}")
    return tokens


class Form:
    """The reserved channels, as the `adjust` of write_checkpoint."""

    def __init__(self, tokens: dict[str, int], vocabulary: int, hidden: int) -> None:
        thought = np.full(vocabulary, NEVER, dtype=np.float32)
        answer = np.full(vocabulary, NEVER, dtype=np.float32)
        self._side = np.full(vocabulary, -1.0, dtype=np.float32)
        for words, bias in ((THOUGHT_WORDS, thought), (ANSWER_WORDS, answer)):
            bias[[tokens[f"Ġ{word}"] for word in words if f"Ġ{word}" in tokens]] = 0.0
        self._side[thought == 0.0] = 1.0
        for token in THOUGHT_OPENERS:
            self._side[tokens[token]] = 1.0
        thought[tokens[THINK_END]] = answer[tokens[TURN_END]] = END
        # The two channels hold 1 and +-1, times the inverse size of the hidden state, which is near 1 here.
        self._bias = np.stack(((thought + answer) / 2, (thought - answer) / 2), axis=1)
        self._hidden = hidden

    def __call__(self, name: str, first: int, block: np.ndarray) -> None:
        """Puts the reserved channels into rows [first, first + len(block)) of tensor `name`."""
        rows = slice(first, first + len(block))
        if name.endswith("merger.linear_fc2.bias"):
            # A picture is no part of a thought.
            block[0, :2] = 1.0, -1.0
        elif name.endswith("embed_tokens.weight"):
            block[:, 0], block[:, 1] = 1.0, self._side[rows]
        elif name == "lm_head.weight":
            block[:, :2] = self._bias[rows]
        elif name.endswith("language_model.norm.weight"):
            block[0, :2] = 0.0
        elif re.search(r"\.(out_proj|o_proj|down_proj|merger\.linear_fc2)(\.weight)?$", name):
            block[(np.arange(first, first + len(block)) % self._hidden) < 2] = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make; must not exist or be empty")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="its files are copied into OUT")
    args = parser.parse_args()
    start = time.perf_counter()
    try:
        config = demo_config(json.loads((MODEL / "config.json").read_text(encoding="utf-8")))
        tokens = read_tokens(args.tokenizer)
        text = config["text_config"]
        if max(tokens.values()) >= text["vocab_size"]:
            raise CannotWrite(f"{args.tokenizer} has token {max(tokens.values())}, "
                              f"the model {text['vocab_size']} tokens")
        form = Form(tokens, text["vocab_size"], text["hidden_size"])
        published = {name: json.loads((MODEL / name).read_text(encoding="utf-8"))
                     for name in ("generation_config.json", "preprocessor_config.json")}
        files = {path.name: path for path in args.tokenizer.iterdir() if path.is_file()}
        size, digest = write_checkpoint(args.out, config, SEED, form, published, files)
    except (CannotWrite, OSError, ValueError) as error:
        print(f"make_demo_checkpoint: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {size:,} bytes of weights in {time.perf_counter() - start:.0f} s, sha256 {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
