"""The exported checkpoint in transformers: cached greedy decoding against the training program's forward pass."""

from __future__ import annotations

import argparse
import random

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from chats import TRAIN  # noqa: E402
from export import export  # noqa: E402
from judge import Decoder  # noqa: E402
from model import Network  # noqa: E402
from packing import assemble, encode  # noqa: E402
from tasks import draw  # noqa: E402
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
