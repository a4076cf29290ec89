"""Accuracy on held-out chats: all tokens of the answer right by argmax, which is what free greedy decoding gives."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from chats import NEW_VALUES, NEW_WORDING
from packing import Encoded, assemble, encode
from tasks import TASKS, draw

if TYPE_CHECKING:
    from train import Trainer


def samples(trainer: Trainer, task: str, level: int, split: str, count: int) -> list[Encoded]:
    """The first `count` chats of one kind that fit into a row; the same every time."""
    rng = random.Random(f"held out {task} {level} {split}")
    out: list[Encoded] = []
    while len(out) < count:
        sample = encode(trainer.tokenizer, draw(rng, task, level, split), exact=False)
        if len(sample.ids) <= trainer.args.length:
            out.append(sample)
    return out


def packed(content: list[Encoded], rows: int, length: int) -> list[list[list[Encoded]]]:
    """Chats in order -> batches of rows."""
    filled: list[list[Encoded]] = [[]]
    room = length
    for sample in content:
        if len(sample.ids) > room:
            filled.append([])
            room = length
        filled[-1].append(sample)
        room -= len(sample.ids)
    filled += [[] for _ in range(-len(filled) % rows)]
    return [filled[first : first + rows] for first in range(0, len(filled), rows)]


@torch.no_grad()
def accuracy(trainer: Trainer, content: list[Encoded]) -> tuple[float, float, float]:
    """Share of chats that are all right, mean loss of a token, share of drafted tokens that greedy decoding accepts."""
    right = total = loss = tokens = agreed = drafted = 0.0
    for placed in packed(content, trainer.args.rows, trainer.args.length):
        batch = assemble(placed, trainer.args.length)
        hidden, _, x, rows = trainer.hidden(batch)
        logits = trainer.logits(hidden, batch.at)
        best = logits.argmax(-1)
        wrong = torch.zeros(len(batch.samples), dtype=torch.long).index_add_(
            0, batch.owner, (best != batch.wanted).long()
        )
        right += float((wrong == 0).sum())
        total += len(batch.samples)
        loss += float(F.cross_entropy(logits, batch.wanted, reduction="sum"))
        tokens += len(batch.wanted)
        states = trainer.mtp(trainer.p, hidden, F.pad(x, (0, 0, 0, 1))[:, 1:], rows)
        # A draft is made from a token's state and the token after it, so there is none for an answer's first token.
        later = torch.cat((torch.tensor([False]), batch.owner[1:] == batch.owner[:-1]))
        agreed += float((trainer.logits(states, batch.at - 1).argmax(-1) == best)[later].sum())
        drafted += float(later.sum())
    return right / total, loss / tokens, agreed / drafted


def held_out(trainer: Trainer, count: int) -> dict[str, dict[str, float]]:
    """Task -> accuracy per level and split, loss and the head's acceptance."""
    out = {}
    for task in TASKS:
        results: dict[str, float] = {}
        for level in (0, 2):
            for split in (NEW_VALUES, NEW_WORDING):
                right, loss, accepted = accuracy(trainer, samples(trainer, task, level, split, count))
                results[f"{split} {level}"] = round(right, 3)
        out[task] = {**results, "loss": round(loss, 4), "accepted": round(accepted, 3)}
    return out
