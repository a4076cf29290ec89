"""The exported checkpoint in transformers: cached greedy decoding against the training program's forward pass."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from chats import TRAIN, Chat  # noqa: E402
from export import export  # noqa: E402
from judge import SPLITS, Decoder, card, is_right, main, training  # noqa: E402
from model import Network  # noqa: E402
from packing import assemble, encode  # noqa: E402
from tasks import draw, user  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokens import make  # noqa: E402
from train import Trainer  # noqa: E402


@pytest.mark.parametrize("task", ["obey", "picture"])
def test_greedy_tokens(task, tmp_path):
    tokenizer = tmp_path / "run/tokenizer"
    make(tokenizer, count=300, size=800)
    torch.set_num_threads(1)
    trainer = Trainer(
        argparse.Namespace(
            run=tmp_path / "run",
            rank=0,
            processes=1,
            seed=0,
            steps=1,
            minutes=1.0,
            rows=1,
            length=640,
            compile=False,
            evaluate=False,
            float32=True,
            go_on_from=None,
        )
    )
    # As the file will hold them.
    trainer.p = {name: value.detach().bfloat16().float() for name, value in trainer.p.items()}
    export(trainer.p, trainer.config, tokenizer, tmp_path / "out")
    trainer.network = Network(trainer.config, torch.float32)
    trainer.trunk = trainer.network.trunk
    decoder = Decoder(tmp_path / "out", torch.float32)
    sample = encode(trainer.tokenizer, draw(random.Random(5), task, 0, TRAIN))
    got = decoder.decode(sample, 12)
    sample.ids = sample.ids[: sample.first] + got
    following = max(line[sample.first - 1] for line in sample.positions) + 1
    sample.positions = [[*line[: sample.first], *range(following, following + len(got))] for line in sample.positions]
    batch = assemble([[sample]], 640)
    with torch.no_grad():
        best = trainer.logits(trainer.hidden(batch)[0], batch.at).argmax(-1).tolist()
    print(task, "decoded", got, "by one pass", best)
    assert got == best


@pytest.mark.parametrize(
    ("thought", "said", "right"),
    [
        ("Three.", "I know it.\n</think>\n\n3<|im_end|>", True),
        ("Three.", "I know it.\n</think>\n\n4<|im_end|>", False),
        ("Three.", "3<|im_end|>", False),
        ("Three.", "Three.\n</think>\n\n3", False),
        (None, "3<|im_end|>", True),
        (None, "3.<|im_end|>", False),
        (None, "3\n</think>\n\n3<|im_end|>", False),
    ],
)
def test_what_is_right(tmp_path, thought, said, right):
    """The answer counts; of a thought, that it is there where it should be, and ends."""
    make(tmp_path, count=300, size=800)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    chat = Chat("arithmetic", "", [user("1 + 2?")], "3", thought=thought)
    wanted, got = (tokenizer.encode(text, add_special_tokens=False).ids for text in (chat.target(), said))
    assert is_right(chat, wanted, got, argparse.Namespace(tokenizer=tokenizer, ends=set())) is right


CHECKPOINT = Path(__file__).parent / "checkpoint"


def test_the_card_tells_of_a_training_only_what_its_log_says(tmp_path):
    report = {"table": {"echo": dict.fromkeys(SPLITS, "1/2")}, "wrong": []}
    silent = card(CHECKPOINT, report)
    assert "| echo | 1/2 | 1/2 |" in silent and "steps" not in silent and "hours" not in silent and "loss" not in silent
    log = tmp_path / "log.jsonl"
    held_out = {"echo": {"accepted": 0.9, "loss": 0.125}}
    entries = ({"step": 5}, {"step": 7, "used_s": 7200, "held_out": held_out})
    log.write_text("".join(json.dumps(one) + "\n" for one in entries))
    assert "seed 0: 7 steps, 2.0 hours of one core\n" in card(CHECKPOINT, {**report, **training(log)})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["nothing"], "nothing is no checkpoint"),
        ([str(CHECKPOINT), "--count", "0"], "--count must be above 0"),
        ([str(CHECKPOINT), "--log", "nothing.jsonl"], "--log nothing.jsonl is no log of a finished training"),
        ([str(CHECKPOINT), "--log", "unfinished.jsonl"], "--log unfinished.jsonl is no log of a finished training"),
        ([str(CHECKPOINT), "--log", __file__], "is no log of a finished training: JSONDecodeError"),
    ],
)
def test_options_that_cannot_be(options, why, tmp_path, monkeypatch, capsys):
    """Told before the minutes of judging."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unfinished.jsonl").write_text('{"step": 20}\n')
    monkeypatch.setattr(sys, "argv", ["judge.py", *options])
    with pytest.raises(SystemExit):
        main()
    assert why in capsys.readouterr().err
