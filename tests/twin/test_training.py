"""A training of a few steps: an interruption changes nothing, and what it exports is the real format."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from config import twin_config
from export import export
from model import EMBEDDING, shapes
from safetensors.torch import load_file
from tokens import make
from train import Trainer, TrainError, main

STEPS = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("twin") / "tokenizer"
    make(folder, count=300, size=800)
    return folder


def trainer(tokenizer: Path, run: Path, steps: int = 2 * STEPS, go_on_from: list[str] | None = None) -> Trainer:
    if not run.exists():
        shutil.copytree(tokenizer, run / "tokenizer")
    torch.set_num_threads(1)
    return Trainer(
        argparse.Namespace(
            run=run,
            rank=0,
            processes=1,
            seed=0,
            steps=steps,
            minutes=1.0,
            rows=1,
            length=256,
            compile=False,
            evaluate=False,
            # Without bfloat16 arithmetic in the processor a step takes a minute.
            float32=True,
            go_on_from=go_on_from,
        )
    )


def test_interrupted_training_is_the_same(tokenizer, tmp_path):
    whole, first = trainer(tokenizer, tmp_path / "whole"), trainer(tokenizer, tmp_path / "parts")
    losses = [whole.train_step()["loss"] for _ in range(STEPS)]
    again = [first.train_step()["loss"] for _ in range(STEPS // 2)]
    first.save()
    second = trainer(tokenizer, tmp_path / "parts")
    assert second.step == STEPS // 2
    again += [second.train_step()["loss"] for _ in range(STEPS // 2)]
    print("losses", losses, again)
    assert losses == again
    for name, value in whole.p.items():
        assert torch.equal(value, second.p[name]), name
    assert whole.curriculum.state() == second.curriculum.state()


def test_the_loss_falls(tokenizer, tmp_path):
    """By averages: every step has other samples."""
    one = trainer(tokenizer, tmp_path / "run", 40)
    losses = [one.train_step()["loss"] for _ in range(40)]
    print("losses", losses)
    assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.2


def test_export_is_the_real_format(tokenizer, tmp_path):
    one = trainer(tokenizer, tmp_path / "run")
    size, digest = export(one.p, one.config, tokenizer, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    print(f"{size:,} bytes, {len(tensors)} tensors, sha256 {digest}")
    assert set(tensors) == set(shapes(one.config)) | {"lm_head.weight"}
    assert torch.equal(tensors["lm_head.weight"], tensors[EMBEDDING])
    assert all(value.dtype == torch.bfloat16 for value in tensors.values())
    written = json.loads((tmp_path / "out/config.json").read_text())
    ids = {
        token["content"]: token["id"]
        for token in json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"]
    }
    assert written == twin_config(ids, 800)
    assert written["image_token_id"] == ids["<|image_pad|>"] and max(ids.values()) == 799


def test_a_finished_training_goes_on_from_its_checkpoint(tokenizer, tmp_path):
    """Of which nothing but the checkpoint is left: weights, steps and minutes count, and the rates begin low again."""
    one = trainer(tokenizer, tmp_path / "first")
    one.train_step()
    export(one.p, one.config, tokenizer, tmp_path / "out")
    two = trainer(tokenizer, tmp_path / "second", 200, [str(tmp_path / "out"), "100", "0.5"])
    assert (two.step, two.used, set(two.curriculum.level.values())) == (100, 30.0, {2})
    for name, value in two.p.items():
        assert torch.equal(value, one.p[name].bfloat16().float()), name
    rates = [two.train_step()["rate"] for _ in range(2)]
    print("rates", rates)
    assert rates == [1 / 50, 2 / 50]
    two.save()
    again = trainer(tokenizer, tmp_path / "second", 200, [str(tmp_path / "out"), "100", "0.5"])
    assert (again.step, again.first) == (102, 100)


def test_a_broken_state_is_named(tokenizer, tmp_path):
    trainer(tokenizer, tmp_path / "run").save()
    state = tmp_path / "run/state.pt"
    whole = state.read_bytes()
    other = io.BytesIO()
    torch.save({"parameters": {EMBEDDING: torch.zeros(1, 2, 3)}}, other)
    for content in (whole[:10_000], b"nothing", b"", other.getvalue()):
        state.write_bytes(content)
        with pytest.raises(TrainError, match="state.pt is broken or of another model; without it"):
            trainer(tokenizer, tmp_path / "run")
    state.write_bytes(whole)
    assert trainer(tokenizer, tmp_path / "run").step == 0


def test_going_on_needs_the_same_tokenizer(tokenizer, tmp_path):
    one = trainer(tokenizer, tmp_path / "first")
    export(one.p, one.config, tokenizer, tmp_path / "out")
    with (tmp_path / "out/tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(TrainError, match="is another one than that of"):
        trainer(tokenizer, tmp_path / "second", 200, [str(tmp_path / "out"), "100", "0.5"])


def test_going_on_takes_the_checkpoints_tokenizer(tmp_path, monkeypatch):
    checkpoint = Path(__file__).parent / "checkpoint"
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: argparse.Namespace(poll=lambda: 0, returncode=0))
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "run"), "--go-on-from", str(checkpoint), "1", "0.5"])
    assert main() == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "run/tokenizer" / name).read_bytes() == (checkpoint / name).read_bytes()


CHECKPOINT = str(Path(__file__).parent / "checkpoint")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--processes", "0"], "--processes, --rows and --minutes must be above 0"),
        (["--rows", "-1"], "--processes, --rows and --minutes must be above 0"),
        (["--minutes", "0"], "--processes, --rows and --minutes must be above 0"),
        (["--steps", "-1"], "and --steps not below"),
        (["--length", "256"], "--length 256: shorter rows than 512"),
        (["--go-on-from", "nothing", "1", "2"], "--go-on-from nothing is no checkpoint"),
        (["--go-on-from", CHECKPOINT, "x", "2"], "x steps and 2 minutes are no numbers"),
        (["--go-on-from", CHECKPOINT, "1", "-2"], "1 steps and -2 minutes are no numbers"),
    ],
)
def test_options_that_cannot_be(options, why, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "run"), *options])
    with pytest.raises(SystemExit):
        main()
    assert why in capsys.readouterr().err and not (tmp_path / "run").exists()
