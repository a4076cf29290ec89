"""Chats -> token rows of one length, several chats in a row."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from chats import Chat
from pictures import MERGE, patches_of
from tokenizers import Tokenizer

IMAGE = "<|image_pad|>"


@dataclass
class Encoded:
    """ids: prompt, then target. first: index of the first target token. positions: time, height and width."""

    chat: Chat
    ids: list[int]
    first: int
    positions: list[list[int]]
    picture: tuple[int, tuple[int, int], torch.Tensor] | None = None
    task: str = ""
    level: int = 0


@dataclass
class Batch:
    """Rows [B, T]. at, wanted, weight, owner: of every position whose next token is to be learned, its index in the
    flattened rows, that token, its weight, and the number of its chat. pictures: index of the first embedding, grid,
    patches."""

    ids: torch.Tensor
    chats: torch.Tensor
    positions: torch.Tensor
    at: torch.Tensor
    wanted: torch.Tensor
    weight: torch.Tensor
    owner: torch.Tensor
    samples: list[Encoded] = field(default_factory=list)
    pictures: list[tuple[int, tuple[int, int], torch.Tensor]] = field(default_factory=list)


def encode(tokenizer: Tokenizer, chat: Chat, exact: bool = False) -> Encoded:
    """Tokens and positions of a chat; a picture's place holder becomes as many tokens as it has embeddings.

    exact: as in pictures.patches_of.
    """
    prompt = tokenizer.encode(chat.prompt(), add_special_tokens=False).ids
    target = tokenizer.encode(chat.target(), add_special_tokens=False).ids
    picture = None
    if chat.picture is None:
        line = list(range(len(prompt) + len(target)))
        positions = [line, line, line]
    else:
        grid, patches = patches_of(chat.picture, exact)
        height, width = grid[0] // MERGE, grid[1] // MERGE
        at = prompt.index(tokenizer.token_to_id(IMAGE))
        prompt[at : at + 1] = [prompt[at]] * (height * width)
        picture = (at, grid, patches)
        after = range(
            at + max(height, width), at + max(height, width) + len(prompt) + len(target) - at - height * width
        )
        blocks = (
            [at] * (height * width),
            [at + row for row in range(height) for _ in range(width)],
            [at + column for _ in range(height) for column in range(width)],
        )
        positions = [[*range(at), *block, *after] for block in blocks]
    return Encoded(chat, prompt + target, len(prompt), positions, picture)


def pack(draw: Callable[[], Encoded], rows: int, length: int, patience: int = 8) -> Batch:
    """Draws chats into `rows` rows until `patience` of them in a row found no room."""
    room = [length] * rows
    placed: list[list[Encoded]] = [[] for _ in range(rows)]
    refused = 0
    while refused < patience:
        sample = draw()
        fitting = [row for row in range(rows) if room[row] >= len(sample.ids)]
        if not fitting:
            refused += 1
            continue
        row = min(fitting, key=lambda index: room[index])
        placed[row].append(sample)
        room[row] -= len(sample.ids)
    return assemble(placed, length)


def assemble(placed: list[list[Encoded]], length: int) -> Batch:
    """A batch of these chats, row by row."""
    rows = len(placed)
    ids, chats = torch.zeros(rows, length, dtype=torch.long), torch.full((rows, length), -1)
    positions = torch.zeros(3, rows, length, dtype=torch.long)
    at: list[int] = []
    wanted: list[int] = []
    weight: list[float] = []
    owner: list[int] = []
    samples: list[Encoded] = []
    pictures = []
    for row, content in enumerate(placed):
        start = 0
        for sample in content:
            end, number = start + len(sample.ids), len(samples)
            ids[row, start:end] = torch.tensor(sample.ids)
            positions[:, row, start:end] = torch.tensor(sample.positions)
            chats[row, start:end] = number
            base = row * length + start
            answer = range(sample.first, len(sample.ids))
            at += [base + index - 1 for index in answer]
            wanted += sample.ids[sample.first :]
            # A story of 200 tokens weighs as much as ten answers of two, not a hundred.
            weight += [len(answer) ** -0.5] * len(answer)
            owner += [number] * len(answer)
            if sample.picture is not None:
                pictures.append((base + sample.picture[0], *sample.picture[1:]))
            samples.append(sample)
            start = end
    return Batch(
        ids,
        chats,
        positions,
        torch.tensor(at),
        torch.tensor(wanted),
        torch.tensor(weight),
        torch.tensor(owner),
        samples,
        pictures,
    )


def step_random(seed: int, step: int, rank: int) -> random.Random:
    """The random stream of one step of one process, so that a resumed run sees what an uninterrupted one would."""
    return random.Random(f"{seed}/{step}/{rank}")
